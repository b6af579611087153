//! A sampler at work on devices of a test, with its samples.

use std::ops::Deref;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpupool_api::stats::{GpuBody, StatsBody};
use gpupool_core::{Bytes, GpuId, LeaseId, MilliCpus, NodeFacts, PoolTime};
use gpupool_devices::simulated::{DevicePosition, FaultTarget, SimulatedFault};
use gpupool_devices::{DeviceSource, GpuIdRegistry, SourceError, SourceKind, SourcePaths, SourceReading};

use crate::messages::{DeviceSample, NodeSample};
use crate::node::Simulation;
use crate::node::attribution::{Holding, Holdings};
use crate::node::sampler::{Sampler, SamplerSources, SamplerSpec};
use crate::node::statistics::{CurrentStatistics, DeviceFilter, Statistics};

/// The time after which a test fails rather than hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// The time between two rounds.
pub(crate) const REFRESH: Duration = Duration::from_millis(20);

/// The settings of a sampler under test.
pub(crate) struct SamplerSetup {
    pub sources: Vec<Box<dyn DeviceSource>>,
    pub ids: GpuIdRegistry,
    pub filter: Option<&'static str>,
    pub places: SourcePaths,
    pub simulated: bool,
    pub max_history: usize,
    /// The time between two rounds that statistics expect: readings are stale after three times that.
    pub expected_refresh: Duration,
    pub unresponsive_after: Duration,
}

impl SamplerSetup {
    pub(crate) fn new(sources: Vec<Box<dyn DeviceSource>>) -> Self {
        Self {
            sources,
            ids: GpuIdRegistry::default(),
            filter: None,
            places: SourcePaths::default(),
            simulated: true,
            max_history: 5,
            // On a busy machine a test may take longer than readings are fresh, and few tests are about that.
            expected_refresh: DEADLINE,
            unresponsive_after: Duration::from_millis(200),
        }
    }

    pub(crate) fn start(self) -> SamplerStage {
        let statistics = Arc::new(Statistics::new(
            DeviceFilter::new(self.filter.map(Into::into)),
            self.expected_refresh,
            self.max_history,
        ));
        let holdings = Arc::new(Mutex::new(Holdings::default()));
        let (deliver, samples) = channel();
        let shared_holdings = holdings.clone();
        let published = statistics.clone();
        let sources = SamplerSources {
            sources: self.sources,
            places: (!self.simulated).then_some(self.places),
            claims: None,
            unresponsive_after: self.unresponsive_after,
        };
        let labels = Default::default();
        let node = NodeFacts { name: "test-node".into(), cpus: MilliCpus::ZERO, memory: Bytes::ZERO, labels };
        let spec = SamplerSpec {
            ids: self.ids,
            refresh: REFRESH,
            node,
            holdings: Box::new(move || shared_holdings.lock().unwrap().clone()),
            sample_sink: Box::new(move |sample, failures| {
                // Only the sampler's thread publishes, so this is the round of the sample.
                let (failures, current) = (failures.to_vec(), published.current());
                drop(deliver.send(DeliveredSample { sample, failures, current }));
            }),
            statistics: statistics.clone(),
        };
        let sampler = Sampler::start(sources, spec);
        SamplerStage { sampler: sampler.unwrap(), samples, statistics, holdings }
    }
}

/// A sample, with the round that it was made of.
#[derive(Clone, Debug)]
pub(crate) struct DeliveredSample {
    pub sample: NodeSample,
    pub failures: Vec<(SourceKind, SourceError)>,
    pub current: Arc<CurrentStatistics>,
}

impl Deref for DeliveredSample {
    type Target = NodeSample;

    fn deref(&self) -> &NodeSample {
        &self.sample
    }
}

impl DeliveredSample {
    /// Returns the time at which the device at this place of the sample was last read.
    pub(crate) fn read_at(&self, place: usize) -> PoolTime {
        let gpu_id = self.devices[place].gpu_id;
        self.current.round.devices.iter().find(|device| device.gpu_id == gpu_id).unwrap().read_at
    }

    /// Returns the numbers of the present devices, listed or not.
    pub(crate) fn present(&self) -> Vec<u32> {
        self.current.round.present().map(|device| device.gpu_id.0).collect()
    }
}

