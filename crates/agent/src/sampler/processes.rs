//! Whose the processes on a device are, and how they are told.

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_api::pool::Process as Body;
use gpupool_core::ids::GpuId;
use gpupool_core::reading::Attribution;
use gpupool_devices::{HostProcess, Process};

use super::evidence::{Evidence, ProcessKey};
use super::whose::Holdings;
use crate::simulation;

/// Whose processes are.
pub struct Whose {
    /// Who holds what.
    pub holdings: Holdings,
    /// What is known of processes, by source.
    pub dossiers: Vec<Arc<HashMap<ProcessKey, Evidence>>>,
    /// Whether processes are made up.
    pub simulated: bool,
}

impl Whose {
    /// Whose a process on a device is.
    pub fn is(&self, process: &Process, device: GpuId) -> Attribution {
        if self.simulated {
            // Its number is made up and may be that of a real process, so it is not looked for.
            let lease = process.name.as_deref().and_then(simulation::lease_of);
            return lease.map_or(Attribution::Foreign, Attribution::Lease);
        }
        let HostProcess::Known(facts) = &process.who else { return Attribution::Unknown };
        let key = (process.pid, facts.start_ticks);
        let evidence = self.dossiers.iter().find_map(|dossier| dossier.get(&key));
        evidence.map_or(Attribution::Unknown, |evidence| self.holdings.whose(evidence, device))
    }

    /// The process as it is told to people and programs.
    pub fn body(&self, process: &Process, device: GpuId) -> Body {
        let attribution = self.is(process, device);
        let known = match &process.who {
            HostProcess::Known(facts) => Some(facts),
            HostProcess::NotLooked | HostProcess::Unattributed(_) => None,
        };
        let (lease, squatter) = match attribution {
            Attribution::Lease(lease) => (Some(lease.0), !self.holdings.is_held_by(device, lease)),
            Attribution::Foreign => (None, true),
            Attribution::Unknown => (None, false),
        };
        let text = |text: &Arc<str>| text.to_string();
        Body {
            pid: process.pid,
            user: known.and_then(|facts| facts.user.as_ref()).map(text),
            command: known.map(|facts| &facts.command).or(process.name.as_ref()).map(text),
            memory_mib: process.memory.value().map(|bytes| bytes.as_mib()),
            lease,
            squatter,
        }
    }
}
