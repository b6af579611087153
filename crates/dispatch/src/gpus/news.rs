//! What becomes of the GPUs of a run.

use gpupool_api::lease::{Lease, LeaseDevice};

/// What became of a place, or of the agent.
#[derive(Debug, Clone, PartialEq)]
pub enum GpuNews {
    /// Workers may be started on this now.
    Granted(Granted),
    /// The workers of this place must stop now: within five seconds the agent kills what runs under the lease. Another one is
    /// asked for, and told when it is granted.
    Lost {
        /// Which place.
        place: usize,
        /// Why, for people.
        why: String,
    },
    /// It is waited for.
    Waiting {
        /// Which place.
        place: usize,
        /// How it goes, for people.
        text: String,
    },
    /// It is not granted, and not asked for any more: it can never be, or the agent does not want to.
    Refused {
        /// Which place.
        place: usize,
        /// Why, for people.
        why: String,
    },
    /// Good to know, for people: the agent is away, or back, or will take something back soon.
    Note(String),
}

/// A lease of a place.
#[derive(Debug, Clone, PartialEq)]
pub struct Granted {
    /// Which place; the same for all leases it ever has.
    pub place: usize,
    /// The number of the lease.
    pub lease: u64,
    /// Its token, which grows with every grant: what workers write can be fenced by it.
    pub token: u64,
    /// What it holds.
    pub devices: Vec<LeaseDevice>,
    /// What to set in the environment of its workers; `None` means the variable must not be set.
    pub env: Vec<(String, Option<String>)>,
}

impl Granted {
    pub(super) fn new(place: usize, lease: Lease) -> Self {
        let token = lease.token.unwrap_or_default();
        Self { place, lease: lease.id, token, devices: lease.devices, env: lease.env.into_iter().collect() }
    }

    /// The numbers of its devices.
    pub fn gpu_ids(&self) -> Vec<u32> {
        self.devices.iter().map(|device| device.gpu_id).collect()
    }
}
