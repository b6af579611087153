//! Properties over random worlds: the rules of `docs/pool.md`, and that no input makes the pool panic.

mod common;
mod nothing_panics;
mod once_broken;
mod rules;
