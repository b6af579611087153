//! What agent and clients say to each other over HTTP, as types: one place for the names and units of both sides.
//!
//! Times are ISO 8601 with an offset, memory is in MiB (`_mb` in the statistics routes, whose names are older than this
//! project, means the same), seconds may have fractions. The request body is [`gpupool_core::body::RequestBody`].

#![warn(missing_docs)]

pub mod events;
pub mod history;
pub mod lease;
pub mod node;
pub mod pool;
pub mod problem;
pub mod simulate;
pub mod stats;
pub mod tokens;
pub mod view;
mod whole;

pub use gpupool_core::body::{RequestBody, SelectBody};

/// The version of the `/v1` routes that this crate describes.
pub const API_VERSION: &str = "1";

/// The header that makes a retried request the same request.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Names of the variables a job finds in its environment, besides the vendor's.
pub mod job_environment {
    /// The number of its lease.
    pub const LEASE: &str = "GPUPOOL_LEASE";
    /// The fencing token of its lease: grows with every grant on a node, so what it writes can be fenced by it.
    pub const FENCING_TOKEN: &str = "GPUPOOL_FENCING_TOKEN";
    /// Where its agent answers; set where one of several was chosen.
    pub const LEASE_ENDPOINT: &str = "GPUPOOL_LEASE_ENDPOINT";
    /// The numbers of its devices, comma between.
    pub const GPU_IDS: &str = "GPUPOOL_GPU_IDS";
    /// How much of each device it was given, 0.001..=1.
    pub const FRACTION: &str = "GPUPOOL_FRACTION";
    /// How much memory of each device it was given, in MiB; not set where the device's memory is unknown.
    pub const MEMORY_MIB: &str = "GPUPOOL_MEMORY_MIB";
}
