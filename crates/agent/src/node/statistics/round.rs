//! A round of readings, the health of devices and sources, and the history of readings.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use gpupool_api::pool::ProcessBody;
use gpupool_api::stats::{GpuHistoryBody, GpuReadings, PastReading, SourceHealth};
use gpupool_core::{Bytes, DeviceHealth, GpuId, Millis, Percent, PoolTime, Vendor};
use gpupool_devices::{Milliwatts, SourceKind, SourceState, SourceStatus, TrackedDevice, fresh_until};

use super::bodies::current;

/// The largest history of one GPU, also if more is configured.
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
    /// Whether the device is lost, so that nothing can be read.
    pub fn is_lost(&self) -> bool {
        self.health == DeviceHealth::Lost
    }
}

/// Everything that is known after a round of readings.
#[derive(Debug, Clone)]
pub struct SamplingRound {
    /// The instant at which the round was assembled, on both clocks.
    pub clock: gpupool_store::ClockReading,
    /// Every device, by number, listed or not.
    pub devices: Vec<ListedDevice>,
    /// Every source.
    pub sources: Vec<SourceStatus>,
    /// The time of the last reply of a source, also if it reported no device.
    pub answered_at: Option<PoolTime>,
    /// The time between two rounds.
    pub refresh: Millis,
    /// Findings about agents that lease the same devices, for people.
    pub rivals: Vec<String>,
    /// Whether reading has stopped: all data is stale.
    pub stopped: bool,
}

impl SamplingRound {
    /// Returns the present devices, listed or not.
    pub fn present(&self) -> impl Iterator<Item = &ListedDevice> {
        self.devices.iter().filter(|device| device.is_present)
    }

    /// Returns the devices that are listed.
    pub fn listed(&self) -> impl Iterator<Item = &ListedDevice> {
        self.devices.iter().filter(|seen| seen.visible)
    }

    /// Whether the reading of a device is too old to count as fresh.
    pub fn is_stale(&self, seen: &ListedDevice) -> bool {
        self.stopped || self.is_old(seen.read_at)
    }

    fn is_old(&self, read_at: PoolTime) -> bool {
        self.clock.pool > self.stale_from(read_at)
    }

    /// Returns the time from which a reading is stale.
    pub fn stale_from(&self, read_at: PoolTime) -> PoolTime {
        fresh_until(read_at, self.refresh)
    }

    /// Whether the reading of any listed, present device is stale; without such devices, whether the last reply is.
    pub fn any_stale(&self) -> bool {
        let mut there = self.listed().filter(|seen| !seen.is_lost()).peekable();
        if there.peek().is_none() {
            return self.stopped || self.answered_at.is_none_or(|at| self.is_old(at));
        }
        there.any(|seen| self.is_stale(seen))
    }

    /// Returns the time of the oldest reading of a listed, present device.
    pub fn read_at(&self) -> PoolTime {
        let oldest = self.listed().filter(|seen| !seen.is_lost()).map(|seen| seen.read_at).min();
        oldest.or(self.answered_at).unwrap_or(self.clock.pool)
    }

    /// Returns the reasons why devices could not be read, if any.
    pub fn error(&self) -> Option<String> {
        let troubles: Vec<String> = self.sources.iter().filter_map(SourceStatus::problem).collect();
        (!troubles.is_empty()).then(|| troubles.join("; "))
    }

    /// Whether there is no data because reading failed, rather than because there is no device.
    pub fn has_failed(&self) -> bool {
        self.devices.is_empty() && (self.error().is_some() || self.answered_at.is_none())
    }

    /// Whether any source can read NVIDIA devices.
    pub fn reads_nvidia(&self) -> bool {
        let of_nvidia = |source: &SourceStatus| match source.kind {
            SourceKind::Nvml | SourceKind::NvidiaSmi => true,
            kind => self.devices.iter().any(|seen| seen.source == kind && seen.found.vendor == Vendor::Nvidia),
        };
        !self.stopped && self.sources.iter().any(|source| source.is_ready() && of_nvidia(source))
    }

    /// Formats a time of the pool.
    pub fn format_time(&self, time: PoolTime) -> String {
        crate::clock::iso_of(time, self.clock)
    }
}

// The health of devices and sources, as `GET /health` reports it.
//
// Healthy: every source of this machine responds, and every listed device is healthy; a machine without GPUs is healthy.
// Unhealthy: there are devices and none can be read. Degraded: anything between.

