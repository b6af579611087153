//! Stories about a store: read-only, damaged, newer, another's; its trail and its tokens.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod opening;
mod same_rows;
#[path = "../../../core/tests/support/mod.rs"]
mod support;
mod tokens;
mod trail;
