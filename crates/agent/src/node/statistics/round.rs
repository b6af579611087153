//! Everything that is known after a round of readings, how well the devices can be read, and the last readings of each.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use gpupool_api::pool::ProcessBody;
use gpupool_api::stats::{GpuHistoryBody, GpuReadings, PastReading, SourceHealth};
use gpupool_core::{Bytes, DeviceHealth, GpuId, Millis, Percent, PoolTime, Vendor};
use gpupool_devices::{Milliwatts, SourceKind, SourceState, SourceStatus, TrackedDevice, fresh_until};

use super::bodies::current;

/// The most readings of one GPU that are kept, whatever is configured.
const HISTORY_READINGS: usize = 10_000;

/// A tracked device with its processes.
#[derive(Debug, Clone)]
pub struct ListedDevice {
    /// The device.
    pub tracked: Arc<TrackedDevice>,
    /// Whether the filter of this service lists it.
    pub visible: bool,
    /// The processes on it.
    pub processes: Arc<[ProcessBody]>,
}

impl Deref for ListedDevice {
    type Target = TrackedDevice;

    fn deref(&self) -> &TrackedDevice {
        &self.tracked
    }
}

impl ListedDevice {
    /// Whether nothing of it can be read because it is not there.
    pub fn is_lost(&self) -> bool {
        self.health == DeviceHealth::Lost
    }
}

/// Everything that is known after a round.
#[derive(Debug, Clone)]
pub struct SamplingRound {
    /// When it was put together, on both clocks.
    pub clock: gpupool_store::ClockReading,
    /// Every device, by number, listed or not.
    pub devices: Vec<ListedDevice>,
    /// Every source.
    pub sources: Vec<SourceStatus>,
    /// When a source last answered, if only that there is nothing.
    pub answered_at: Option<PoolTime>,
    /// How often devices are read.
    pub refresh: Millis,
    /// Set where nothing is read any more: whatever is known is stale.
    pub stopped: bool,
}

impl SamplingRound {
    /// Returns the devices that are there, listed or not.
    pub fn present(&self) -> impl Iterator<Item = &ListedDevice> {
        self.devices.iter().filter(|device| device.is_present)
    }

    /// Returns the devices that are listed.
    pub fn listed(&self) -> impl Iterator<Item = &ListedDevice> {
        self.devices.iter().filter(|seen| seen.visible)
    }

    /// Whether what was read of a device is too old to be passed off as fresh.
    pub fn is_stale(&self, seen: &ListedDevice) -> bool {
        self.stopped || self.is_old(seen.read_at)
    }

    fn is_old(&self, read_at: PoolTime) -> bool {
        self.clock.pool > self.stale_from(read_at)
    }

    /// Until when a reading is fresh.
    pub fn stale_from(&self, read_at: PoolTime) -> PoolTime {
        fresh_until(read_at, self.refresh)
    }

    /// Whether any listed device that is there, or with none the last answer, is too old to be passed off as fresh.
    pub fn any_stale(&self) -> bool {
        let mut there = self.listed().filter(|seen| !seen.is_lost()).peekable();
        if there.peek().is_none() {
            return self.stopped || self.answered_at.is_none_or(|at| self.is_old(at));
        }
        there.any(|seen| self.is_stale(seen))
    }

    /// As of when everything that is listed was read: the oldest reading of a device that is there.
    pub fn read_at(&self) -> PoolTime {
        let oldest = self.listed().filter(|seen| !seen.is_lost()).map(|seen| seen.read_at).min();
        oldest.or(self.answered_at).unwrap_or(self.clock.pool)
    }

    /// Why devices could not be read, where they could not.
    pub fn error(&self) -> Option<String> {
        let troubles: Vec<String> = self.sources.iter().filter_map(SourceStatus::problem).collect();
        (!troubles.is_empty()).then(|| troubles.join("; "))
    }

    /// Whether there is nothing to tell because reading failed, rather than because there is no device.
    pub fn has_failed(&self) -> bool {
        self.devices.is_empty() && (self.error().is_some() || self.answered_at.is_none())
    }

    /// Whether devices of NVIDIA can be read, by whatever source.
    pub fn reads_nvidia(&self) -> bool {
        let of_nvidia = |source: &SourceStatus| match source.kind {
            SourceKind::Nvml | SourceKind::NvidiaSmi => true,
            kind => self.devices.iter().any(|seen| seen.source == kind && seen.found.vendor == Vendor::Nvidia),
        };
        !self.stopped && self.sources.iter().any(|source| source.is_ready() && of_nvidia(source))
    }

    /// A time of the pool for people and programs.
    pub fn format_time(&self, time: PoolTime) -> String {
        crate::clock::iso_of(time, self.clock)
    }
}

// How well the devices can be read: what `GET /health` says of them.
//
// Healthy: every source that is on this machine answers, and every listed device is well; no GPU at all is healthy too.
// Unhealthy: there is something to read and none of it can be. Degraded: anything between.

/// The short answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthStatus {
    /// Nothing is wrong.
    Healthy,
    /// Some devices or sources fail, or readings are stale.
    Degraded,
    /// Nothing can be read though there is something to read.
    Unhealthy,
}

