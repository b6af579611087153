//! A machine with a stand-in for NVIDIA's library, in a folder of its own.

use std::path::Path;

use gpupool_core::DeviceHealth;
use gpupool_devices::{DetectedDevice, DeviceSource, NvmlSource, SourcePaths, SourceReading};
use nvml_standin::{NvmlScenario, install_library, write_scenario};

/// The machine, and NVML on it.
pub struct Machine {
    pub nvml: NvmlSource,
    pub scenario: NvmlScenario,
    folder: tempfile::TempDir,
}

impl Machine {
    /// A machine whose library has every function.
    pub fn new(scenario: NvmlScenario) -> Self {
        Self::without(scenario, &[])
    }

    /// A machine whose library lacks functions.
    pub fn without(scenario: NvmlScenario, missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        install_library(folder.path(), &scenario, missing).unwrap();
        let nvml = NvmlSource::new(&places(folder.path()));
        Self { nvml, scenario, folder }
    }

    /// The folder everything of it is in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The same world, changed.
    pub fn change(&mut self, change: impl FnOnce(&mut NvmlScenario)) {
        change(&mut self.scenario);
        write_scenario(self.folder.path(), &self.scenario).unwrap();
    }

    /// A reading that must succeed.
    pub fn read(&mut self) -> SourceReading {
        self.nvml.read().unwrap()
    }
}

/// Where things are on such a machine.
pub fn places(folder: &Path) -> SourcePaths {
    SourcePaths { nvml: folder.join("libnvidia-ml.so.1"), sys: folder.join("sys"), ..SourcePaths::default() }
}

/// What of each device is asked about.
pub fn each<T>(snapshot: &SourceReading, of: impl Fn(&DetectedDevice) -> T) -> Vec<T> {
    snapshot.devices.iter().map(of).collect()
}

/// Why each device is unhealthy; empty where it is healthy.
pub fn complaints(snapshot: &SourceReading) -> Vec<String> {
    each(snapshot, |device| match &device.health {
        Some(DeviceHealth::Healthy) => String::new(),
        Some(DeviceHealth::Unhealthy(why)) => why.to_string(),
        Some(DeviceHealth::Lost) => "lost".into(),
        None => "unknown".into(),
    })
}
