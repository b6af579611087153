//! Properties over random worlds: the rules of `docs/pool.md`, and that nothing from outside makes the pool panic.

mod common;
mod nothing_panics;
mod once_broken;
mod rules;
