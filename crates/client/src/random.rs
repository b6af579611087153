//! Randomness for keys and pauses, from the kernel: a forked child does not repeat its parent's.

use std::hash::{BuildHasher as _, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};

/// A random number.
pub(crate) fn number() -> u64 {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // A kernel without it: process, time and the standard library's own seed differ between any two calls.
        _ => {
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            RandomState::new().hash_one((std::process::id(), nanos))
        }
    }
}

/// A random number from 0 up to, not including, 1.
pub(crate) fn fraction() -> f64 {
    // 53 bits are what a double holds.
    (number() >> 11) as f64 / (1_u64 << 53) as f64
}
