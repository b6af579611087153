//! The sampler: reads every device of the node at a fixed interval, and publishes the readings.
//!
//! One thread keeps the interval. Each source is read on a thread of its own ([`SourceProbe`]), which also gathers
//! evidence about the processes on its devices ([`super::evidence`]). A round requests a reading of every idle source
//! and waits a short while for all of them. A later reply is published when it comes, with the time of its reading. A
//! hung driver therefore delays neither the other sources nor the next round. The thread ends with [`Sampler::stop`] or
//! when the sampler is dropped; the thread of a source ends once the source has replied.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpupool_api::pool::ProcessBody;
use gpupool_core::{DeviceReading, GpuId, NodeFacts, PoolTime};
use gpupool_devices::{
    DetectedDevice, DeviceSource, DeviceTracker, GpuIdRegistry, ProbeReply, SourceError, SourceKind, SourcePaths,
    SourceProbe, SourceState, SourceStatus,
};

use crate::abort_on_panic::AbortOnPanic;
use crate::clock;
use crate::messages::{DeviceSample, NodeSample};

use super::attribution::{Holdings, LeaseAttributor};
use super::device_claims::{DeviceClaims, card_of};
use super::evidence::{EvidenceBoard, EvidenceSource};
use super::statistics::{ListedDevice, SamplingRound, Statistics};

/// The time that the first round waits for sources before the agent starts without the others.
const FIRST_PATIENCE: Duration = Duration::from_millis(80);
/// The longest time that a later round waits for all sources.
const PATIENCE: Duration = Duration::from_millis(250);
/// The shortest time between two rounds.
const SHORTEST_REFRESH: Duration = Duration::from_millis(10);
/// The time without a reply after which a source is unresponsive.
pub(super) const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(10);

/// The sources that failed, with their errors.
pub(super) type SourceFailures = [(SourceKind, SourceError)];
/// Takes samples.
pub(super) type SampleSink = Box<dyn FnMut(NodeSample, &SourceFailures) + Send>;

/// Everything that a sampler needs besides its sources.
pub(super) struct SamplerSpec {
    /// The numbers that devices had before.
    pub ids: GpuIdRegistry,
    /// The time between two readings.
    pub refresh: Duration,
    /// The node that is sampled.
    pub node: NodeFacts,
    /// Returns the holdings of leases, for the attribution of processes. Must not block.
    pub holdings: Box<dyn FnMut() -> Holdings + Send>,
    /// Takes a sample after each round and after each late reply. Must not block.
    pub sample_sink: SampleSink,
    /// The statistics to publish; their filter selects the sampled devices.
    pub statistics: Arc<Statistics>,
}

/// The sources of a sampler.
pub(super) struct SamplerSources {
    /// The sources.
    pub sources: Vec<Box<dyn DeviceSource>>,
    /// The paths at which processes are looked up; `None` if devices and processes are simulated.
    pub places: Option<SourcePaths>,
    /// The claims on cards of this machine; `None` if there is nothing to claim.
    pub claims: Option<DeviceClaims>,
    /// The time without a reply after which a source is unresponsive; usually [`UNRESPONSIVE_AFTER`].
    pub unresponsive_after: Duration,
}

