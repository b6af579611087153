//! What somebody wants: GPUs whole or in part, host CPUs and memory, and under which terms.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::device::Vendor;
use crate::ids::{GpuId, Labels};
use crate::limits;
use crate::units::{Bytes, MilliCpus, Millis, Percent, Share};

/// How well a part of a GPU is kept apart from the other parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IsolationLevel {
    /// Not at all, beyond what the driver does anyway.
    #[default]
    None,
    /// The driver takes turns.
    TimeSlicing,
    /// NVIDIA's Multi-Process Service.
    Mps,
    /// A MIG instance.
    Mig,
}

/// How a place is chosen among those that fit. Each is exact; `placement/mod.rs` defines them.
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

/// Gives the values of a type the names people write for them.
macro_rules! named_variants {
    ($type:ty, $what:literal, $($variant:ident => $name:literal),+ $(,)?) => {
        impl $type {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Its name, as people write it.
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
    /// Whether it looks ahead at the workload to come.
    pub(crate) const fn looks_ahead(self) -> bool {
        matches!(self, Self::Fgd | Self::LeastFragmentation)
    }

    /// Whether it scores whole nodes.
    pub(crate) const fn scores_nodes(self) -> bool {
        self.looks_ahead() || matches!(self, Self::PaperBestFit)
    }
}

/// Foreign load at or above which a device is not available. Strictly below both is.
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

/// Which devices will do. Empty means any.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceSelector {
    /// Only this vendor's.
    pub vendor: Option<Vendor>,
    /// Only these models (any of them), in whole words.
    pub models: Vec<Arc<str>>,
    /// Only devices with at least this much memory to promise.
    pub min_memory: Option<Bytes>,
    /// Only devices with these numbers on their node.
    pub gpu_ids: Vec<GpuId>,
    /// Only devices with these UUIDs (full).
    pub uuids: Vec<Arc<str>>,
    /// Only devices that carry these labels (their own or their node's).
    pub labels: Labels,
}

/// How much of each GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedAmount {
    /// All of it, alone.
    #[default]
    Whole,
    /// A share; its memory is the same part of the device's.
    Share(Share),
    /// So much memory; its share is the part that memory is of the device's.
    Memory(Bytes),
    /// Both, as given. A whole share with an amount of memory is a whole device that has at least so much.
    Both(Share, Bytes),
    /// A place among equals: the device's smallest part, 1/N where N is how many may share it.
    Shared,
}

impl RequestedAmount {
    /// The share and the memory that the amount names.
    pub const fn share_and_memory(self) -> (Option<Share>, Option<Bytes>) {
        match self {
            Self::Whole | Self::Shared => (None, None),
            Self::Share(share) => (Some(share), None),
            Self::Memory(memory) => (None, Some(memory)),
            Self::Both(share, memory) => (Some(share), Some(memory)),
        }
    }
}

/// What somebody wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Request {
    /// How many GPUs, all on one node, all or nothing; 0 for host resources only.
    pub gpus: u16,
    /// How much of each.
    pub amount: RequestedAmount,
    /// How well parts are kept apart.
    pub isolation: IsolationLevel,
    /// How to choose; the policy's choice where `None`.
    pub strategy: Option<PlacementStrategy>,
    /// Foreign load to stay clear of; not judged where `None`.
    pub thresholds: Option<LoadThresholds>,
    /// Which devices will do.
    pub select: Arc<DeviceSelector>,
    pub cpus: MilliCpus,
    pub host_memory: Bytes,
    /// On whose account.
    pub owner: Arc<str>,
    /// The owner's own name for whoever will use it.
    pub worker_id: Option<Arc<str>>,
    /// Free-form labels, by which policies choose.
    pub labels: Arc<Labels>,
    /// Higher goes first.
    pub priority: i32,
    /// Whether to wait when it cannot be had now.
    pub queue: bool,
    /// How long to wait at most.
    pub wait_limit: Option<Millis>,
    /// How long the lease lives without a renewal.
    pub ttl: Millis,
    /// How long it may be held at all.
    pub max_duration: Option<Millis>,
    /// The asker waits at several servers: offer, and hold the offer for a confirmation.
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
    /// Whether every field is within its limits; the error names the first that is not.
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
            return fail("gpus", &0, "at least 1, unless cpus or host_memory_mib is asked for");
        }
        if self.gpus == 0 && self.amount != RequestedAmount::Whole {
            return fail("gpus", &0, "at least 1 where a fraction, memory_mib or sharing is asked for");
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

    /// Whether it names single devices rather than kinds of them.
    pub(crate) fn names_devices(&self) -> bool {
        !self.gpu_ids.is_empty() || !self.uuids.is_empty()
    }
}

/// Something a person wrote that is not allowed: which field, what it was, what it may be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value:?} is not allowed, it must be {allowed}")]
pub struct FieldError {
    pub field: &'static str,
    pub value: String,
    pub allowed: &'static str,
}

impl FieldError {
    /// An error about `field`.
    pub fn new(field: &'static str, value: impl fmt::Display, allowed: &'static str) -> Self {
        Self { field, value: value.to_string(), allowed }
    }
}
