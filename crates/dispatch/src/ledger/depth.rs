//! How many tasks a worker has at once: enough short ones that it never waits for the next, and never a long one behind
//! another, where somebody else could have it.

use std::time::Duration;

use crate::limits::{AHEAD, DEPTH, SHORT};

/// How fast a worker is.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// How long its tasks take, the last ones counting most; `None` before the first.
    average: Option<Duration>,
    /// Grown step by step, so that one lucky task does not fill the inbox.
    reached: usize,
}

impl Pace {
    /// A task took so long.
    pub fn took(&mut self, took: Duration) {
        self.average = Some(match self.average {
            // A long one counts at once: whatever is behind it waits.
            Some(average) if took < average * 4 => average.mul_f64(0.75) + took.mul_f64(0.25),
            _ => took,
        });
        self.reached = (self.reached.max(1) * 2).min(self.most());
    }

    /// How many tasks it may have at once. `left` tasks wait and no more will come; so many workers share them.
    pub fn depth(&self, left: Option<usize>, workers: usize) -> usize {
        let depth = self.reached.clamp(1, self.most());
        match left {
            // The last ones are spread: nobody takes more than half of its part.
            Some(left) => depth.min((left / (2 * workers)).max(1)),
            None => depth,
        }
    }

    fn most(&self) -> usize {
        match self.average {
            None => 1,
            Some(average) if average > SHORT => 1,
            Some(average) => {
                let ahead = AHEAD.as_nanos() / average.as_nanos().max(1);
                usize::try_from(ahead).unwrap_or(DEPTH).clamp(2, DEPTH)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(times: &[Duration]) -> Pace {
        let mut pace = Pace::default();
        times.iter().for_each(|took| pace.took(*took));
        pace
    }

    #[test]
    fn short_tasks_are_many_at_once_and_long_ones_alone() {
        assert_eq!(Pace::default().depth(None, 4), 1);
        assert_eq!(pace(&[Duration::from_nanos(500); 20]).depth(None, 4), DEPTH);
        assert_eq!(pace(&[Duration::from_micros(100); 20]).depth(None, 4), 80);
        assert_eq!(pace(&[Duration::from_secs(1); 20]).depth(None, 4), 1);
        let mut turned = [Duration::from_micros(1); 21];
        turned[20] = Duration::from_millis(50);
        assert_eq!(pace(&turned).depth(None, 4), 1, "one long task is enough");
    }

    #[test]
    fn the_last_tasks_are_spread() {
        let fast = pace(&[Duration::from_nanos(500); 20]);
        assert_eq!(fast.depth(Some(80), 4), 10);
        assert_eq!(fast.depth(Some(7), 4), 1);
    }
}
