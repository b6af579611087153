//! Reasons why an agent cannot start.

use std::io;

use crate::net::{NetError, TlsError};

/// A reason why an agent cannot start, by its remedy.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The state cannot be opened.
    #[error(transparent)]
    Store(#[from] gpupool_store::StoreError),
    /// The state cannot be read.
    #[error(transparent)]
    Read(gpupool_store::ReadError),
    /// A socket cannot be opened.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The simulated devices are specified wrongly.
    #[error("--simulate: {0}")]
    Simulate(gpupool_devices::simulated::SimulationSpecError),
    /// The source of readings is unknown.
    #[error(transparent)]
    Backend(#[from] gpupool_devices::UnknownBackend),
    /// The state holds live leases of a node of another name.
    #[error(
        "the state holds live leases of node {old:?} ({leases}), but server.node_name is {new:?}; \
         set server.node_name to {old:?}, or start once with that name and end those leases first"
    )]
    NodeRenamed {
        /// The name of the node that has the leases.
        old: String,
        /// The configured name.
        new: String,
        /// The leases.
        leases: String,
    },
    /// A page of the documentation has the path of another route.
    #[error("{setting}: {path} is the path of a route already; choose another path")]
    PageTaken {
        /// The setting.
        setting: &'static str,
        /// The path that is taken.
        path: String,
    },
    /// A thread or the runtime cannot be started.
    #[error("cannot start: {0}")]
    Start(io::Error),
}
