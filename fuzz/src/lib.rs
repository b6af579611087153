//! What must hold for any bytes, from the tests of the crates that read them.

#[path = "../../crates/devices/tests/fuzz/fuzz_invariants.rs"]
pub mod devices;
