//! What a statistics server tells of a GPU, judged: what it is, how much of it is in use, and whether that can be believed.
//!
//! A GPU is known by the server's number. Its UUID is learned later or never, and may come to be another one: a GPU that died
//! lets others move up when the server is started anew. A number whose GPU was exchanged while somebody held it takes no new
//! work until it is given back, and neither does the number under which the held one is found now.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_api::stats::{self, GpuSummary, StatsBody, SummaryBody};
use gpupool_core::{
    Bytes, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceMemory, DeviceReading, IsolationSupport, Labels, Percent,
    PoolTime, ReadingField, Vendor, limits::MAX_GPU_ID, limits::MAX_NAME_BYTES, model_matches,
};

use crate::limits::BOOKS_GPUS;

/// What was told of a GPU.
#[derive(Debug)]
pub(super) struct Told {
    name: Arc<str>,
    vendor: Option<Vendor>,
    /// The UUID it is shown and held under.
    pub uuid: Option<Arc<str>>,
    /// The UUID it was last told to have.
    uuid_now: Option<Arc<str>>,
    /// The number under which the GPU that has this number now is still held.
    held_as: Option<u32>,
    /// Its memory, as the server tells it.
    memory: Option<DeviceMemory>,
    /// Its memory, as the sum over all GPUs lets guess.
    estimate: Option<DeviceMemory>,
    health: DeviceHealth,
    temperature_c: ReadingField<i16>,
    /// How often the last summary lists it.
    listed: usize,
    /// In use, by the last summary; failed where that cannot be.
    pub memory_used: ReadingField<Percent>,
    /// How busy it is, by the last summary; failed where that cannot be.
    pub utilization: ReadingField<Percent>,
}

/// Takes over what a summary says. GPUs it does not list stay known.
pub(super) fn take_summary(told: &mut BTreeMap<u32, Told>, summary: &SummaryBody) {
    told.values_mut().for_each(|gpu| gpu.listed = 0);
    let numbers: BTreeSet<u32> = summary.gpus_summary.iter().map(|gpu| gpu.gpu_id).collect();
    // Where count and list disagree, the larger one promises less.
    let count = summary.gpu_count.max(numbers.len()) as u64;
    let estimate = memory(summary.total_memory_mb.checked_div(count).unwrap_or(0), 0);
    for gpu in &summary.gpus_summary {
        let is_believed = gpu.gpu_id <= MAX_GPU_ID && told.len() < BOOKS_GPUS;
        if is_believed || told.contains_key(&gpu.gpu_id) {
            told.entry(gpu.gpu_id).or_default().take(gpu, estimate);
        }
    }
}

/// Takes over what statistics say of GPUs that are known.
pub(super) fn take_stats(told: &mut BTreeMap<u32, Told>, stats: &StatsBody) {
    let (mut by_number, mut carriers) = (BTreeMap::new(), BTreeMap::new());
    for gpu in &stats.gpus {
        by_number.entry(gpu.gpu_id).and_modify(|only| *only = None).or_insert(Some(gpu));
        *carriers.entry(gpu.uuid.as_deref().unwrap_or_default()).or_insert(0) += 1;
    }
    for (number, known) in told {
        let Some(gpu) = by_number.get(number).copied().flatten() else { continue };
        let uuid = gpu.uuid.as_deref().filter(|uuid| !uuid.is_empty() && uuid.len() <= MAX_NAME_BYTES);
        // A UUID that several carry is hidden by the driver, and tells none from another.
        let own = uuid.filter(|uuid| carriers.get(uuid) == Some(&1));
        let is_fresh = !stats.stale && !gpu.stale && stats.error.is_none();
        known.take_more(gpu, own, is_fresh);
    }
}

/// Lets GPUs that nobody holds be what they were last told to be, and finds those that are held under another number.
pub(super) fn settle(told: &mut BTreeMap<u32, Told>, is_held: impl Fn(u32) -> bool) {
    let mut held: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for (&number, gpu) in told.iter_mut() {
        if is_held(number) {
            gpu.uuid = gpu.uuid.take().or_else(|| gpu.uuid_now.clone());
            held.extend(gpu.uuid.clone().map(|uuid| (uuid, number)));
        } else {
            gpu.uuid = gpu.uuid_now.clone();
        }
    }
    for (number, gpu) in told.iter_mut() {
        let holder = gpu.uuid_now.as_ref().and_then(|uuid| held.get(uuid));
        gpu.held_as = holder.copied().filter(|holder| holder != number);
    }
}

