//! Random numbers from the kernel, so that a forked child does not repeat its parent's keys, and randomized backoff.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::limits::{MAX_RETRY_PAUSE, MIN_RETRY_PAUSE};

thread_local! {
    /// State of the seeded generator of this thread, if it is seeded.
    static SEEDED_STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Seeds the random numbers of this thread, idempotency keys included, so that a simulation can be repeated.
pub fn seed_randomness(seed: u64) {
    SEEDED_STATE.set(Some(seed));
}

/// Returns a random number.
pub(crate) fn random_u64() -> u64 {
    if let Some(state) = SEEDED_STATE.get() {
        let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        SEEDED_STATE.set(Some(state));
        return mix_bits(state);
    }
    let mut bytes = [0; 8];
    match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // For kernels without the call: process, time and the standard library's own seed differ between any two calls.
        _ => {
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            RandomState::new().hash_one((std::process::id(), nanos))
        }
    }
}

/// Spreads a counter over all numbers (splitmix64).
fn mix_bits(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Returns a random number in 0..1.
pub(crate) fn random_fraction() -> f64 {
    // A double holds 53 bits.
    (random_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Pauses between attempts: doubling up to a limit, and randomized so that many clients do not return at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    shortest: Duration,
    longest: Duration,
    tries: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::with_bounds(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE)
    }
}

impl Backoff {
    /// Starts at the shortest pause and doubles it up to the longest.
    pub(crate) fn with_bounds(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest, tries: 0 }
    }

    /// Returns the next pause.
    pub(crate) fn next_pause(&mut self) -> Duration {
        let pause = self.pause_with_chance(random_fraction());
        self.tries = self.tries.saturating_add(1);
        pause
    }

    /// Sleeps for the next pause, but not past an instant.
    pub(crate) async fn pause_until(&mut self, latest: tokio::time::Instant) {
        let next = tokio::time::Instant::now() + self.next_pause();
        tokio::time::sleep_until(next.min(latest)).await;
    }

    /// Starts over after a success.
    pub(crate) fn reset(&mut self) {
        self.tries = 0;
    }

    /// Returns half to all of the doubled pause, depending on `chance` in 0..1.
    fn pause_with_chance(&self, chance: f64) -> Duration {
        let doubled = self.shortest.saturating_mul(1_u32.checked_shl(self.tries).unwrap_or(u32::MAX)).min(self.longest);
        doubled.mul_f64(0.5 + chance / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_random_numbers_on_its_thread_only() {
        let three = || [random_u64(), random_u64(), random_u64()];
        assert_ne!(three(), three());
        seed_randomness(7);
        let shortest = three();
        seed_randomness(7);
        assert_eq!(three(), shortest);
        let elsewhere = std::thread::spawn(move || [random_u64(), random_u64(), random_u64()]);
        assert_ne!(elsewhere.join().unwrap(), shortest);
    }

    #[test]
    fn pauses_double_up_to_a_limit_and_keep_at_least_half() {
        let pause_with_chance = |tries, chance| Backoff { tries, ..Backoff::default() }.pause_with_chance(chance);
        assert_eq!(pause_with_chance(0, 0.0), MIN_RETRY_PAUSE / 2);
        assert_eq!(pause_with_chance(1, 0.0), MIN_RETRY_PAUSE);
        assert_eq!(pause_with_chance(2, 1.0), MIN_RETRY_PAUSE * 4);
        assert_eq!(pause_with_chance(31, 1.0), MAX_RETRY_PAUSE);
        assert_eq!(pause_with_chance(u32::MAX, 1.0), MAX_RETRY_PAUSE);
    }

    #[test]
    fn two_clients_do_not_retry_at_the_same_time() {
        let pauses = || (0..8).map(|_| Backoff { tries: 6, ..Backoff::default() }.next_pause()).collect::<Vec<_>>();
        assert_ne!(pauses(), pauses());
    }
}
