//! What must hold for any bytes, from the tests of the crates that read them.

#[path = "../../crates/devices/tests/fuzz/fuzzed.rs"]
pub mod devices;
