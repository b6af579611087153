//! The sources of readings: the machine's own devices, or simulated ones.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use gpupool_config::Config;
use gpupool_devices::{DeviceSource, SourceChoice, SourcePaths};

use crate::error::AgentError;

use super::device_claims::DeviceClaims;
use super::sampler::{Sampler, SamplerSources, SamplerSpec, UNRESPONSIVE_AFTER};
use super::simulation::Simulation;

/// The longest time that the first reading may delay the start.
const FIRST_READING: Duration = Duration::from_millis(100);

/// The sources of readings of a node.
pub(crate) struct ReadingSources {
    sources: Vec<Box<dyn DeviceSource>>,
    places: Option<SourcePaths>,
    /// The handle of the simulated devices.
    pub simulation: Option<Arc<Simulation>>,
}

impl ReadingSources {
    /// Opens the sources that the configuration names.
    pub(crate) fn open(config: &Config) -> Result<Self, AgentError> {
        if let Some(text) = &config.monitoring.simulate {
            let (simulation, source) = Simulation::new(text, &config.server.node_name).map_err(AgentError::Simulate)?;
            return Ok(Self { sources: vec![source], places: None, simulation: Some(Arc::new(simulation)) });
        }
        let places = SourcePaths::from_env(|name| std::env::var_os(name).map(Into::into));
        let choice: SourceChoice = config.monitoring.backend.parse()?;
        // A tool that hangs is ended before its source counts as unresponsive.
        let sources = choice.open_sources(&places, UNRESPONSIVE_AFTER.mul_f64(0.8));
        Ok(Self { sources, places: Some(places), simulation: None })
    }

    /// Starts sampling. Returns after the first reading, or a little later.
    pub(super) fn start(self, spec: SamplerSpec) -> io::Result<Sampler> {
        let Self { sources, places, .. } = self;
        // Every agent has simulated devices of its own.
        let claims = places.is_some().then(DeviceClaims::new);
        let sources = SamplerSources { sources, places, claims, unresponsive_after: UNRESPONSIVE_AFTER };
        let sampler = Sampler::start(sources, spec)?;
        sampler.wait_for_first(FIRST_READING);
        Ok(sampler)
    }
}
