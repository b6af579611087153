//! GPUs from the pool: a run wishes for some, and holds leases on them for as long as it lives.
//!
//! [`GpuLeaseManager`] asks an agent of this machine for each GPU on its own, so that work begins on the first one while others are
//! still waited for. It says by [`GpuEvent`] what workers may be started on, and what they must leave: a lease that is lost is
//! asked for anew. Everything is given back when it is stopped or dropped. Where the whole process
//! is killed the agent sees its end: over the Unix socket it watches the process, over TCP a connection.
//!
//! A worker that runs under a lease is told to the agent ([`GpuLeaseManager::attach_process`]) and gets the environment of the lease
//! ([`GrantedLease::env`]). Its processes are known to be the lease's by the control group they are in, where the agent can make
//! one, and else by descending from us with an environment that names the lease; so several workers can share one lease, and
//! several leases one device.

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

// Which GPUs a run wishes for.

/// The GPUs a run wishes for. Each is asked for on its own, and has a place of its own, counted from 0.
///
/// Parts of GPUs are placed by the strategy of the body, each on its own: with `best-fit`, the agent's choice for parts, two
/// halves come from one GPU where they fit; `worst-fit` spreads them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuRequest {
    /// What is asked for at each place.
    pub body: RequestBody,
    /// How many of them. Where `gpu_ids` names some, it must be 0 or as many as these.
    pub leases: usize,
    /// Exactly these GPUs, one place each; any, where it is empty.
    pub gpu_ids: Vec<u32>,
}

impl GpuRequest {
    /// What is asked for, place by place.
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
            return Err(wrong("the number of GPUs", count.to_string(), &format!("{named}, as many as are named")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.gpu_ids.iter().find(|id| !seen.insert(**id)) {
            return Err(wrong("gpu_ids", format!("{:?}", self.gpu_ids), &format!("each once, and {twice} is twice")));
        }
        if !self.body.select.gpu_ids.is_empty() {
            return Err(wrong(
                "select.gpu_ids",
                format!("{:?}", self.body.select.gpu_ids),
                "empty where GPUs are named",
            ));
        }
        let on = |id: &u32| {
            let select = SelectBody { gpu_ids: vec![GpuId(*id)], ..self.body.select.clone() };
            RequestBody { select, ..self.body.clone() }
        };
        Ok(self.gpu_ids.iter().map(on).collect())
    }
}

/// A lease of a place.
#[derive(Debug, Clone, PartialEq)]
pub struct GrantedLease {
    /// Which place; the same for all leases it ever has.
    pub slot: usize,
    /// The number of the lease.
    pub lease: u64,
    /// Its token, which grows with every grant: what workers write can be fenced by it.
    pub token: u64,
    /// What it holds.
    pub devices: Vec<LeaseDevice>,
    /// What to set in the environment of its workers; `None` means the variable must not be set.
    pub env: Vec<(String, Option<String>)>,
}

impl GrantedLease {
    pub(super) fn new(slot: usize, lease: LeaseBody) -> Self {
        let token = lease.token.unwrap_or_default();
        Self { slot, lease: lease.id, token, devices: lease.devices, env: lease.env.into_iter().collect() }
    }

    /// The numbers of its devices.
    pub fn gpu_ids(&self) -> Vec<u32> {
        self.devices.iter().map(|device| device.gpu_id).collect()
    }
}

// What can go wrong with GPUs from the pool, by what the caller can do about it.

/// Why something about GPUs was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The wish makes no sense: change it.
    #[error("{field} is {value}, and must be {allowed}")]
    Request {
        /// Which part of it.
        field: &'static str,
        /// What it was.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The lease is not held any more: wait for the next one.
    #[error("lease {lease} is not held any more")]
    NotHeld {
        /// Which.
        lease: u64,
    },
    /// The agent said no, or nobody answers.
    #[error(transparent)]
    Agent(#[from] ClientError),
    /// The agent does not answer: try again later, or go on without.
    #[error("the agent did not answer within {} s", AGENT_REPLY_TIMEOUT.as_secs())]
    Silent,
    /// The GPUs are being given back.
    #[error("the GPUs are being given back")]
    Stopped,
    /// The system does not let us have a thread for it.
    #[error("cannot start the thread that keeps GPUs ({0})")]
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
    fn each_gpu_is_asked_for_on_its_own() {
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
    fn a_wish_that_cannot_be_is_refused_with_what_is_allowed() {
        let cases: [(usize, &[u32], &str); 4] = [
            (0, &[], "the number of GPUs is 0, and must be 1 or more"),
            (3, &[0, 1], "the number of GPUs is 3, and must be 2, as many as are named"),
            (0, &[1, 2, 1], "gpu_ids is [1, 2, 1], and must be each once, and 1 is twice"),
            (5_000, &[], "the number of GPUs is 5000, and must be at most 1024"),
        ];
        for (leases, gpu_ids, says) in cases {
            assert_eq!(split_request(leases, gpu_ids).unwrap_err(), says);
        }
    }
}
