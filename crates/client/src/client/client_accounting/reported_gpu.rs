//! The report of a statistics server about a GPU, checked: its identity, usage and plausibility.
//!
//! A GPU is known by the server's number. Its UUID is reported later or never, and can change: if a GPU dies, others
//! get other numbers at the next start of the server. A number whose GPU was replaced while a lease holds it takes no
//! new work until the release, and neither does the current number of the held GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_api::stats::{self, GpuSummary, StatsBody, SummaryBody};
use gpupool_core::{
    Bytes, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceMemory, DeviceReading, IsolationSupport, Labels, Percent,
    PoolTime, ReadingField, Vendor, limits::MAX_GPU_ID, limits::MAX_NAME_BYTES, model_matches,
};

use crate::limits::MAX_ACCOUNTED_GPUS;

/// Report about a GPU.
#[derive(Debug)]
pub(super) struct ReportedGpu {
    name: Arc<str>,
    vendor: Option<Vendor>,
    /// UUID under which the GPU is shown and held.
    pub uuid: Option<Arc<str>>,
    /// UUID of the last report.
    current_uuid: Option<Arc<str>>,
    /// Earlier number under which a lease still holds the GPU with this number.
    held_under: Option<u32>,
    /// Memory reported by the server.
    memory: Option<DeviceMemory>,
    /// Memory estimated from the sum over all GPUs.
    estimated_memory: Option<DeviceMemory>,
    health: DeviceHealth,
    temperature_c: ReadingField<i16>,
    /// Number of entries in the last summary.
    times_listed: usize,
    /// Memory in use by the last summary; failed if impossible.
    pub memory_used: ReadingField<Percent>,
    /// Utilization by the last summary; failed if impossible.
    pub utilization: ReadingField<Percent>,
}

/// Applies a summary. GPUs that it does not list stay known.
pub(super) fn apply_summary(reported: &mut BTreeMap<u32, ReportedGpu>, summary: &SummaryBody) {
    reported.values_mut().for_each(|gpu| gpu.times_listed = 0);
    let numbers: BTreeSet<u32> = summary.gpus_summary.iter().map(|gpu| gpu.gpu_id).collect();
    // If count and list disagree, the larger one promises less memory.
    let count = summary.gpu_count.max(numbers.len()) as u64;
    let estimated_memory = memory(summary.total_memory_mb.checked_div(count).unwrap_or(0), 0);
    for gpu in &summary.gpus_summary {
        let is_plausible = gpu.gpu_id <= MAX_GPU_ID && reported.len() < MAX_ACCOUNTED_GPUS;
        if is_plausible || reported.contains_key(&gpu.gpu_id) {
            reported.entry(gpu.gpu_id).or_default().update_from_summary(gpu, estimated_memory);
        }
    }
}

/// Applies statistics to known GPUs.
pub(super) fn apply_stats(reported: &mut BTreeMap<u32, ReportedGpu>, stats: &StatsBody) {
    let (mut by_number, mut uuid_counts) = (BTreeMap::new(), BTreeMap::new());
    for gpu in &stats.gpus {
        by_number.entry(gpu.gpu_id).and_modify(|only| *only = None).or_insert(Some(gpu));
        *uuid_counts.entry(gpu.uuid.as_deref().unwrap_or_default()).or_insert(0) += 1;
    }
    for (number, known) in reported {
        let Some(gpu) = by_number.get(number).copied().flatten() else { continue };
        let uuid = gpu.uuid.as_deref().filter(|uuid| !uuid.is_empty() && uuid.len() <= MAX_NAME_BYTES);
        // A UUID of several GPUs is masked by the driver and identifies none of them.
        let unique = uuid.filter(|uuid| uuid_counts.get(uuid) == Some(&1));
        let is_fresh = !stats.stale && !gpu.stale && stats.error.is_none();
        known.update_from_stats(gpu, unique, is_fresh);
    }
}

/// Gives GPUs without leases their last reported UUIDs, and finds GPUs that are held under another number.
pub(super) fn resolve_identities(reported: &mut BTreeMap<u32, ReportedGpu>, is_held: impl Fn(u32) -> bool) {
    let mut held: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for (&number, gpu) in reported.iter_mut() {
        if is_held(number) {
            gpu.uuid = gpu.uuid.take().or_else(|| gpu.current_uuid.clone());
            held.extend(gpu.uuid.clone().map(|uuid| (uuid, number)));
        } else {
            gpu.uuid = gpu.current_uuid.clone();
        }
    }
    for (number, gpu) in reported.iter_mut() {
        let holder = gpu.current_uuid.as_ref().and_then(|uuid| held.get(uuid));
        gpu.held_under = holder.copied().filter(|holder| holder != number);
    }
}

impl Default for ReportedGpu {
    fn default() -> Self {
        Self {
            name: Arc::default(),
            vendor: None,
            uuid: None,
            current_uuid: None,
            held_under: None,
            memory: None,
            estimated_memory: None,
            health: DeviceHealth::Healthy,
            temperature_c: ReadingField::Unsupported,
            times_listed: 0,
            memory_used: ReadingField::Failed,
            utilization: ReadingField::Failed,
        }
    }
}