/// A running sampler.
#[derive(Debug)]
pub(super) struct Sampler {
    wakeups: SyncSender<SamplerWakeup>,
    first_round: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// A message to the sampler's thread.
#[derive(Debug)]
enum SamplerWakeup {
    /// The source with this number has replied.
    Replied(usize),
    /// The sampler must end.
    Stop,
}

impl Sampler {
    /// Starts the sampler. The first reading is taken at once.
    pub(super) fn start(sources: SamplerSources, spec: SamplerSpec) -> io::Result<Self> {
        let simulated = sources.places.is_none();
        // For each source, at most the wakeups of a reply that was already taken and of the next one; and one to stop.
        let (wakeups, inbox) = sync_channel(2 * sources.sources.len() + 1);
        let (first, first_round) = sync_channel(1);
        let open = |(number, source)| {
            let wakeups = wakeups.clone();
            let replied = move || drop(wakeups.try_send(SamplerWakeup::Replied(number)));
            SampledSource::start(source, sources.places.as_ref(), sources.unresponsive_after, replied)
        };
        let opened = sources.sources.into_iter().enumerate().map(open).collect::<io::Result<Vec<_>>>()?;
        let rounds = SamplingLoop {
            sources: opened,
            tracker: DeviceTracker::new(spec.ids).without_mps(),
            simulated,
            claims: sources.claims,
            processes: BTreeMap::new(),
            answered_at: None,
            warnings: Vec::new(),
            refresh: spec.refresh.max(SHORTEST_REFRESH),
            node: spec.node,
            holdings: spec.holdings,
            sample_sink: spec.sample_sink,
            statistics: spec.statistics,
            inbox,
            replies: Vec::new(),
            first: Some(first),
        };
        let thread = thread::Builder::new().name("sampler".to_owned()).spawn(move || {
            let _guard = AbortOnPanic("sampler");
            rounds.run();
        })?;
        Ok(Self { wakeups, first_round, thread: Some(thread) })
    }

    /// Waits until the first round was published, for `at_most`. Returns whether it was.
    pub(super) fn wait_for_first(&self, at_most: Duration) -> bool {
        self.first_round.recv_timeout(at_most).is_ok()
    }

    /// Ends the sampler, and waits until it has ended. The thread of a hung source is abandoned.
    pub(super) fn stop(mut self) {
        let _ = self.wakeups.send(SamplerWakeup::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the sampler had ended before with a panic");
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // It may be dropped on a thread that it delivers to, so the end is not awaited.
        let _ = self.wakeups.try_send(SamplerWakeup::Stop);
    }
}

/// A source with its probe, and with the evidence about the processes on its devices.
struct SampledSource {
    probe: SourceProbe,
    evidence: EvidenceBoard,
    /// Whether its reading was requested in this round, so that it is worth waiting for.
    is_requested: bool,
}

impl SampledSource {
    fn start(
        source: Box<dyn DeviceSource>,
        places: Option<&SourcePaths>,
        unresponsive_after: Duration,
        replied: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let evidence = EvidenceBoard::default();
        let source = match places {
            Some(places) => Box::new(EvidenceSource::new(source, places, evidence.clone())),
            None => source,
        };
        let probe = SourceProbe::start_with_callback(source, unresponsive_after, replied)?;
        Ok(Self { probe, evidence, is_requested: false })
    }

    /// Requests a reading, unless one is pending.
    fn request_reading(&mut self) {
        self.is_requested = !self.probe.is_pending();
        self.probe.request_reading();
    }

    /// Whether a reply may come soon. A request of an earlier round is not waited for.
    fn is_awaited(&self) -> bool {
        self.is_requested && self.probe.is_pending()
    }
}

#[derive(PartialEq, Eq)]
enum WaitOutcome {
    Enough,
    Stopped,
}

/// Everything that the sampler's thread owns.
struct SamplingLoop {
    sources: Vec<SampledSource>,
    tracker: DeviceTracker,
    simulated: bool,
    claims: Option<DeviceClaims>,
    /// The processes of the last reading of each device.
    processes: BTreeMap<GpuId, Arc<[ProcessBody]>>,
    answered_at: Option<PoolTime>,
    /// The warnings about the filter that were logged.
    warnings: Vec<String>,
    refresh: Duration,
    node: NodeFacts,
    holdings: Box<dyn FnMut() -> Holdings + Send>,
    sample_sink: SampleSink,
    statistics: Arc<Statistics>,
    inbox: Receiver<SamplerWakeup>,
    /// Replies that were taken and not published yet, with the numbers of their sources.
    replies: Vec<(usize, ProbeReply)>,
    /// Used once, after the first round.
    first: Option<SyncSender<()>>,
}

impl SamplingLoop {
    fn run(mut self) {
        let mut due = Instant::now();
        let mut patience = FIRST_PATIENCE;
        loop {
            self.sources.iter_mut().for_each(SampledSource::request_reading);
            if self.collect_replies(due + patience) == WaitOutcome::Stopped {
                return;
            }
            // An overdue source is reported once a round, and a reply whose wakeup is still on its way is taken.
            for source in 0..self.sources.len() {
                self.take_reply(source);
            }
            self.publish_round();
            due = next_due(due, self.refresh, Instant::now());
            if self.publish_late_replies(due) == WaitOutcome::Stopped {
                return;
            }
            patience = PATIENCE.min(self.refresh / 2);
        }
    }

