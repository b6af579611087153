//! Names and numbers that identify things, each a type of its own.

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
    /// A node of the pool, numbered in the order of registration, which is also the order of `first-fit`.
    NodeId(u32)
}

number! {
    /// A device of the pool, numbered across all nodes in the order of registration.
    DeviceId(u32)
}

number! {
    /// A device's small number on its own node, stable across restarts: what people see and type.
    GpuId(u32)
}

number! {
    /// A lease, from the moment it is asked for. Never reused.
    LeaseId(u64)
}

number! {
    /// A fencing token: grows with every grant, never repeats, not across restarts either.
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

/// Whether `labels` holds every pair of `wanted`.
pub fn labels_match(labels: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}
