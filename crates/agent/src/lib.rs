//! The agent: the daemon that shares the GPUs of a node.
//!
//! It has four parts. Requests go from left to right; authority and node send each other only reports and orders:
//!
//! ```text
//!   clients ──▶ net ──▶ http ──┬──▶ node ──reports──▶ authority ──▶ store
//!                              │     ▲                 │   ▲
//!                              │     └─────orders──────┘   │
//!                              └───────────────────────────┘
//! ```
//!
//! - `authority` owns the pool and the store. It decides, commits, publishes and replies. It knows nodes by id and
//!   touches no process, control group or device.
//! - `node` reads devices, attributes processes, watches the holders of leases, and owns the control groups of jobs. It
//!   reports facts to the authority and carries out its orders; both are plain data (`messages`).
//! - `http` holds the routes and decides who may use them. Statistics, attach and simulation go to the node, everything
//!   else to the authority. Routes that must not wait read the snapshot that the authority published last.
//! - `net` accepts connections and identifies their peers.
//!
//! [`serve`] starts the parts in order and ends them in the reverse order. On a single machine all of them run in one
//! process; the messages between node and authority could cross a network.

#![warn(unreachable_pub)]

mod abort_on_panic;
mod authority;
mod clock;
mod error;
mod events;
mod http;
mod identity;
mod limits;
mod messages;
mod metrics;
mod net;
mod node;
mod serve;
mod service_manager;
mod signals;
mod users;
mod visibility;

pub use clock::iso;
pub use error::AgentError;
pub use identity::ANONYMOUS;
pub use serve::{AgentSpec, serve};

/// Parts that benchmarks and tests of the crate use. Not a public interface.
#[doc(hidden)]
pub mod internals {
    pub use crate::clock::now;
    pub use crate::http::metrics::{MetricsFormat, MetricsScrape};
    pub use crate::metrics::Metrics;
    /// The listeners.
    pub mod net {
        pub use crate::net::{
            IncomingBody, ListenSpec, NetError, NetLimits, NetListeners, Peer, PeerCredentials, PeerProcess,
            PeerProcessError, PeerTransport, ServeOutcome, Shutdown, TcpBind, Tls, TlsError, UnixBind,
            raise_open_files,
        };
    }
    pub use crate::node::statistics::{DeviceFilter, Statistics};
}
