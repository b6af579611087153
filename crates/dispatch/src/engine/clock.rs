//! The time workers count by, and ours.

use std::time::{Duration, Instant};

/// The time of the counters, by our clock.
#[derive(Debug)]
pub(super) struct Clock {
    instant: Instant,
    nanos: u64,
}

impl Clock {
    pub fn new() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        Self { instant: Instant::now(), nanos }
    }

    /// No later than now, whatever a worker wrote.
    pub fn of(&self, nanos: u64, now: Instant) -> Option<Instant> {
        let since = nanos.checked_sub(self.nanos)?;
        self.instant.checked_add(Duration::from_nanos(since)).map(|at| at.min(now))
    }
}
