//! GPU leases of a run, held until the run ends.
//!
//! [`GpuLeaseManager`] requests each GPU separately from an agent of this machine, so that work starts on the first
//! grant while other requests wait. [`GpuEvent`] reports on which leases workers may start and which they must leave; a
//! lost lease is requested again. Stopping or dropping the manager releases every lease. If the process is killed, the
//! agent notices: over the Unix socket it watches the process, over TCP a connection.
//!
//! A worker under a lease is attached to it ([`GpuLeaseManager::attach_process`]) and gets its environment
//! ([`GrantedLease::env`]). The agent recognizes the lease's processes by their control group, or else as descendants
//! of this process with an environment that names the lease. Several workers can therefore share a lease, and several
//! leases a device.

mod events;
mod lease_slot;
mod manager;

use std::collections::BTreeSet;
use std::io;

use gpupool_api::lease::{LeaseBody, LeaseDevice};
use gpupool_api::{RequestBody, SelectBody};
use gpupool_client::ClientError;
use gpupool_core::GpuId;

pub use events::{GpuEvent, GpuEventReceiver};
pub use manager::{GpuLeaseManager, GpuMemoryUsage};

use crate::limits::{AGENT_REPLY_TIMEOUT, MAX_GPUS};

// The GPU request.

/// Request for GPUs. Each GPU is requested separately, in a lease slot of its own, counted from 0.
///
/// Each fraction of a GPU is placed by the strategy of the body: `best-fit`, the agent's default for fractions, places
/// two halves on one GPU if they fit; `worst-fit` spreads them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuRequest {
    /// Body of the request for each slot.
    pub body: RequestBody,
    /// Number of leases; 0 or the number of `gpu_ids` if these are set.
    pub leases: usize,
    /// Exactly these GPUs, one per slot; any GPUs if empty.
    pub gpu_ids: Vec<u32>,
}

impl GpuRequest {
    /// Returns the request body of each slot.
    pub(super) fn request_bodies(self) -> Result<Vec<RequestBody>, GpuError> {
        let wrong = |field, value: String, allowed: &str| GpuError::Request { field, value, allowed: allowed.into() };
        let (named, count) = (self.gpu_ids.len(), self.leases);
        if named.max(count) > MAX_GPUS {
            return Err(wrong("the number of GPUs", named.max(count).to_string(), &format!("at most {MAX_GPUS}")));
        }
        if named == 0 {
            if count == 0 {
                return Err(wrong("the number of GPUs", "0".into(), "1 or more"));
            }
            return Ok(vec![self.body; count]);
        }
        if count != 0 && count != named {
            return Err(wrong("the number of GPUs", count.to_string(), &format!("{named}, the number of named GPUs")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.gpu_ids.iter().find(|id| !seen.insert(**id)) {
            return Err(wrong(
                "gpu_ids",
                format!("{:?}", self.gpu_ids),
                &format!("a list without duplicates; {twice} occurs twice"),
            ));
        }
        if !self.body.select.gpu_ids.is_empty() {
            return Err(wrong("select.gpu_ids", format!("{:?}", self.body.select.gpu_ids), "empty if GPUs are named"));
        }
        let on = |id: &u32| {
            let select = SelectBody { gpu_ids: vec![GpuId(*id)], ..self.body.select.clone() };
            RequestBody { select, ..self.body.clone() }
        };
        Ok(self.gpu_ids.iter().map(on).collect())
    }
}

/// A granted lease of a slot.
#[derive(Debug, Clone, PartialEq)]
pub struct GrantedLease {
    /// Slot of the lease, the same for all its successive leases.
    pub slot: usize,
    /// Lease id.
    pub lease: u64,
    /// Fencing token, which grows with every grant.
    pub token: u64,
    /// Leased devices.
    pub devices: Vec<LeaseDevice>,
    /// Environment for the lease's workers; `None` removes a variable.
    pub env: Vec<(String, Option<String>)>,
}

impl GrantedLease {
    pub(super) fn new(slot: usize, lease: LeaseBody) -> Self {
        let token = lease.token.unwrap_or_default();
        Self { slot, lease: lease.id, token, devices: lease.devices, env: lease.env.into_iter().collect() }
    }

    /// Returns the numbers of the leased devices.
    pub fn gpu_ids(&self) -> Vec<u32> {
        self.devices.iter().map(|device| device.gpu_id).collect()
    }
}

// Errors of GPU leases, by the caller's options.

/// Error of a GPU lease operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// A field of the request is invalid.
    #[error("{field} is {value}; it must be {allowed}")]
    Request {
        /// Field of the request.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// The lease has ended; wait for the next grant.
    #[error("lease {lease} has ended")]
    NotHeld {
        /// Lease id.
        lease: u64,
    },
    /// The agent refused, or cannot be reached.
    #[error(transparent)]
    Agent(#[from] ClientError),
    /// The agent does not reply; retry later, or continue without.
    #[error("the agent did not reply within {} s", AGENT_REPLY_TIMEOUT.as_secs())]
    Silent,
    /// The manager is releasing its leases.
    #[error("the GPU leases are being released")]
    Stopped,
    /// The manager's thread could not be started.
    #[error("cannot start the thread for GPU leases: {0}")]
    System(#[from] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_request(leases: usize, gpu_ids: &[u32]) -> Result<Vec<RequestBody>, String> {
        let body = RequestBody { fraction: Some(0.5), ..RequestBody::default() };
        GpuRequest { body, leases, gpu_ids: gpu_ids.to_vec() }.request_bodies().map_err(|error| error.to_string())
    }

    #[test]
    fn each_gpu_has_its_own_request() {
        let any = split_request(3, &[]).unwrap();
        assert!(any.len() == 3 && any.iter().all(|body| body.select.gpu_ids.is_empty()), "{any:#?}");
        for count in [0, 2] {
            let named = split_request(count, &[2, 0]).unwrap();
            let ids: Vec<_> = named.iter().map(|body| body.select.gpu_ids.clone()).collect();
            assert_eq!(ids, [vec![GpuId(2)], vec![GpuId(0)]]);
            assert!(named.iter().all(|body| body.fraction == Some(0.5)), "{named:#?}");
        }
    }

    #[test]
    fn an_invalid_request_is_refused_with_the_allowed_values() {
        let cases: [(usize, &[u32], &str); 4] = [
            (0, &[], "the number of GPUs is 0; it must be 1 or more"),
            (3, &[0, 1], "the number of GPUs is 3; it must be 2, the number of named GPUs"),
            (0, &[1, 2, 1], "gpu_ids is [1, 2, 1]; it must be a list without duplicates; 1 occurs twice"),
            (5_000, &[], "the number of GPUs is 5000; it must be at most 1024"),
        ];
        for (leases, gpu_ids, expected) in cases {
            assert_eq!(split_request(leases, gpu_ids).unwrap_err(), expected);
        }
    }
}
