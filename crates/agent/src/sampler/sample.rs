//! The books of the sampler: what came in, and the sample and the round that are made of it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gpupool_api::pool::Process;
use gpupool_core::Time;
use gpupool_core::device::{DeviceFacts, DeviceIdentity, Health, Link, PciAddress};
use gpupool_core::ids::GpuId;
use gpupool_core::reading::Reading;
use gpupool_devices::gpu_ids::GpuIds;
use gpupool_devices::probe::Answer;
use gpupool_devices::watch::{Change, Watch, Watched};
use gpupool_devices::{Found, Partition, SourceError, SourceKind, Told};

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
    pub changes: Vec<Change>,
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

/// What was made of the last reading of a device.
struct Kept {
    read_at: Time,
    found: Arc<Found>,
    facts: DeviceFacts,
    processes: Arc<[Process]>,
}

/// The books.
pub struct Book {
    watch: Watch,
    simulated: bool,
    holdings: Box<dyn FnMut() -> Holdings + Send>,
    kept: BTreeMap<GpuId, Kept>,
    changes: Vec<Change>,
    all: (Arc<[Found]>, Arc<[GpuId]>),
    answered_at: Option<Time>,
    numbers_told: usize,
    warnings_told: Vec<String>,
}

impl Book {
    pub fn new(ids: GpuIds, simulated: bool, holdings: Box<dyn FnMut() -> Holdings + Send>) -> Self {
        let numbers_told = ids.iter().count();
        Self {
            watch: Watch::new(ids),
            simulated,
            holdings,
            kept: BTreeMap::new(),
            changes: Vec::new(),
            all: (Arc::new([]), Arc::new([])),
            answered_at: None,
            numbers_told,
            warnings_told: Vec::new(),
        }
    }

    /// Takes in an answer.
    pub fn observe(&mut self, answer: Answer) {
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
        self.changes.extend(self.watch.observe(at, answer.kind, answer.result));
    }

    /// What is known now, for the pool and for statistics.
    pub fn tell(&mut self, slots: &[Slot], statistics: &Statistics) -> (Sample, Round) {
        let clock = clock::both();
        let sources: Vec<SourceSeen> = slots.iter().map(Slot::seen).collect();
        let readings = self.take_readings(slots);
        let known = self.watch.devices();
        let numbered: Vec<(GpuId, &Found)> = known.iter().map(|(_, it)| (it.gpu_id, &it.found)).collect();
        let visible = statistics.filter().among(&numbered);
        if !known.is_empty() && visible.warnings != self.warnings_told {
            visible.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            self.warnings_told.clone_from(&visible.warnings);
        }
        let (mut seen, mut devices) = (Vec::with_capacity(known.len()), Vec::with_capacity(known.len()));
        for (identity, watched) in known {
            let Some(kept) = self.kept.get(&watched.gpu_id) else { continue };
            let (gpu_id, health) = (watched.gpu_id, health(watched, &sources));
            let shown = visible.shows(gpu_id);
            seen.push(Seen {
                gpu_id,
                identity: identity.clone(),
                found: kept.found.clone(),
                source: watched.source,
                health: health.clone(),
                read_at: kept.read_at,
                visible: shown,
                processes: kept.processes.clone(),
            });
            if shown && kept.found.takes_work() {
                devices.push(SampledDevice {
                    gpu_id,
                    identity: identity.clone(),
                    facts: kept.facts.clone(),
                    health,
                    reading: readings.get(&gpu_id).cloned(),
                    found: kept.found.clone(),
                    read_at: kept.read_at,
                });
            }
        }
        let sample = Sample {
            at: clock.pool,
            devices,
            all: self.all.0.clone(),
            all_ids: self.all.1.clone(),
            links: self.watch.links().copied().collect(),
            troubles: sources.iter().filter_map(trouble).collect(),
            changes: std::mem::take(&mut self.changes),
            numbers: self.new_numbers(),
        };
        let (refresh, answered_at) = (statistics.refresh(), self.answered_at);
        (sample, Round { clock, devices: seen, sources, answered_at, refresh, stopped: false })
    }