impl Default for Told {
    fn default() -> Self {
        Self {
            name: Arc::default(),
            vendor: None,
            uuid: None,
            uuid_now: None,
            held_as: None,
            memory: None,
            estimate: None,
            health: DeviceHealth::Healthy,
            temperature_c: ReadingField::Unsupported,
            listed: 0,
            memory_used: ReadingField::Failed,
            utilization: ReadingField::Failed,
        }
    }
}

impl Told {
    fn take(&mut self, gpu: &GpuSummary, estimate: Option<DeviceMemory>) {
        let name = &gpu.name[..gpu.name.floor_char_boundary(MAX_NAME_BYTES)];
        if *self.name != *name {
            // Another GPU: what was told of the one before it is not about this one.
            let (uuid, uuid_now, listed) = (self.uuid.take(), self.uuid_now.take(), self.listed);
            *self = Self { name: name.into(), uuid, uuid_now, listed, ..Self::default() };
        }
        self.listed += 1;
        self.estimate = estimate;
        self.temperature_c = ReadingField::Unsupported;
        let field = |name: &str, percent: f64| match Percent::from_number(percent) {
            _ if gpu.unsupported.iter().any(|unsupported| unsupported == name) => ReadingField::Unsupported,
            Some(percent) => ReadingField::Value(percent),
            None => ReadingField::Failed,
        };
        self.memory_used = field("memory_usage_percent", gpu.memory_usage_percent);
        self.utilization = field("utilization_percent", f64::from(gpu.utilization_percent));
    }

    fn take_more(&mut self, gpu: &stats::GpuBody, uuid: Option<&str>, is_fresh: bool) {
        self.uuid_now = uuid.map(Into::into);
        self.vendor = gpu.vendor.to_ascii_lowercase().parse().ok();
        self.memory = memory(gpu.memory.total_mb, gpu.memory.reserved_mb.unwrap_or(0));
        if !is_fresh {
            return;
        }
        self.health = match gpu.health.as_str() {
            "lost" => DeviceHealth::Lost,
            "unhealthy" => DeviceHealth::Unhealthy(gpu.health_reason.as_deref().unwrap_or("its server says so").into()),
            _ => DeviceHealth::Healthy,
        };
        let temperature = gpu.temperature_c.and_then(|celsius| i16::try_from(celsius).ok());
        self.temperature_c = temperature.map_or(ReadingField::Unsupported, ReadingField::Value);
    }

    pub(super) fn is_listed(&self) -> bool {
        self.listed > 0
    }

    /// What it is.
    pub(super) fn facts(&self, node: &str, number: u32) -> DeviceFacts {
        DeviceFacts {
            identity: DeviceIdentity::Uuid(name_of(node, number)),
            vendor: self.vendor.unwrap_or_else(|| vendor_of(&self.name)),
            model: Arc::clone(&self.name),
            memory: self.size(),
            partition: None,
            isolation: IsolationSupport::BASIC,
            labels: Labels::new(),
        }
    }

    fn size(&self) -> Option<DeviceMemory> {
        self.memory.or(self.estimate)
    }

    /// Whether it can be given to anybody, and why not.
    pub(super) fn health(&self) -> DeviceHealth {
        if self.listed == 0 {
            return DeviceHealth::Lost;
        }
        let why = if self.listed > 1 {
            "several GPUs have its number".into()
        } else if self.memory_used == ReadingField::Failed || self.utilization == ReadingField::Failed {
            "its server says impossible things of it: percentages go from 0 to 100".into()
        } else if self.size().is_none() && self.memory_used.value().is_some_and(|used| used > Percent(0)) {
            "its server does not say how much memory it has".into()
        } else if let Some(number) = self.held_as {
            format!("somebody holds it under the number it had, {number}")
        } else if self.uuid_now.is_some() && self.uuid != self.uuid_now {
            "it was exchanged while somebody holds it".into()
        } else {
            return self.health.clone();
        };
        DeviceHealth::Unhealthy(why.into())
    }

    /// What it read; only of a GPU that is healthy.
    pub(super) fn reading(&self, at: PoolTime) -> DeviceReading {
        let total = self.size().map(|memory| memory.total);
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

/// What a GPU without a UUID is called.
pub(super) fn name_of(node: &str, number: u32) -> Arc<str> {
    format!("{node}/{number}").into()
}

fn memory(total_mib: u64, reserved_mib: u64) -> Option<DeviceMemory> {
    let total = Bytes::from_mib(total_mib).filter(|total| !total.is_zero())?;
    Some(DeviceMemory { total, reserved: Bytes::from_mib(reserved_mib).unwrap_or(total).min(total) })
}

/// Whose GPU it is by its name. NVIDIA's own name is in it only since some years.
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
