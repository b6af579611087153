//! The processes of the machine, looked up once for all jobs that are due.

use std::time::{Duration, Instant};

use crate::limits::{LONGEST_TREE_AGE, SHORTEST_TREE_PAUSE, TREE_COST_SHARE};
use crate::process::{Census, ProcFs};

/// The last look at all processes.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) procfs: ProcFs,
    census: Census,
    taken: Option<Instant>,
    /// What the last look cost.
    cost: Duration,
    has_failed: bool,
}

impl Table {
    pub(super) fn new(procfs: ProcFs) -> Self {
        Self { procfs, census: Census::default(), taken: None, cost: Duration::ZERO, has_failed: false }
    }

    /// All processes, as they were at most so long ago; `None` if they cannot be looked at now.
    pub(super) fn at_most(&mut self, age: Duration) -> Option<&Census> {
        if self.taken.is_some_and(|taken| taken.elapsed() <= age) {
            return Some(&self.census);
        }
        let begun = Instant::now();
        match Census::take(&self.procfs) {
            Ok(census) => {
                self.census = census;
                self.taken = Some(begun);
                self.cost = begun.elapsed();
                self.has_failed = false;
                Some(&self.census)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(%error, "the processes cannot be looked at; jobs may pass their bounds meanwhile");
                }
                self.taken = None;
                None
            }
        }
    }

    /// How old the table may be where only memory is looked at: what keeps its cost small.
    pub(super) fn age_for_memory(&self) -> Duration {
        (self.cost * TREE_COST_SHARE).clamp(SHORTEST_TREE_PAUSE, LONGEST_TREE_AGE)
    }
}