/// The health as one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthStatus {
    /// There are no problems.
    Healthy,
    /// Some devices or sources fail, or readings are stale.
    Degraded,
    /// There are devices, and none can be read.
    Unhealthy,
}

impl HealthStatus {
    /// Returns the published name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// The health of devices and sources.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticsHealth {
    /// The health as one word.
    pub status: HealthStatus,
    /// Whether any source can read NVIDIA devices.
    pub nvidia_smi_available: bool,
    /// The time of the reading.
    pub timestamp: String,
    /// The problems, for people.
    pub problems: Vec<String>,
    /// The sources of readings.
    pub sources: Vec<SourceHealth>,
    /// The seconds since the last reply of a source; `None` before the first.
    pub reading_age_secs: Option<f64>,
}

/// Returns the health after a round, at `now`.
pub(super) fn health(round: &SamplingRound, now: PoolTime) -> StatisticsHealth {
    let mut problems: Vec<String> = round.sources.iter().filter_map(SourceStatus::problem).collect();
    problems.extend(round.listed().filter_map(|seen| problem_of(seen, round)));
    problems.extend(round.rivals.iter().cloned());
    if round.stopped {
        problems.push("readings are overdue: all data is old".to_owned());
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

fn problem_of(seen: &ListedDevice, round: &SamplingRound) -> Option<String> {
    let name = seen.found.name.as_deref().unwrap_or("unknown GPU");
    match &seen.health {
        DeviceHealth::Lost => Some(format!("GPU {} ({name}) is lost", seen.gpu_id)),
        DeviceHealth::Unhealthy(why) => Some(format!("GPU {} ({name}): {why}", seen.gpu_id)),
        DeviceHealth::Healthy if round.is_stale(seen) && !round.stopped => {
            Some(format!("GPU {} ({name}) was last read at {}", seen.gpu_id, round.format_time(seen.read_at)))
        }
        DeviceHealth::Healthy | DeviceHealth::ClaimedElsewhere(_) => None,
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

/// The last readings of every GPU, in a ring for each.
#[derive(Debug)]
pub(super) struct ReadingHistory {
    most: usize,
    rings: BTreeMap<GpuId, VecDeque<HistoryReading>>,
}

/// The reading of a GPU at one time.
#[derive(Debug, Clone)]
struct HistoryReading {
    at: PoolTime,
    /// The same time on the wall clock, which may be set later.
    wall: std::time::SystemTime,
    memory_used: Option<Bytes>,
    utilization: Option<Percent>,
    temperature_c: Option<i16>,
    power: Option<Milliwatts>,
}

impl ReadingHistory {
    /// Returns an empty history with this many readings of each GPU, at most [`HISTORY_READINGS`].
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.min(HISTORY_READINGS), rings: BTreeMap::new() }
    }

    /// Adds the new readings of a round.
    pub(super) fn record_round(&mut self, round: &SamplingRound) {
        for seen in round.listed() {
            let ring = self.rings.entry(seen.gpu_id).or_default();
            if ring.back().is_some_and(|last| last.at >= seen.read_at) {
                continue;
            }
            ring.push_back(history_reading(seen, round));
            while ring.len() > self.most {
                ring.pop_front();
            }
        }
    }

    /// Returns the body of `GET /gpu/history`.
    pub(super) fn body(&self, round: &SamplingRound) -> GpuHistoryBody {
        let gpu = |seen: &ListedDevice| GpuReadings {
            gpu_id: seen.gpu_id.0,
            name: seen.found.name.as_deref().unwrap_or("unknown GPU").to_owned(),
            readings: self.rings.get(&seen.gpu_id).into_iter().flatten().map(past_reading).collect(),
        };
        GpuHistoryBody { max_history: self.most, gpus: round.listed().map(gpu).collect() }
    }
}

fn history_reading(seen: &ListedDevice, round: &SamplingRound) -> HistoryReading {
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

fn past_reading(past: &HistoryReading) -> PastReading {
    PastReading {
        timestamp: crate::clock::iso(past.wall),
        memory_used_mb: past.memory_used.map(|bytes| bytes.as_mib()),
        utilization_percent: past.utilization.map(|busy| busy.as_number()),
        temperature_c: past.temperature_c.map(i32::from),
        power_draw_w: past.power.map(|power| power.as_number()),
    }
}
