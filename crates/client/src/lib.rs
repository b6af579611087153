//! Requests GPUs and holds what is granted, from one server or from many as one pool.
//!
//! [`Client`] chooses among endpoints, waits at all of them if none has capacity, and returns a [`HeldLease`], which
//! renews itself until it is released, dropped or lost. [`AgentClient`] talks to one [`Endpoint`] and has a typed call
//! for every route: [`AgentClient::wait_until_granted`] requests and waits there, [`AgentClient::events`] streams
//! events, [`AgentClient::hold_lease`] ties a lease to an open connection. [`local`] is for programs that start work on
//! this machine.
//!
//! ```no_run
//! # async fn train() {}
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use gpupool_client::{Client, RequestBody};
//!
//! let client = Client::builder().endpoints("http://gpu1:8000,http://gpu2:8000").build()?;
//! client.start().await?;
//! let lease = client.request(RequestBody { fraction: Some(0.5), ..Default::default() }).await?;
//! println!("{} for {}", lease.global_gpu_id().unwrap_or_default(), lease.worker_id());
//! tokio::select! {
//!     lost = lease.wait_until_lost() => println!("stop: {lost}"),
//!     () = train() => {}
//! }
//! lease.release().await?;
//! client.stop().await;
//! # Ok(())
//! # }
//! ```
//!
//! All calls need a Tokio runtime, and background tasks end with it: a lease that was not released by then ends with
//! its ttl.

#![warn(missing_docs, unreachable_pub)]

#[cfg(test)]
extern crate self as gpupool_client;

mod agent;
mod client;
mod endpoint;
mod error;
pub mod limits;
pub mod local;
mod local_transport;
mod random;
pub mod transport;

pub use agent::{
    AgentClient, AgentClientBuilder, EventId, EventStream, HistoryQuery, IdempotencyKey, LeaseGuard, LeaseHold,
    LeaseHoldEnd, LeaseQuery, UsageGrouping, WaitOptions, WaitProgress,
};
pub use client::{
    Balancing, CircuitBreakerStats, Client, ClientBuilder, DegradationLevel, DegradationStatus, DetailedMetrics,
    EndpointDetail, EndpointHealthSummary, EndpointInfo, EndpointMetrics, FrequentUpdates, GlobalGpu, GpuAssignment,
    HeldLease, LeaseAuthority, LoadBalancerStats, ObservedGpu, PoolHealth, PoolStatus, PoolSummary, RecoveryStatus,
    StatusUpdate, StatusUpdateStream, UsageThresholds,
};
pub use endpoint::{DEFAULT_ADDRESS as DEFAULT_ENDPOINT, Endpoint};
pub use error::{ClientError, LeaseLost};
pub use gpupool_api::{RequestBody, SelectBody};
pub use gpupool_config::SecretString;
pub use random::seed_randomness;

/// Compiles the program of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/client.md")]
mod guide {}
