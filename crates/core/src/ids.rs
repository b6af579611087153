//! Types for the names and numbers that identify nodes, devices and leases.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Number of a node, in the order of registration, which is also the order of `first-fit`.
    NodeId(u32)
}

number! {
    /// Number of a device across all nodes, in the order of registration.
    DeviceId(u32)
}

number! {
    /// Number of a device on its own node, stable across restarts: the one that people see and type.
    GpuId(u32)
}

number! {
    /// Number of a lease, from its request on. Never reused.
    LeaseId(u64)
}

number! {
    /// Fencing token: grows with every grant and never repeats, not even across restarts.
    Token(u64)
}

impl NodeId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl DeviceId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Free-form `key=value` pairs on nodes, devices and requests.
pub type Labels = BTreeMap<Arc<str>, Arc<str>>;

/// Whether `labels` contains every pair of `wanted`.
pub fn labels_match(labels: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}
