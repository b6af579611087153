//! Counts of events.

/// Counts that show whether the simulation exercises enough.
#[derive(Debug, Default, Clone, Copy)]
pub struct EventCounts {
    pub exchanges: u64,
    pub granted: u64,
    pub granted_waiting: u64,
    pub errors: u64,
    pub cancelled: u64,
    pub lost: u64,
    /// Active leases without a holder.
    pub orphans: u64,
    /// Second active leases of a call, caused by a restart of a server.
    pub restarts: u64,
}

impl EventCounts {
    pub fn add(&mut self, other: &Self) {
        let Self { exchanges, granted, granted_waiting, errors, cancelled, lost, orphans, restarts } = other;
        self.exchanges += exchanges;
        self.granted += granted;
        self.granted_waiting += granted_waiting;
        self.errors += errors;
        self.cancelled += cancelled;
        self.lost += lost;
        self.orphans += orphans;
        self.restarts += restarts;
    }
}
