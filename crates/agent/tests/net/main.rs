//! Listeners: slow, malformed and pipelined clients, TLS, limits and shutdown.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod limits;
mod requests;
mod shutdown;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod socket_file;
mod support;
mod tls;
