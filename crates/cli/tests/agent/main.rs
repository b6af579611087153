//! The agent, end to end: the real binary with simulated devices, used over its sockets, killed, starved and abused.
//!
//! All tests are one program, so that it is linked once. `scripts/soak` runs the long forms.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod abuse;
mod access;
mod chaos;
mod claims;
mod client;
mod common;
mod contract;
mod durability;
mod events;
mod following;
mod hung_disk;
mod node_parameter;
mod schema;
mod waiting;
