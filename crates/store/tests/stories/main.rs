//! Stories about a store: killed while it commits, full, read-only, damaged, newer, another's; its trail and its tokens.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
mod full_disk;
mod killed;
mod opening;
mod same_rows;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
#[path = "../../../core/tests/support/mod.rs"]
mod support;
mod tokens;
mod trail;