    /// What devices read that were read since the last time.
    fn take_readings(&mut self, slots: &[Slot]) -> BTreeMap<GpuId, Reading> {
        let known = self.watch.devices();
        let is_new = |watched: &Watched| self.kept.get(&watched.gpu_id).is_none_or(|it| it.read_at < watched.read_at);
        if !known.iter().any(|(_, watched)| is_new(watched)) && self.all.1.len() == present(&known).count() {
            return BTreeMap::new();
        }
        let whose = Whose {
            holdings: (self.holdings)(),
            dossiers: slots.iter().map(|slot| slot.dossier().current()).collect(),
            simulated: self.simulated,
        };
        let cards = cards(&known);
        let mut readings = BTreeMap::new();
        for (identity, watched) in &known {
            let before = self.kept.get(&watched.gpu_id);
            if before.is_some_and(|kept| kept.read_at >= watched.read_at) {
                continue;
            }
            let (gpu_id, found) = (watched.gpu_id, &watched.found);
            readings.insert(gpu_id, found.reading(watched.read_at, |process| whose.is(process, gpu_id)));
            let processes = found.processes.value().into_iter().flatten();
            let kept = Kept {
                read_at: watched.read_at,
                found: Arc::new(found.clone()),
                facts: facts(identity, found, &cards, before.map(|kept| &kept.facts)),
                processes: processes.map(|process| whose.body(process, gpu_id)).collect(),
            };
            self.kept.insert(gpu_id, kept);
        }
        let there = || present(&known);
        self.all = (there().map(|it| it.found.clone()).collect(), there().map(|it| it.gpu_id).collect());
        readings
    }

    fn new_numbers(&mut self) -> Option<Vec<(DeviceIdentity, GpuId)>> {
        let numbers = self.watch.ids().iter();
        let given = numbers.count();
        if given == self.numbers_told {
            return None;
        }
        self.numbers_told = given;
        Some(self.watch.ids().iter().map(|(identity, gpu_id)| (identity.clone(), gpu_id)).collect())
    }
}

fn present<'a>(known: &[(&'a DeviceIdentity, &'a Watched)]) -> impl Iterator<Item = &'a Watched> {
    known.iter().map(|(_, watched)| *watched).filter(|watched| watched.is_present())
}

/// When something was, on the pool's clock; never ahead of it.
fn time_of(taken: Instant) -> Time {
    let ago = u64::try_from(taken.elapsed().as_millis()).unwrap_or(u64::MAX);
    Time(clock::now().0.saturating_sub(ago))
}

/// Whether a device can be trusted with new work. Not while its driver is away: what runs goes on, what starts would
/// hang or fail. Any other failure to read says nothing about the device.
fn health(watched: &Watched, sources: &[SourceSeen]) -> Health {
    let source = sources.iter().find(|source| source.kind == watched.source);
    let away = source.and_then(|source| match &source.state {
        SourceState::Failed(
            error @ (SourceError::DriverNotLoaded(_)
            | SourceError::VersionMismatch(_)
            | SourceError::Unresponsive { .. }),
        ) => Some(error),
        _ => None,
    });
    match (watched.health(), away) {
        (Health::Healthy, Some(SourceError::Unresponsive { .. })) => Health::Unhealthy("driver unresponsive".into()),
        (Health::Healthy, Some(error)) => Health::Unhealthy(error.to_string().into()),
        (health, _) => health,
    }
}

fn trouble(source: &SourceSeen) -> Option<(SourceKind, SourceError)> {
    match &source.state {
        SourceState::Failed(error) if !matches!(error, SourceError::NotHere { .. }) => {
            Some((source.kind, error.clone()))
        }
        _ => None,
    }
}

/// The whole GPUs by their place on the bus.
fn cards<'a>(known: &[(&'a DeviceIdentity, &'a Watched)]) -> HashMap<PciAddress, &'a DeviceIdentity> {
    let whole = known.iter().filter(|(_, watched)| watched.found.partition.is_none());
    whole.filter_map(|(identity, watched)| Some((watched.found.pci?, *identity))).collect()
}

/// What a device is. How much memory it has does not change because it failed to tell this time.
fn facts(
    identity: &DeviceIdentity,
    found: &Found,
    cards: &HashMap<PciAddress, &DeviceIdentity>,
    before: Option<&DeviceFacts>,
) -> DeviceFacts {
    let parent_uuid = match &found.partition {
        Some(Partition::Mig { parent_uuid, .. }) => parent_uuid.clone().map(DeviceIdentity::Uuid),
        _ => None,
    };
    let card = found.pci.and_then(|pci| cards.get(&pci)).map(|identity| (*identity).clone());
    let mut facts = found.facts(identity.clone(), card.or(parent_uuid));
    // The device could, but nobody here starts the service it takes: what is not done is not promised.
    facts.isolation.mps = false;
    if let Some(before) = before
        && (matches!(found.memory.total, Told::Failed(_)) || matches!(found.memory.reserved, Told::Failed(_)))
    {
        facts.memory = before.memory;
    }
    facts
}