    /// Takes replies until all that were requested in this round are there, or until a time.
    fn collect_replies(&mut self, until: Instant) -> WaitOutcome {
        while self.sources.iter().any(SampledSource::is_awaited) {
            match self.receive(until) {
                Ok(SamplerWakeup::Replied(source)) => {
                    self.take_reply(source);
                }
                Ok(SamplerWakeup::Stop) | Err(RecvTimeoutError::Disconnected) => return WaitOutcome::Stopped,
                Err(RecvTimeoutError::Timeout) => return WaitOutcome::Enough,
            }
        }
        WaitOutcome::Enough
    }

    fn publish_late_replies(&mut self, until: Instant) -> WaitOutcome {
        loop {
            match self.receive(until) {
                Ok(SamplerWakeup::Replied(source)) => {
                    if self.take_reply(source) {
                        self.publish_round();
                    }
                }
                Ok(SamplerWakeup::Stop) | Err(RecvTimeoutError::Disconnected) => return WaitOutcome::Stopped,
                Err(RecvTimeoutError::Timeout) => return WaitOutcome::Enough,
            }
        }
    }

    fn receive(&self, until: Instant) -> Result<SamplerWakeup, RecvTimeoutError> {
        self.inbox.recv_timeout(until.saturating_duration_since(Instant::now()))
    }

    /// Takes a reply, if there is one. The wakeup of a reply that was already taken finds none.
    fn take_reply(&mut self, source: usize) -> bool {
        let Some(reply) = self.sources.get_mut(source).and_then(|source| source.probe.poll_reading()) else {
            return false;
        };
        self.replies.push((source, reply));
        true
    }

    fn publish_round(&mut self) {
        // In the order of the sources, not of their replies: new devices are numbered as they come.
        self.replies.sort_by_key(|(source, _)| *source);
        for (_, reply) in std::mem::take(&mut self.replies) {
            self.track_reply(reply);
        }
        let (sample, round) = self.summarize_round();
        let failures: Vec<_> = round.sources.iter().filter_map(source_failure).collect();
        self.statistics.publish(round);
        (self.sample_sink)(sample, &failures);
        if let Some(first) = self.first.take() {
            let _ = first.try_send(());
        }
    }

    fn track_reply(&mut self, reply: ProbeReply) {
        let at = time_of(reply.taken);
        // A source that is not on this machine has replied, too.
        if matches!(reply.result, Ok(_) | Err(SourceError::NotPresent { .. })) {
            self.answered_at = self.answered_at.max(Some(at));
        }
        if let Ok(snapshot) = &reply.result {
            for warning in &snapshot.warnings {
                tracing::debug!(source = %reply.kind, "{warning}");
            }
        }
        self.tracker.observe(at, reply.kind, reply.result);
    }

