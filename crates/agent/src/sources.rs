//! Where readings come from: the machine's own devices, or simulated ones.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::Config;
use gpupool_devices::{GpuIds, Places, Source, SourceChoice};

use crate::error::AgentError;
use crate::metrics::Metrics;
use crate::owner::Owner;
use crate::sampler::limits::UNRESPONSIVE_AFTER;
use crate::sampler::{Holdings, Sampler, SamplerSpec};
use crate::simulation::Simulation;
use crate::stats::Statistics;

/// How long the first reading may hold up the start.
const FIRST_READING: Duration = Duration::from_millis(100);

/// The sources of an agent.
pub struct Sources {
    sources: Vec<Box<dyn Source>>,
    places: Places,
    /// The handle to simulated devices.
    pub simulation: Option<Arc<Simulation>>,
}

impl Sources {
    /// Those that the configuration means.
    pub fn of(config: &Config) -> Result<Self, AgentError> {
        let places = Places::from_env(|name| std::env::var_os(name).map(Into::into));
        if let Some(text) = &config.monitoring.simulate {
            let (simulation, source) = Simulation::new(text, &config.server.node_name).map_err(AgentError::Simulate)?;
            return Ok(Self { sources: vec![source], places, simulation: Some(Arc::new(simulation)) });
        }
        let choice: SourceChoice = config.monitoring.backend.parse()?;
        // A tool that hangs is ended before its source counts as unresponsive.
        let sources = choice.sources(&places, UNRESPONSIVE_AFTER.mul_f64(0.8));
        Ok(Self { sources, places, simulation: None })
    }

    /// Starts reading; comes back after the first reading, or a little later.
    pub fn start(
        self,
        ids: GpuIds,
        config: &Config,
        owner: &Owner,
        statistics: Arc<Statistics>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Sampler> {
        let (asked, told) = (owner.clone(), owner.clone());
        let sampler = Sampler::start(SamplerSpec {
            sources: self.sources,
            ids,
            refresh: config.monitoring.refresh_interval,
            unresponsive_after: UNRESPONSIVE_AFTER,
            places: self.places,
            simulated: self.simulation.is_some(),
            holdings: Box::new(move || {
                asked.look_blocking(|owner| owner.holdings()).unwrap_or_else(|_| Holdings::default())
            }),
            deliver: Box::new(move |sample| {
                metrics.sampled(&sample);
                told.sampled(sample);
            }),
            publish: statistics,
        })?;
        sampler.wait_for_first(FIRST_READING);
        Ok(sampler)
    }
}
