//! Requests: GPUs whole or in part, host CPUs and memory, and the terms of the lease.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::Vendor;
use crate::ids::{GpuId, Labels};
use crate::limits;
use crate::units::{Bytes, MilliCpus, Millis, Percent, Share};

/// Isolation between the parts of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IsolationLevel {
    /// None beyond the driver's own.
    #[default]
    None,
    /// Time slicing by the driver.
    TimeSlicing,
    /// NVIDIA's Multi-Process Service.
    Mps,
    /// A MIG instance.
    Mig,
}

/// Rule for choosing among devices that fit. `placement/mod.rs` defines each exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementStrategy {
    /// The lowest-numbered device.
    FirstFit,
    /// The device with the least left over.
    BestFit,
    /// The device with the most left over.
    WorstFit,
    /// The next device after the last one used.
    RoundRobin,
    /// The device with the lowest mean of measured utilization and promised share.
    LoadBalanced,
    /// The device with the lowest memory % + utilization %, promises counted as used.
    LeastUsed,
    /// The BestFit of the FGD paper: the node with the least CPU and GPU left over.
    PaperBestFit,
    /// Fragmentation gradient descent: the node whose fragmentation grows least.
    Fgd,
    /// Ours: fragmentation, GPUs stranded by CPU, card value and model pressure in one sum.
    LeastFragmentation,
}

/// Assigns to the variants of an enum the names that people write for them.
macro_rules! named_variants {
    ($type:ty, $what:literal, $($variant:ident => $name:literal),+ $(,)?) => {
        impl $type {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the name of the variant, as people write it.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::request::FieldError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($name => Ok(Self::$variant),)+
                    _ => Err(Self::Err::new($what, text, concat!("one of", $(" ", $name),+))),
                }
            }
        }
    };
}

pub(crate) use named_variants;

named_variants!(IsolationLevel, "isolation", None => "none", TimeSlicing => "time-slicing", Mps => "mps", Mig => "mig");
named_variants!(
    PlacementStrategy,
    "strategy",
    FirstFit => "first-fit",
    BestFit => "best-fit",
    WorstFit => "worst-fit",
    RoundRobin => "round-robin",
    LoadBalanced => "load-balanced",
    LeastUsed => "least-used",
    PaperBestFit => "paper-best-fit",
    Fgd => "fgd",
    LeastFragmentation => "least-fragmentation",
);

impl PlacementStrategy {
    /// Whether it considers the expected workload.
    pub(crate) const fn looks_ahead(self) -> bool {
        matches!(self, Self::Fgd | Self::LeastFragmentation)
    }

    /// Whether it scores whole nodes.
    pub(crate) const fn scores_nodes(self) -> bool {
        self.looks_ahead() || matches!(self, Self::PaperBestFit)
    }
}

/// Foreign load at or above which a device is not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LoadThresholds {
    pub memory: Percent,
    pub utilization: Percent,
}

impl Default for LoadThresholds {
    fn default() -> Self {
        Self { memory: Percent(80_000), utilization: Percent(90_000) }
    }
}

/// Selector of eligible devices. Empty matches any.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceSelector {
    /// Only devices of this vendor.
    pub vendor: Option<Vendor>,
    /// Only these models, in whole words.
    pub models: Vec<Arc<str>>,
    /// Only devices that can promise at least this much memory.
    pub min_memory: Option<Bytes>,
    /// Only devices with these numbers on their node.
    pub gpu_ids: Vec<GpuId>,
    /// Only devices with these full UUIDs.
    pub uuids: Vec<Arc<str>>,
    /// Only devices with these labels (their own or their node's).
    pub labels: Labels,
}

/// Amount of each GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedAmount {
    /// Exclusive use of the device.
    #[default]
    Whole,
    /// Share, with the same part of the device's memory.
    Share(Share),
    /// Memory, with the share that it is of the device's memory.
    Memory(Bytes),
    /// Share and memory. A whole share with memory is a whole device with at least that much memory.
    Both(Share, Bytes),
    /// Smallest equal part of a device: 1/N, where N leases may share it.
    Shared,
}

impl RequestedAmount {
    /// Returns the share and the memory that the amount names.
    pub const fn share_and_memory(self) -> (Option<Share>, Option<Bytes>) {
        match self {
            Self::Whole | Self::Shared => (None, None),
            Self::Share(share) => (Some(share), None),
            Self::Memory(memory) => (None, Some(memory)),
            Self::Both(share, memory) => (Some(share), Some(memory)),
        }
    }
}