    /// Returns everything that is known now, for the pool and for the statistics.
    fn summarize_round(&mut self) -> (NodeSample, SamplingRound) {
        let clock = clock::both();
        let mut readings = self.take_readings();
        let tracked = self.tracker.devices();
        let numbered: Vec<(GpuId, &DetectedDevice)> =
            tracked.iter().map(|device| (device.gpu_id, &*device.found)).collect();
        let visible = self.statistics.filter().among(&numbered);
        if !tracked.is_empty() && visible.warnings != self.warnings {
            visible.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            self.warnings.clone_from(&visible.warnings);
        }
        let devices: Vec<ListedDevice> = tracked
            .into_iter()
            .map(|tracked| ListedDevice {
                visible: visible.shows(tracked.gpu_id),
                processes: self.processes.get(&tracked.gpu_id).cloned().unwrap_or_default(),
                tracked,
            })
            .collect();
        let takes_work = || devices.iter().filter(|device| device.visible && device.found.takes_work());
        let card = |device: &ListedDevice| card_of(&device.found, &device.facts.identity);
        let rivals = self.claims.as_mut().map_or_else(Vec::new, |claims| {
            let now = Instant::now();
            claims.update(&takes_work().map(card).collect::<BTreeSet<_>>(), now);
            claims.findings(now)
        });
        let health = |device: &ListedDevice| match &self.claims {
            Some(claims) => claims.health_of(&card(device), &device.health),
            None => device.health.clone(),
        };
        let sampled = takes_work().map(|device| DeviceSample {
            gpu_id: device.gpu_id,
            facts: device.facts.clone(),
            health: health(device),
            reading: readings.remove(&device.gpu_id),
        });
        let sample = NodeSample {
            node: self.node.clone(),
            devices: sampled.collect(),
            links: self.tracker.links().copied().collect(),
        };
        let sources = self.sources.iter().map(|source| source.probe.status()).collect();
        let (refresh, answered_at) = (self.statistics.refresh(), self.answered_at);
        (sample, SamplingRound { clock, devices, sources, answered_at, refresh, rivals, stopped: false })
    }

    /// Returns the readings of the devices that were read since the last time.
    fn take_readings(&mut self) -> BTreeMap<GpuId, DeviceReading> {
        let read = self.tracker.take_sampled_gpus();
        if read.is_empty() {
            return BTreeMap::new();
        }
        let attributor = LeaseAttributor {
            holdings: (self.holdings)(),
            evidence: self.sources.iter().map(|source| source.evidence.current()).collect(),
            simulated: self.simulated,
        };
        let mut readings = BTreeMap::new();
        for device in self.tracker.devices().iter().filter(|device| read.contains(&device.gpu_id)) {
            let (gpu_id, found, read_at) = (device.gpu_id, &device.found, device.read_at);
            let mut reading = found.reading(read_at, |process| attributor.attribute(process, gpu_id));
            reading.leases_as_of = Some(attributor.holdings.leases_as_of(gpu_id, read_at));
            readings.insert(gpu_id, reading);
            let processes = found.processes.value().into_iter().flatten();
            self.processes.insert(gpu_id, processes.map(|process| attributor.describe(process, gpu_id)).collect());
        }
        readings
    }
}

/// Returns the time of the next round. Missed rounds are skipped, and the later ones stay in step.
fn next_due(due: Instant, refresh: Duration, now: Instant) -> Instant {
    let late = now.saturating_duration_since(due);
    let missed = late.as_nanos() / refresh.as_nanos().max(1);
    let steps = u32::try_from(missed).unwrap_or(u32::MAX).saturating_add(1);
    refresh.checked_mul(steps).and_then(|step| due.checked_add(step)).unwrap_or(now + refresh)
}

/// Returns an instant on the pool's clock, never ahead of it.
fn time_of(taken: Instant) -> PoolTime {
    let ago = u64::try_from(taken.elapsed().as_millis()).unwrap_or(u64::MAX);
    PoolTime(clock::now().0.saturating_sub(ago))
}

fn source_failure(source: &SourceStatus) -> Option<(SourceKind, SourceError)> {
    match &source.state {
        SourceState::Failed(error) if !matches!(error, SourceError::NotPresent { .. }) => {
            Some((source.kind, error.clone()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_stay_in_step_after_a_long_one() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let due_after = |millis| next_due(start, second, start + Duration::from_millis(millis)) - start;
        assert_eq!(due_after(0), second);
        assert_eq!(due_after(250), second);
        assert_eq!(due_after(999), second);
        assert_eq!(due_after(1000), 2 * second, "a round that took all the time leaves one out");
        assert_eq!(due_after(7_300), 8 * second);
    }
}
