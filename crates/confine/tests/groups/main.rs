//! Cgroups on the running kernel, and orphaned cgroups of killed programs.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod a_group_holds_its_processes;
mod groups_of_killed_programs_are_removed;
#[path = "../support/mod.rs"]
mod support;
