//! The books of the sampler: what came in, and the sample and the round that are made of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use gpupool_api::pool::Process;
use gpupool_core::Time;
use gpupool_core::device::{DeviceFacts, DeviceIdentity, Health, Link};
use gpupool_core::ids::GpuId;
use gpupool_core::reading::Reading;
use gpupool_devices::{
    DeviceTracker, Found, GpuIds, ProbeAnswer, SourceError, SourceKind, TrackedChange, TrackedDevice,
};

use super::processes::Whose;
use super::slot::Slot;
use super::whose::Holdings;
use crate::clock;
use crate::stats::{Round, Seen, SourceSeen, SourceState, Statistics};

/// What was read, for the pool.
#[derive(Debug, Clone)]
pub struct Sample {
    /// When it was put together.
    pub at: Time,
    /// Devices that take work and are listed, by number. One that is not here any more takes no work any more.
    pub devices: Vec<SampledDevice>,
    /// Every device that is there, by number, listed or not: what the environment of a job is made of.
    pub all: Arc<[Found]>,
    /// The numbers of `all`, place by place.
    pub all_ids: Arc<[GpuId]>,
    /// How devices are joined.
    pub links: Vec<Link>,
    /// Sources that are here and do not answer, and why.
    pub troubles: Vec<(SourceKind, SourceError)>,
    /// What changed since the last sample.
    pub changes: Vec<TrackedChange>,
    /// Every number given so far, to be kept across restarts; `None` where none was given since the last sample.
    pub numbers: Option<Vec<(DeviceIdentity, GpuId)>>,
}

/// A device in a sample.
#[derive(Debug, Clone)]
pub struct SampledDevice {
    /// Its small number.
    pub gpu_id: GpuId,
    /// What makes it the same device tomorrow.
    pub identity: DeviceIdentity,
    /// What it is.
    pub facts: DeviceFacts,
    /// Whether it can be trusted with work; not while its driver is gone, mismatched or unresponsive.
    pub health: Health,
    /// What it read; `None` where it was not read since the last sample.
    pub reading: Option<Reading>,
    /// As it was found.
    pub found: Arc<Found>,
    /// When it was last read.
    pub read_at: Time,
}

/// The books.
pub struct Book {
    tracker: DeviceTracker,
    simulated: bool,
    holdings: Box<dyn FnMut() -> Holdings + Send>,
    /// Processes of the last reading of each device.
    processes: BTreeMap<GpuId, Arc<[Process]>>,
    changes: Vec<TrackedChange>,
    all: (Arc<[Found]>, Arc<[GpuId]>),
    answered_at: Option<Time>,
    numbers_told: usize,
    warnings_told: Vec<String>,
}

impl Book {
    pub fn new(ids: GpuIds, simulated: bool, holdings: Box<dyn FnMut() -> Holdings + Send>) -> Self {
        let numbers_told = ids.iter().count();
        Self {
            // A device could offer MPS, but the agent does not start its service.
            tracker: DeviceTracker::new(ids).without_mps(),
            simulated,
            holdings,
            processes: BTreeMap::new(),
            changes: Vec::new(),
            all: (Arc::new([]), Arc::new([])),
            answered_at: None,
            numbers_told,
            warnings_told: Vec::new(),
        }
    }

    /// Takes in an answer.
    pub fn observe(&mut self, answer: ProbeAnswer) {
        let at = time_of(answer.taken);
        // That something is not on this machine is an answer, too.
        if matches!(answer.result, Ok(_) | Err(SourceError::NotHere { .. })) {
            self.answered_at = self.answered_at.max(Some(at));
        }
        if let Ok(snapshot) = &answer.result {
            for warning in &snapshot.warnings {
                tracing::debug!(source = %answer.kind, "{warning}");
            }
        }
        self.changes.extend(self.tracker.observe(at, answer.kind, answer.result));
    }

