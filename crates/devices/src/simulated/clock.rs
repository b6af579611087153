//! Where the time of simulated devices comes from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A clock that goes on only when told to, for tests. Its clones show the same time.
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Lets so much time pass.
    pub fn pass(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(nanos)));
    }

    /// The time it shows.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    /// The clock as [`super::Simulated`] takes it.
    pub fn ticking(&self) -> impl Fn() -> Duration + Send + 'static {
        let clock = self.clone();
        move || clock.now()
    }
}

/// A clock that shows real time, from zero now.
pub fn real_clock() -> impl Fn() -> Duration + Send + 'static {
    let start = Instant::now();
    move || start.elapsed()
}
