//! How fast things go: over the last seconds, not since the beginning.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How far back a rate looks.
const WINDOW: Duration = Duration::from_secs(10);
/// How often a count is remembered.
const STEP: Duration = Duration::from_millis(500);

/// Rates by name.
#[derive(Debug, Default)]
pub(super) struct Rates {
    counts: HashMap<String, VecDeque<(Instant, u64)>>,
}

impl Rates {
    /// How many a second, when it is so many now.
    pub fn of(&mut self, name: &str, count: u64, now: Instant) -> f64 {
        let counts = match self.counts.get_mut(name) {
            Some(counts) => counts,
            None => self.counts.entry(name.to_owned()).or_default(),
        };
        if counts.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= STEP) {
            counts.push_back((now, count));
        }
        while counts.len() > 2 && counts.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > WINDOW) {
            counts.pop_front();
        }
        let Some((since, before)) = counts.front() else { return 0.0 };
        let secs = now.saturating_duration_since(*since).as_secs_f64();
        if secs > 0.0 { count.saturating_sub(*before) as f64 / secs } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_last_seconds() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        assert_eq!(rates.of("x", 0, begun), 0.0);
        assert_eq!(rates.of("x", 10, begun + Duration::from_secs(5)), 2.0);
        let mut last = 0.0;
        for second in 6..60 {
            last = rates.of("x", 10, begun + Duration::from_secs(second));
        }
        assert_eq!(last, 0.0, "nothing went on for long");
    }
}
