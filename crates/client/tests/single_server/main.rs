//! The client of one agent against scripted servers.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod responses;
mod stream_resumption;
mod waiting_and_holding;
