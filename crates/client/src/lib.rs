//! Asking an agent for GPUs and keeping what it granted.
//!
//! [`Client`] speaks to one [`Endpoint`] and has a typed call for every route. [`Client::wait_until_granted`] asks, waits its
//! turn and hands out a [`LeaseGuard`], which renews the lease until it is released, dropped or lost. [`Client::events`]
//! follows what happens, [`Client::hold`] makes an open connection the lease.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use gpupool_client::{Client, Progress, WaitOptions};
//!
//! let client = Client::new("http://localhost:8000".parse()?)?;
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

mod admin;
mod backoff;
mod call;
mod client;
mod endpoint;
mod error;
mod events;
mod facts;
mod guard;
mod hold;
mod key;
mod leases;
pub mod limits;
mod random;
mod sse;
mod tls;
mod waiting;

pub use client::{Client, ClientBuilder};
pub use endpoint::{DEFAULT as DEFAULT_ENDPOINT, Endpoint};
pub use error::{ClientError, Lost};
pub use events::{EventId, Events};
pub use facts::{HistoryQuery, UsageBy};
pub use guard::LeaseGuard;
pub use hold::{Hold, HoldEnd};
pub use key::{IdempotencyKey, Secret};
pub use leases::LeaseQuery;
pub use waiting::{Progress, WaitOptions};
