//! How much of everything happened.

/// What happened, to see that the simulation is worth its time.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub exchanges: u64,
    pub won: u64,
    pub won_waiting: u64,
    pub told: u64,
    pub given_up: u64,
    pub lost: u64,
    /// Leases that became active and were nobody's.
    pub strays: u64,
    /// Two active leases of one call, because a server restarted.
    pub restarts: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        let Self { exchanges, won, won_waiting, told, given_up, lost, strays, restarts } = other;
        self.exchanges += exchanges;
        self.won += won;
        self.won_waiting += won_waiting;
        self.told += told;
        self.given_up += given_up;
        self.lost += lost;
        self.strays += strays;
        self.restarts += restarts;
    }
}
