//! Which process of this host a driver means when it names a number.

use std::sync::Arc;

/// Who a process on a device is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Who {
    /// Nobody looked yet.
    #[default]
    NotLooked,
    /// A process of this host.
    Known(Arc<ProcessFacts>),
    /// It cannot be told; the text says why.
    Unattributed(Arc<str>),
}

/// What the host knows of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    /// When it started, in clock ticks since boot; with the pid it is unique until the next boot.
    pub start_ticks: u64,
    /// Whose it is.
    pub uid: u32,
    /// The name of that user, where the machine knows one.
    pub user: Option<Arc<str>>,
    /// Its command line.
    pub command: Arc<str>,
    /// Its control group.
    pub cgroup: Option<Arc<str>>,
}
