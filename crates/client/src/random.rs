//! Randomness for keys, from the kernel: a forked child does not repeat its parent's; and pauses with chance in them.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::limits::{PAUSE_FIRST, PAUSE_MOST};

thread_local! {
    /// Where chance is to repeat itself: its state.
    static REPEATED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes chance on this thread repeat itself from a seed, keys included: for simulations that are run again.
pub fn seed_randomness(seed: u64) {
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

// How long to pause before trying again: doubling, with chance in it so that many clients do not come back at once.

/// Pauses between tries, each longer than the one before up to a bound.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    tries: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::between(PAUSE_FIRST, PAUSE_MOST)
    }
}

impl Backoff {
    /// From this pause, doubled each time, up to that one.
    pub(crate) fn between(first: Duration, most: Duration) -> Self {
        Self { first, most, tries: 0 }
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.pause(fraction());
        self.tries = self.tries.saturating_add(1);
        pause
    }

    /// Waits for the next pause, but never past an instant.
    pub(crate) async fn pause_until(&mut self, latest: tokio::time::Instant) {
        let next = tokio::time::Instant::now() + self.next();
        tokio::time::sleep_until(next.min(latest)).await;
    }

    /// Starts over: it worked.
    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }

    /// From half the doubled pause to all of it, by `chance` in 0..1.
    fn pause(&self, chance: f64) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(self.tries).unwrap_or(u32::MAX)).min(self.most);
        doubled.mul_f64(0.5 + chance / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_repeats_itself_from_a_seed_on_one_thread_only() {
        let three = || [number(), number(), number()];
        assert_ne!(three(), three());
        seed_randomness(7);
        let first = three();
        seed_randomness(7);
        assert_eq!(three(), first);
        let elsewhere = std::thread::spawn(move || [number(), number(), number()]);
        assert_ne!(elsewhere.join().unwrap(), first);
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_keep_at_least_half() {
        let pause = |tries, chance| Backoff { tries, ..Backoff::default() }.pause(chance);
        assert_eq!(pause(0, 0.0), PAUSE_FIRST / 2);
        assert_eq!(pause(1, 0.0), PAUSE_FIRST);
        assert_eq!(pause(2, 1.0), PAUSE_FIRST * 4);
        assert_eq!(pause(31, 1.0), PAUSE_MOST);
        assert_eq!(pause(u32::MAX, 1.0), PAUSE_MOST);
    }

    #[test]
    fn two_clients_do_not_come_back_at_the_same_time() {
        let pauses = || (0..8).map(|_| Backoff { tries: 6, ..Backoff::default() }.next()).collect::<Vec<_>>();
        assert_ne!(pauses(), pauses());
    }
}
