//! Asking an agent for GPUs and keeping what it granted.
//!
//! [`AgentClient`] speaks to one [`Endpoint`] and has a typed call for every route. [`AgentClient::wait_until_granted`] asks, waits its
//! turn and hands out a [`LeaseGuard`], which renews the lease until it is released, dropped or lost. [`AgentClient::events`]
//! follows what happens, [`AgentClient::hold`] makes an open connection the lease.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use gpupool_client::{AgentClient, Progress, WaitOptions};
//!
//! let client = AgentClient::new("http://localhost:8000".parse()?)?;
//! let half = gpupool_api::RequestBody { fraction: Some(0.5), ..Default::default() };
//! let shown = |progress: Progress| eprintln!("{progress}");
//! let lease = client.wait_until_granted(half, WaitOptions::default(), shown).await?;
//! println!("GPU {}", lease.lease().devices[0].gpu_id);
//! lease.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Everything needs a Tokio runtime, and tasks end with it: what was not released by then ends with its ttl.

#[cfg(test)]
extern crate self as gpupool_client;

mod agent;
mod backoff;
mod endpoint;
mod error;
mod key;
pub mod limits;
mod random;
mod tls;
pub mod transport;

pub use agent::{
    AgentClient, AgentClientBuilder, EventId, Events, HistoryQuery, Hold, HoldEnd, LeaseGuard, LeaseQuery, Progress,
    UsageBy, WaitOptions,
};
pub use endpoint::{DEFAULT as DEFAULT_ENDPOINT, Endpoint};
pub use error::{ClientError, Lost};
pub use key::{IdempotencyKey, Secret};
