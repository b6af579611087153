//! The statistics routes: what a node's GPUs report.

use serde::{Deserialize, Serialize};

use crate::whole::{degrees, whole};

/// The body of `GET /gpu/stats`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Stats {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// The GPUs, by number.
    pub gpus: Vec<Gpu>,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Gpu {
    /// Its small number on this node, the same after a restart.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory: GpuMemory,
    /// How busy it is; 0 and named under `unsupported` where it cannot tell.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Temperature of the chip.
    #[serde(default, deserialize_with = "degrees")]
    pub temperature_c: Option<i32>,
    /// Electrical power.
    pub power: GpuPower,
    /// The vendor's identity of it.
    #[serde(default)]
    pub uuid: Option<String>,
    /// `nvidia`, `amd`, `intel` or `other`.
    #[serde(default)]
    pub vendor: String,
    /// `healthy`, `unhealthy` or `lost`.
    #[serde(default)]
    pub health: String,
    /// Why it is not healthy.
    #[serde(default)]
    pub health_reason: Option<String>,
    /// Whether what is said of it is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// When it was read.
    #[serde(default)]
    pub timestamp: String,
    /// Asleep to save power, and therefore not read: reading would wake it.
    #[serde(default)]
    pub asleep: bool,
    /// Fields of it that have no value, though the form of this answer has a number there.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The memory of a GPU, in MiB.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuMemory {
    /// All of it.
    #[serde(deserialize_with = "whole")]
    pub total_mb: u64,
    /// In use by programs, without what the driver keeps.
    #[serde(deserialize_with = "whole")]
    pub used_mb: u64,
    /// Neither in use nor kept by the driver: total − used − reserved.
    #[serde(deserialize_with = "whole")]
    pub free_mb: u64,
    /// In use by programs, in percent of all of it, with two digits.
    pub usage_percent: f64,
    /// What the driver keeps for itself; `null` where it does not tell.
    #[serde(default)]
    pub reserved_mb: Option<u64>,
    /// Host memory it may use besides (the real memory of a GPU that is a part of a processor).
    #[serde(default)]
    pub host_total_mb: Option<u64>,
    /// What it uses of that.
    #[serde(default)]
    pub host_used_mb: Option<u64>,
}

/// The power of a GPU, in watts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuPower {
    /// Drawn now.
    pub draw_w: Option<f64>,
    /// The most it may draw.
    pub limit_w: Option<f64>,
}

/// The body of `GET /gpu/count`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Count {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// The body of `GET /gpu/summary`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Summary {
    /// How many GPUs are listed.
    pub gpu_count: usize,
    /// Memory of all of them, in MiB; a GPU that is listed with its parts counts once.
    #[serde(deserialize_with = "whole")]
    pub total_memory_mb: u64,
    /// Memory in use on all of them, in MiB.
    #[serde(deserialize_with = "whole")]
    pub total_used_memory_mb: u64,
    /// Memory in use, in percent with two digits.
    pub total_memory_usage_percent: f64,
    /// Utilization of those that can tell it, on average.
    pub average_utilization_percent: f64,
    /// Over how many GPUs that average is; with none it says nothing.
    #[serde(default)]
    pub average_over: usize,
    /// The GPUs, by number.
    pub gpus_summary: Vec<GpuSummary>,
    /// When they were read.
    pub timestamp: String,
    /// Whether the reading is too old to be taken for the present.
    #[serde(default)]
    pub stale: bool,
    /// Why GPUs could not be read; `null` where nothing failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// One GPU in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuSummary {
    /// Its number.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Memory in use, in percent with two digits.
    pub memory_usage_percent: f64,
    /// How busy it is.
    #[serde(deserialize_with = "whole")]
    pub utilization_percent: u32,
    /// Fields of it that have no value, though the form of this answer has a number there.
    #[serde(default)]
    pub unsupported: Vec<String>,
}

/// The body of `GET /gpu/history`: the last readings of each GPU, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuHistory {
    /// How many readings of a GPU are kept.
    pub max_history: usize,
    /// The GPUs, by number.
    pub gpus: Vec<HistoryOfGpu>,
}

/// The last readings of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HistoryOfGpu {
    /// Its number.
    pub gpu_id: u32,
    /// Its name.
    pub name: String,
    /// Its readings, oldest first.
    pub readings: Vec<PastReading>,
}

/// What a GPU read at a time; `null` is what it could not tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PastReading {
    /// When.
    pub timestamp: String,
    /// Memory in use, in MiB.
    pub memory_used_mb: Option<u64>,
    /// How busy it was.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip.
    pub temperature_c: Option<i32>,
    /// Power drawn, in watts.
    pub power_draw_w: Option<f64>,
}

/// The body of `GET /health`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Health {
    /// `healthy`, `degraded` or `unhealthy`.
    pub status: String,
    /// Whether NVIDIA devices can be read, by whatever source.
    pub nvidia_smi_available: bool,
    /// When the last reading was taken.
    pub timestamp: String,
    /// What is wrong, for people; empty where nothing is.
    pub problems: Vec<String>,
    /// Where readings come from.
    pub sources: Vec<SourceHealth>,
    /// Seconds since the last reading.
    pub reading_age_secs: Option<f64>,
    /// Whether leases can be granted and given back durably.
    pub store: String,
    /// Whether anybody on the network may lease.
    pub open: bool,
    /// The version of this server.
    pub version: String,
    /// Seconds since it started.
    pub uptime_secs: f64,
}

/// A source of readings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SourceHealth {
    /// Its name.
    pub name: String,
    /// Whether it answers.
    pub available: bool,
    /// Why it does not.
    pub error: Option<String>,
}

/// The body of `GET /` for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Root {
    /// What this is.
    pub message: String,
    /// The version of this server.
    pub version: String,
    /// What can be asked, by route.
    pub endpoints: std::collections::BTreeMap<String, String>,
}

/// The part of `GET /config` that is about which GPUs are listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GpuFiltering {
    /// The filter as given; `null` where none is.
    pub cuda_visible_devices: Option<String>,
    /// The GPUs that are listed; `null` where all are.
    pub visible_gpu_ids: Option<Vec<u32>>,
    /// Whether GPUs are left out.
    pub filtering_active: bool,
    /// How many GPUs there are.
    pub total_system_gpus: usize,
    /// How many are listed.
    pub visible_gpu_count: usize,
}
