//! Invariants for any input, from the tests of the crates that parse it.

#[path = "../../crates/devices/tests/fuzz/fuzz_invariants.rs"]
pub mod devices;
