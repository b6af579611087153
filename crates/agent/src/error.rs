//! Why an agent cannot start.

use std::io;

use crate::net::{NetError, TlsError};

/// Why an agent cannot start, by what can be done about it.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The state cannot be opened.
    #[error(transparent)]
    Store(#[from] gpupool_store::StoreError),
    /// The state cannot be read.
    #[error(transparent)]
    Read(gpupool_store::ReadError),
    /// It cannot listen.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The devices to simulate make no sense.
    #[error("--simulate: {0}")]
    Simulate(gpupool_devices::simulated::SimulationSpecError),
    /// There is no such source of readings.
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
    /// A page of the documentation was set to be where something else is.
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