impl ReportedGpu {
    fn update_from_summary(&mut self, gpu: &GpuSummary, estimated_memory: Option<DeviceMemory>) {
        let name = &gpu.name[..gpu.name.floor_char_boundary(MAX_NAME_BYTES)];
        if *self.name != *name {
            // Another GPU: earlier reports do not apply to it.
            let (uuid, current_uuid, times_listed) = (self.uuid.take(), self.current_uuid.take(), self.times_listed);
            *self = Self { name: name.into(), uuid, current_uuid, times_listed, ..Self::default() };
        }
        self.times_listed += 1;
        self.estimated_memory = estimated_memory;
        self.temperature_c = ReadingField::Unsupported;
        let field = |name: &str, percent: f64| match Percent::from_number(percent) {
            _ if gpu.unsupported.iter().any(|unsupported| unsupported == name) => ReadingField::Unsupported,
            Some(percent) => ReadingField::Value(percent),
            None => ReadingField::Failed,
        };
        self.memory_used = field("memory_usage_percent", gpu.memory_usage_percent);
        self.utilization = field("utilization_percent", f64::from(gpu.utilization_percent));
    }

    fn update_from_stats(&mut self, gpu: &stats::GpuBody, uuid: Option<&str>, is_fresh: bool) {
        self.current_uuid = uuid.map(Into::into);
        self.vendor = gpu.vendor.to_ascii_lowercase().parse().ok();
        self.memory = memory(gpu.memory.total_mb, gpu.memory.reserved_mb.unwrap_or(0));
        if !is_fresh {
            return;
        }
        self.health = match gpu.health.as_str() {
            "lost" => DeviceHealth::Lost,
            "unhealthy" => {
                DeviceHealth::Unhealthy(gpu.health_reason.as_deref().unwrap_or("reported by the server").into())
            }
            _ => DeviceHealth::Healthy,
        };
        let temperature = gpu.temperature_c.and_then(|celsius| i16::try_from(celsius).ok());
        self.temperature_c = temperature.map_or(ReadingField::Unsupported, ReadingField::Value);
    }

    pub(super) fn is_listed(&self) -> bool {
        self.times_listed > 0
    }

    /// Returns the facts for the pool.
    pub(super) fn facts(&self, node: &str, number: u32) -> DeviceFacts {
        DeviceFacts {
            identity: DeviceIdentity::Uuid(placeholder_uuid(node, number)),
            vendor: self.vendor.unwrap_or_else(|| vendor_of(&self.name)),
            model: Arc::clone(&self.name),
            memory: self.memory_size(),
            partition: None,
            isolation: IsolationSupport::BASIC,
            labels: Labels::new(),
        }
    }

    fn memory_size(&self) -> Option<DeviceMemory> {
        self.memory.or(self.estimated_memory)
    }

    /// Returns the health: whether the GPU takes work, with the reason if not.
    pub(super) fn health(&self) -> DeviceHealth {
        if self.times_listed == 0 {
            return DeviceHealth::Lost;
        }
        let reason = if self.times_listed > 1 {
            "several GPUs have this number".into()
        } else if self.memory_used == ReadingField::Failed || self.utilization == ReadingField::Failed {
            "the server reports percentages outside of 0 to 100".into()
        } else if self.memory_size().is_none() && self.memory_used.value().is_some_and(|used| used > Percent(0)) {
            "the server does not report the memory size".into()
        } else if let Some(number) = self.held_under {
            format!("a lease holds this GPU under its earlier number {number}")
        } else if self.current_uuid.is_some() && self.uuid != self.current_uuid {
            "the GPU was replaced while a lease holds it".into()
        } else {
            return self.health.clone();
        };
        DeviceHealth::Unhealthy(reason.into())
    }

    /// Returns the reading; valid for a healthy GPU only.
    pub(super) fn reading(&self, at: PoolTime) -> DeviceReading {
        let total = self.memory_size().map(|memory| memory.total);
        let memory_used = match (self.memory_used, total) {
            // Thousandths of a percent, rounded down: the pool rounds up when it compares.
            (ReadingField::Value(Percent(part)), Some(total)) => ReadingField::Value(Bytes(
                (u128::from(total.0) * u128::from(part) / u128::from(Percent::FULL.0)) as u64,
            )),
            _ => ReadingField::Unsupported,
        };
        DeviceReading {
            at,
            memory_used,
            utilization: self.utilization,
            temperature_c: self.temperature_c,
            processes: None,
            leases_as_of: None,
        }
    }
}

/// Returns a placeholder for the UUID of a GPU without one.
pub(super) fn placeholder_uuid(node: &str, number: u32) -> Arc<str> {
    format!("{node}/{number}").into()
}

fn memory(total_mib: u64, reserved_mib: u64) -> Option<DeviceMemory> {
    let total = Bytes::from_mib(total_mib).filter(|total| !total.is_zero())?;
    Some(DeviceMemory { total, reserved: Bytes::from_mib(reserved_mib).unwrap_or(total).min(total) })
}

/// Returns the vendor by model name. NVIDIA's names contain the vendor only since a few years.
fn vendor_of(model: &str) -> Vendor {
    let is_any = |words: &[&str]| words.iter().any(|word| model_matches(model, word));
    if is_any(&["NVIDIA", "GeForce", "Tesla", "Quadro"]) {
        Vendor::Nvidia
    } else if is_any(&["AMD", "Radeon", "Instinct"]) {
        Vendor::Amd
    } else if is_any(&["Intel"]) {
        Vendor::Intel
    } else {
        Vendor::Other
    }
}
