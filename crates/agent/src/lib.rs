//! The node's authority: samples GPUs, grants leases, answers over HTTP.

pub mod clock;
pub mod sampler;
pub mod simulation;
pub mod stats;