    /// What is known now, for the pool and for statistics.
    pub fn tell(&mut self, slots: &[Slot], statistics: &Statistics) -> (Sample, Round) {
        let clock = clock::both();
        let sources: Vec<SourceSeen> = slots.iter().map(Slot::seen).collect();
        let readings = self.take_readings(slots);
        let known = self.tracker.devices();
        let numbered: Vec<(GpuId, &Found)> = known.iter().map(|it| (it.gpu_id, &*it.found)).collect();
        let visible = statistics.filter().among(&numbered);
        if !known.is_empty() && visible.warnings != self.warnings_told {
            visible.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            self.warnings_told.clone_from(&visible.warnings);
        }
        let (mut seen, mut devices) = (Vec::with_capacity(known.len()), Vec::with_capacity(known.len()));
        for device in known {
            let shown = visible.shows(device.gpu_id);
            seen.push(Seen {
                gpu_id: device.gpu_id,
                identity: device.identity.clone(),
                found: device.found.clone(),
                source: device.source,
                health: device.health.clone(),
                read_at: device.read_at,
                visible: shown,
                processes: self.processes.get(&device.gpu_id).cloned().unwrap_or_default(),
            });
            if shown && device.found.takes_work() {
                devices.push(SampledDevice {
                    gpu_id: device.gpu_id,
                    identity: device.identity.clone(),
                    facts: (*device.facts).clone(),
                    health: device.health.clone(),
                    reading: readings.get(&device.gpu_id).cloned(),
                    found: device.found.clone(),
                    read_at: device.read_at,
                });
            }
        }
        let sample = Sample {
            at: clock.pool,
            devices,
            all: self.all.0.clone(),
            all_ids: self.all.1.clone(),
            links: self.tracker.links().copied().collect(),
            troubles: sources.iter().filter_map(trouble).collect(),
            changes: std::mem::take(&mut self.changes),
            numbers: self.new_numbers(),
        };
        let (refresh, answered_at) = (statistics.refresh(), self.answered_at);
        (sample, Round { clock, devices: seen, sources, answered_at, refresh, stopped: false })
    }

    /// What devices read that were read since the last time.
    fn take_readings(&mut self, slots: &[Slot]) -> BTreeMap<GpuId, Reading> {
        let (known, read) = (self.tracker.devices(), self.tracker.take_read());
        if read.is_empty() && self.all.1.len() == present(&known).count() {
            return BTreeMap::new();
        }
        let whose = Whose {
            holdings: (self.holdings)(),
            dossiers: slots.iter().map(|slot| slot.dossier().current()).collect(),
            simulated: self.simulated,
        };
        let mut readings = BTreeMap::new();
        for device in known.iter().filter(|device| read.contains(&device.gpu_id)) {
            let (gpu_id, found) = (device.gpu_id, &device.found);
            readings.insert(gpu_id, found.reading(device.read_at, |process| whose.is(process, gpu_id)));
            let processes = found.processes.value().into_iter().flatten();
            self.processes.insert(gpu_id, processes.map(|process| whose.body(process, gpu_id)).collect());
        }
        let there = || present(&known);
        self.all = (there().map(|it| (*it.found).clone()).collect(), there().map(|it| it.gpu_id).collect());
        readings
    }

    fn new_numbers(&mut self) -> Option<Vec<(DeviceIdentity, GpuId)>> {
        let numbers = self.tracker.ids().iter();
        let given = numbers.count();
        if given == self.numbers_told {
            return None;
        }
        self.numbers_told = given;
        Some(self.tracker.ids().iter().map(|(identity, gpu_id)| (identity.clone(), gpu_id)).collect())
    }
}

fn present(known: &[Arc<TrackedDevice>]) -> impl Iterator<Item = &Arc<TrackedDevice>> {
    known.iter().filter(|device| device.is_present)
}

/// When something was, on the pool's clock; never ahead of it.
fn time_of(taken: Instant) -> Time {
    let ago = u64::try_from(taken.elapsed().as_millis()).unwrap_or(u64::MAX);
    Time(clock::now().0.saturating_sub(ago))
}

fn trouble(source: &SourceSeen) -> Option<(SourceKind, SourceError)> {
    match &source.state {
        SourceState::Failed(error) if !matches!(error, SourceError::NotHere { .. }) => {
            Some((source.kind, error.clone()))
        }
        _ => None,
    }
}
