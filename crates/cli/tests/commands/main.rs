//! The other commands through the real binary, and the commands in README and docs.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod admin;
mod api_guide;
mod config;
mod devices;
mod documentation;
#[cfg(feature = "kube")]
mod kube;
mod lease;
mod readme;
mod sim;
mod status;
#[path = "../support/mod.rs"]
mod support;
mod token_and_usage;
mod tutorial;
