//! Randomness for keys and pauses, from the kernel: a forked child does not repeat its parent's.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};

thread_local! {
    /// Where chance is to repeat itself: its state.
    static REPEATED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes chance on this thread repeat itself from a seed, keys included: for simulations that are run again.
pub fn repeat_chance(seed: u64) {
    REPEATED.set(Some(seed));
}

/// A random number.
pub(crate) fn number() -> u64 {
    if let Some(state) = REPEATED.get() {
        let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        REPEATED.set(Some(state));
        return mixed(state);
    }
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

/// Spreads a counter over all numbers (splitmix64).
fn mixed(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// A random number from 0 up to, not including, 1.
pub(crate) fn fraction() -> f64 {
    // 53 bits are what a double holds.
    (number() >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_repeats_itself_from_a_seed_on_one_thread_only() {
        let three = || [number(), number(), number()];
        assert_ne!(three(), three());
        repeat_chance(7);
        let first = three();
        repeat_chance(7);
        assert_eq!(three(), first);
        let elsewhere = std::thread::spawn(move || [number(), number(), number()]);
        assert_ne!(elsewhere.join().unwrap(), first);
    }
}
