//! A machine with a stand-in for NVIDIA's library, in a folder of its own.

use std::path::Path;

use gpupool_core::Health;
use gpupool_devices::{Found, Nvml, Places, Snapshot, Source};
use nvml_standin::{Scenario, install, write_scenario};

/// The machine, and NVML on it.
pub struct Machine {
    pub nvml: Nvml,
    pub scenario: Scenario,
    folder: tempfile::TempDir,
}

impl Machine {
    /// A machine whose library has every function.
    pub fn new(scenario: Scenario) -> Self {
        Self::without(scenario, &[])
    }

    /// A machine whose library lacks functions.
    pub fn without(scenario: Scenario, missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        install(folder.path(), &scenario, missing).unwrap();
        let nvml = Nvml::new(&places(folder.path()));
        Self { nvml, scenario, folder }
    }

    /// The folder everything of it is in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The same world, changed.
    pub fn change(&mut self, change: impl FnOnce(&mut Scenario)) {
        change(&mut self.scenario);
        write_scenario(self.folder.path(), &self.scenario).unwrap();
    }

    /// A reading that must succeed.
    pub fn read(&mut self) -> Snapshot {
        self.nvml.read().unwrap()
    }
}

/// Where things are on such a machine.
pub fn places(folder: &Path) -> Places {
    Places { nvml: folder.join("libnvidia-ml.so.1"), sys: folder.join("sys"), ..Places::default() }
}

/// What of each device is asked about.
pub fn each<T>(snapshot: &Snapshot, of: impl Fn(&Found) -> T) -> Vec<T> {
    snapshot.devices.iter().map(of).collect()
}

/// Why each device is unhealthy; empty where it is healthy.
pub fn complaints(snapshot: &Snapshot) -> Vec<String> {
    each(snapshot, |device| match &device.health {
        Some(Health::Healthy) => String::new(),
        Some(Health::Unhealthy(why)) => why.to_string(),
        Some(Health::Lost) => "lost".into(),
        None => "unknown".into(),
    })
}