/// Request for GPUs and host resources.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Request {
    /// Number of GPUs, all on one node; 0 for host resources only.
    pub gpus: u16,
    /// Amount of each GPU.
    pub amount: RequestedAmount,
    /// Isolation between parts.
    pub isolation: IsolationLevel,
    /// Placement strategy; `None` for the policy's choice.
    pub strategy: Option<PlacementStrategy>,
    /// Foreign load to avoid; `None` accepts any.
    pub thresholds: Option<LoadThresholds>,
    /// Selector of eligible devices.
    pub select: Arc<DeviceSelector>,
    pub cpus: MilliCpus,
    pub host_memory: Bytes,
    /// Owner of the lease.
    pub owner: Arc<str>,
    /// Administrator who requested it for the owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested_by: Option<Arc<str>>,
    /// The owner's name for the worker that uses the lease.
    pub worker_id: Option<Arc<str>>,
    /// Free-form labels, by which policies match.
    pub labels: Arc<Labels>,
    /// Priority; higher goes first.
    pub priority: i32,
    /// Whether to wait if there is no capacity now.
    pub queue: bool,
    /// Longest time in the queue.
    pub wait_limit: Option<Millis>,
    /// Life of the lease without a renewal.
    pub ttl: Millis,
    /// Longest time that the lease may be held.
    pub max_duration: Option<Millis>,
    /// Whether the client waits at several servers: the pool then offers and waits for a confirmation.
    pub hedged: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            gpus: 1,
            amount: RequestedAmount::Whole,
            isolation: IsolationLevel::None,
            strategy: None,
            thresholds: None,
            select: Arc::default(),
            cpus: MilliCpus::ZERO,
            host_memory: Bytes::ZERO,
            owner: Arc::from("anonymous"),
            requested_by: None,
            worker_id: None,
            labels: Arc::default(),
            priority: 0,
            queue: true,
            wait_limit: None,
            ttl: limits::DEFAULT_TTL,
            max_duration: None,
            hedged: false,
        }
    }
}

impl Request {
    /// Checks every field against its limits; the error names the first violation.
    pub fn validate(&self) -> Result<(), FieldError> {
        let fail = |field, value: &dyn fmt::Display, allowed| Err(FieldError::new(field, value, allowed));
        if self.gpus > limits::MAX_GPUS_PER_REQUEST {
            return fail("gpus", &self.gpus, "0..=64");
        }
        let (share, memory) = self.amount.share_and_memory();
        if let Some(share) = share.filter(|share| share.is_zero() || *share > Share::WHOLE) {
            return fail("fraction", &share, "0.001..=1.0");
        }
        if memory.is_some_and(Bytes::is_zero) {
            return fail("memory_mib", &0, "at least 1");
        }
        if self.gpus == 0 && self.cpus.is_zero() && self.host_memory.is_zero() {
            return fail("gpus", &0, "at least 1, unless cpus or host_memory_mib is given");
        }
        if self.gpus == 0 && self.amount != RequestedAmount::Whole {
            return fail("gpus", &0, "at least 1 with fraction, memory_mib or sharing");
        }
        for (field, percent) in [
            ("memory_threshold", self.thresholds.map(|t| t.memory)),
            ("utilization_threshold", self.thresholds.map(|t| t.utilization)),
        ] {
            if let Some(percent) = percent.filter(|percent| *percent > Percent::FULL) {
                return fail(field, &percent.as_number(), "0..=100");
            }
        }
        if self.owner.is_empty() || self.owner.len() > limits::MAX_NAME_BYTES {
            return fail("owner", &self.owner, "1..=253 bytes");
        }
        if self.worker_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > limits::MAX_NAME_BYTES) {
            return fail("worker_id", &"(too long or empty)", "1..=253 bytes");
        }
        if self.ttl < limits::MIN_TTL || self.ttl > limits::MAX_TTL {
            return fail("ttl_secs", &(self.ttl.0 as f64 / 1000.0), "1..=86400");
        }
        if self.max_duration.is_some_and(Millis::is_zero) {
            return fail("max_duration_secs", &0, "above 0");
        }
        if self.priority.unsigned_abs() > limits::MAX_PRIORITY.unsigned_abs() {
            return fail("priority", &self.priority, "-1000000..=1000000");
        }
        self.select.validate()
    }
}

impl DeviceSelector {
    fn validate(&self) -> Result<(), FieldError> {
        for (field, count) in [
            ("select.model", self.models.len()),
            ("select.gpu_ids", self.gpu_ids.len()),
            ("select.uuids", self.uuids.len()),
            ("select.labels", self.labels.len()),
        ] {
            if count > limits::MAX_SELECT_ENTRIES {
                return Err(FieldError::new(field, count, "at most 256 entries"));
            }
        }
        if self.models.iter().any(|model| model.trim().is_empty()) {
            return Err(FieldError::new("select.model", "", "a model name"));
        }
        Ok(())
    }

    /// Whether it names single devices.
    pub(crate) fn names_devices(&self) -> bool {
        !self.gpu_ids.is_empty() || !self.uuids.is_empty()
    }
}

/// Invalid value of a field: the field, the value, and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value:?} is not allowed; it must be {allowed}")]
pub struct FieldError {
    pub field: &'static str,
    pub value: String,
    pub allowed: &'static str,
}

impl FieldError {
    /// Creates an error about `field`.
    pub fn new(field: &'static str, value: impl fmt::Display, allowed: &'static str) -> Self {
        Self { field, value: value.to_string(), allowed }
    }
}