/// A sampler at work, with its samples and statistics.
pub(crate) struct SamplerStage {
    pub sampler: Sampler,
    pub samples: Receiver<DeliveredSample>,
    pub statistics: Arc<Statistics>,
    pub holdings: Arc<Mutex<Holdings>>,
}

impl SamplerStage {
    /// Waits for a sample that meets a condition.
    pub(crate) fn sample(&self, what: &str, wanted: impl Fn(&DeliveredSample) -> bool) -> DeliveredSample {
        let start = Instant::now();
        let mut last = None;
        while start.elapsed() < DEADLINE {
            let Ok(sample) = self.samples.recv_timeout(DEADLINE) else { break };
            if wanted(&sample) {
                return sample;
            }
            last = Some(sample);
        }
        panic!("no sample in which {what}; the last was {last:#?}");
    }

    /// Waits for statistics that meet a condition, checked after each sample.
    pub(crate) fn stats(&self, what: &str, wanted: impl Fn(&StatsBody) -> bool) -> StatsBody {
        let current = || self.stats_response().1;
        self.sample(what, |_| wanted(&current()));
        // Published before the sample was delivered, and perhaps again since.
        let stats = current();
        if wanted(&stats) { stats } else { self.stats(what, wanted) }
    }

    /// Returns the response of `/gpu/stats`, as a client reads it.
    pub(crate) fn stats_response(&self) -> (u16, StatsBody) {
        let prepared = self.statistics.stats();
        (prepared.status, serde_json::from_slice(&prepared.body).unwrap())
    }

    /// Lets a lease hold devices.
    pub(crate) fn hold(&self, lease: u64, devices: &[u32]) {
        let devices = devices.iter().copied().map(GpuId).collect();
        let holding = Holding { lease: LeaseId(lease), devices, ..Holding::default() };
        self.holdings.lock().unwrap().leases.push(holding);
    }
}

/// Whether every device of a sample was read for it.
pub(crate) fn all_read(sample: &DeliveredSample) -> bool {
    !sample.devices.is_empty() && sample.devices.iter().all(|device| device.reading.is_some())
}

/// Returns a property of each device.
pub(crate) fn each<T>(sample: &DeliveredSample, of: impl Fn(&DeviceSample) -> T) -> Vec<T> {
    sample.devices.iter().map(of).collect()
}

/// Returns a property of each GPU.
pub(crate) fn of_gpus<T>(stats: &StatsBody, of: impl Fn(&GpuBody) -> T) -> Vec<T> {
    stats.gpus.iter().map(of).collect()
}

/// Returns simulated devices, and their source.
pub(crate) fn simulated(text: &str) -> (Simulation, Box<dyn DeviceSource>) {
    Simulation::new(text, "test-node").unwrap()
}

/// Starts a sampler of simulated devices.
pub(crate) fn start(text: &str) -> (Simulation, SamplerStage) {
    let (simulation, source) = simulated(text);
    (simulation, SamplerSetup::new(vec![source]).start())
}

/// Starts a sampler with readings that are stale as soon as a few are missing.
pub(crate) fn start_impatient(sources: Vec<Box<dyn DeviceSource>>) -> SamplerStage {
    let mut setup = SamplerSetup::new(sources);
    setup.expected_refresh = REFRESH;
    setup.start()
}

/// Returns the simulated device at this place.
pub(crate) fn at(place: usize) -> FaultTarget {
    FaultTarget::Position(DevicePosition(place))
}

/// Injects a fault, in the spelling of users.
pub(crate) fn fault(simulation: &Simulation, target: &FaultTarget, text: &str) {
    let fault: SimulatedFault = text.parse().unwrap();
    assert!(simulation.control().inject_fault(target, &fault).unwrap() > 0);
}

/// Clears all faults.
pub(crate) fn mend(simulation: &Simulation) {
    simulation.control().clear_faults(&FaultTarget::All, None).unwrap();
}

/// A source with scripted replies, of any kind.
struct ScriptedSource<F>(SourceKind, F);

impl<F: FnMut() -> Result<SourceReading, SourceError> + Send> DeviceSource for ScriptedSource<F> {
    fn kind(&self) -> SourceKind {
        self.0
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        (self.1)()
    }
}

/// Returns a source with scripted replies, of any kind.
pub(crate) fn scripted(
    kind: SourceKind,
    read: impl FnMut() -> Result<SourceReading, SourceError> + Send + 'static,
) -> Box<dyn DeviceSource> {
    Box::new(ScriptedSource(kind, read))
}
