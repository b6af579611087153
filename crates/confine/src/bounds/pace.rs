//! How long a job may be left alone: until the earliest moment at which it could be over a bound.

use std::time::Duration;

use crate::limits::{LONGEST_LOOK_PAUSE, MEMORY_GROWTH, PROCESS_GROWTH, SHORTEST_LOOK_PAUSE, SHORTEST_TREE_PAUSE};

/// With so many bytes left.
pub(super) fn memory(left: u64) -> Duration {
    at_rate(left, MEMORY_GROWTH).clamp(SHORTEST_LOOK_PAUSE, LONGEST_LOOK_PAUSE)
}

/// With so many processes and threads left.
pub(super) fn processes(left: u64) -> Duration {
    at_rate(left, PROCESS_GROWTH).clamp(SHORTEST_TREE_PAUSE, LONGEST_LOOK_PAUSE)
}

/// With so much processor time left, on so many processors; each look at least takes so long.
pub(super) fn cpu_time(left: Duration, processors: u32, shortest: Duration) -> Duration {
    (left / processors.max(1)).clamp(shortest, LONGEST_LOOK_PAUSE)
}

fn at_rate(left: u64, rate: u64) -> Duration {
    Duration::from_secs(left / rate) + Duration::from_micros(left % rate * 1_000_000 / rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closer_the_shorter() {
        let millis = Duration::from_millis;
        assert_eq!(memory(0), millis(10));
        assert_eq!(memory(1 << 20), millis(10));
        assert_eq!(memory(512 << 20), millis(250));
        assert_eq!(memory(u64::MAX), millis(1000));
        assert_eq!(processes(0), millis(50));
        assert_eq!(processes(50), millis(200));
        assert_eq!(processes(u64::MAX), millis(1000));
        assert_eq!(cpu_time(millis(300), 2, millis(10)), millis(150));
        assert_eq!(cpu_time(Duration::ZERO, 0, millis(50)), millis(50));
        assert_eq!(cpu_time(Duration::MAX, 64, millis(10)), millis(1000));
    }
}