impl HealthStatus {
    /// As the contract spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// How well the devices can be read.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticsHealth {
    /// The short answer.
    pub status: HealthStatus,
    /// Whether NVIDIA devices can be read, by whatever source.
    pub nvidia_smi_available: bool,
    /// When the reading that is told was taken.
    pub timestamp: String,
    /// What is wrong, for people.
    pub problems: Vec<String>,
    /// Where readings come from.
    pub sources: Vec<SourceHealth>,
    /// Seconds since the last answer of a source; `None` before the first.
    pub reading_age_secs: Option<f64>,
}

/// How well devices can be read after a round, at `now`.
pub fn health(round: &SamplingRound, now: PoolTime) -> StatisticsHealth {
    let mut problems: Vec<String> = round.sources.iter().filter_map(SourceStatus::problem).collect();
    problems.extend(round.listed().filter_map(|seen| complaint(seen, round)));
    if round.stopped {
        problems.push("readings are overdue: everything told is old".to_owned());
    }
    StatisticsHealth {
        status: status(round, &problems),
        nvidia_smi_available: round.reads_nvidia(),
        timestamp: round.format_time(round.read_at()),
        problems,
        sources: round.sources.iter().map(source).collect(),
        reading_age_secs: round.answered_at.map(|at| now.since(at).0 as f64 / 1000.0),
    }
}

fn status(round: &SamplingRound, problems: &[String]) -> HealthStatus {
    if problems.is_empty() {
        return HealthStatus::Healthy;
    }
    let answers =
        |seen: &ListedDevice| round.sources.iter().any(|source| source.kind == seen.source && source.is_ready());
    let any_readable = round.listed().any(|seen| !seen.is_lost() && answers(seen));
    if any_readable { HealthStatus::Degraded } else { HealthStatus::Unhealthy }
}

fn complaint(seen: &ListedDevice, round: &SamplingRound) -> Option<String> {
    let name = seen.found.name.as_deref().unwrap_or("unknown GPU");
    match &seen.health {
        DeviceHealth::Lost => Some(format!("GPU {} ({name}) is lost", seen.gpu_id)),
        DeviceHealth::Unhealthy(why) => Some(format!("GPU {} ({name}): {why}", seen.gpu_id)),
        DeviceHealth::Healthy if round.is_stale(seen) && !round.stopped => {
            Some(format!("GPU {} ({name}) was last read at {}", seen.gpu_id, round.format_time(seen.read_at)))
        }
        DeviceHealth::Healthy => None,
    }
}

fn source(source: &SourceStatus) -> SourceHealth {
    let error = match &source.state {
        SourceState::Failed(error) => Some(error.to_string()),
        SourceState::Pending => Some("has not answered yet".to_owned()),
        SourceState::Ready => None,
    };
    SourceHealth { name: source.kind.name().to_owned(), available: source.is_ready(), error }
}

// The last readings of each GPU, in a ring.

/// The last readings of every GPU.
#[derive(Debug)]
pub struct ReadingHistory {
    most: usize,
    rings: BTreeMap<GpuId, VecDeque<HistoryReading>>,
}

/// What a GPU read at a time.
#[derive(Debug, Clone)]
struct HistoryReading {
    at: PoolTime,
    /// When that was for people then: the wall clock may be set meanwhile.
    wall: std::time::SystemTime,
    memory_used: Option<Bytes>,
    utilization: Option<Percent>,
    temperature_c: Option<i16>,
    power: Option<Milliwatts>,
}

impl ReadingHistory {
    /// Keeps so many readings of each GPU, within [`HISTORY_READINGS`].
    pub fn new(most: usize) -> Self {
        Self { most: most.min(HISTORY_READINGS), rings: BTreeMap::new() }
    }

    /// Keeps what was read anew.
    pub fn record_round(&mut self, round: &SamplingRound) {
        for seen in round.listed() {
            let ring = self.rings.entry(seen.gpu_id).or_default();
            if ring.back().is_some_and(|last| last.at >= seen.read_at) {
                continue;
            }
            ring.push_back(past(seen, round));
            while ring.len() > self.most {
                ring.pop_front();
            }
        }
    }

    /// The body of `GET /gpu/history`.
    pub fn body(&self, round: &SamplingRound) -> GpuHistoryBody {
        let gpu = |seen: &ListedDevice| GpuReadings {
            gpu_id: seen.gpu_id.0,
            name: seen.found.name.as_deref().unwrap_or("unknown GPU").to_owned(),
            readings: self.rings.get(&seen.gpu_id).into_iter().flatten().map(told).collect(),
        };
        GpuHistoryBody { max_history: self.most, gpus: round.listed().map(gpu).collect() }
    }
}

fn past(seen: &ListedDevice, round: &SamplingRound) -> HistoryReading {
    let found = &seen.found;
    HistoryReading {
        at: seen.read_at,
        wall: crate::clock::wall(seen.read_at, round.clock),
        memory_used: current(seen, &found.memory.used_by_programs()).copied(),
        utilization: current(seen, &found.utilization).copied(),
        temperature_c: current(seen, &found.temperature_c).copied(),
        power: current(seen, &found.power).copied(),
    }
}

fn told(past: &HistoryReading) -> PastReading {
    PastReading {
        timestamp: crate::clock::iso(past.wall),
        memory_used_mb: past.memory_used.map(|bytes| bytes.as_mib()),
        utilization_percent: past.utilization.map(|busy| busy.as_number()),
        temperature_c: past.temperature_c.map(i32::from),
        power_draw_w: past.power.map(|power| power.as_number()),
    }
}
