//! The node's authority: samples GPUs, grants leases, answers over HTTP.
//!
//! Facts flow one way. The [`sampler`] reads devices and hands readings to the statistics ([`stats`]) and to the owner
//! thread ([`owner`]), which alone holds the pool and the store; the routes ([`http`]) turn requests into commands for it
//! and hand out what is prepared or committed; listeners ([`net`]) know who is at the other end. [`agent`] starts all of
//! it in order and ends it in the reverse order.

pub mod agent;
pub mod clock;
mod ending;
mod error;
pub mod events;
pub mod groups;
pub mod holders;
mod housekeeping;
pub mod http;
pub mod identity;
mod leaving;
pub mod limits;
pub mod metrics;
pub mod net;
mod notify;
pub mod owner;
pub mod sampler;
mod signals;
pub mod simulation;
mod sources;
pub mod stats;
mod users;
mod watching;

pub use agent::{AgentSpec, serve};
pub use error::AgentError;
