//! How long to pause before trying again: doubling, with chance in it so that many clients do not come back at once.

use std::time::Duration;

use crate::limits::{PAUSE_FIRST, PAUSE_MOST};
use crate::random;

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
    pub fn between(first: Duration, most: Duration) -> Self {
        Self { first, most, tries: 0 }
    }

    /// The next pause.
    pub fn next(&mut self) -> Duration {
        let pause = self.pause(random::fraction());
        self.tries = self.tries.saturating_add(1);
        pause
    }

    /// Waits for the next pause, but never past an instant.
    pub async fn pause_until(&mut self, latest: tokio::time::Instant) {
        let next = tokio::time::Instant::now() + self.next();
        tokio::time::sleep_until(next.min(latest)).await;
    }

    /// Starts over: it worked.
    pub fn reset(&mut self) {
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
