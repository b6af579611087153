//! A machine with a stand-in for NVIDIA's library, in its own folder.

use std::path::Path;

use gpupool_core::DeviceHealth;
use gpupool_devices::{DetectedDevice, DeviceSource, NvmlSource, SourcePaths, SourceReading};
use nvml_standin::{NvmlScenario, install_library, write_scenario};

/// A machine and its NVML source.
pub struct NvmlMachine {
    pub nvml: NvmlSource,
    pub scenario: NvmlScenario,
    folder: tempfile::TempDir,
}

impl NvmlMachine {
    /// Creates a machine whose library has every function.
    pub fn new(scenario: NvmlScenario) -> Self {
        Self::without(scenario, &[])
    }

    /// Creates a machine whose library lacks functions.
    pub fn without(scenario: NvmlScenario, missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        install_library(folder.path(), &scenario, missing).unwrap();
        let nvml = NvmlSource::new(&nvml_paths(folder.path()));
        Self { nvml, scenario, folder }
    }

    /// Returns the folder of the machine.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Changes the scenario.
    pub fn change(&mut self, change: impl FnOnce(&mut NvmlScenario)) {
        change(&mut self.scenario);
        write_scenario(self.folder.path(), &self.scenario).unwrap();
    }

    /// Reads the devices; must succeed.
    pub fn read(&mut self) -> SourceReading {
        self.nvml.read().unwrap()
    }
}

/// Returns the locations on the machine.
pub fn nvml_paths(folder: &Path) -> SourcePaths {
    SourcePaths { nvml: folder.join("libnvidia-ml.so.1"), sys: folder.join("sys"), ..SourcePaths::default() }
}

/// Maps each device.
pub fn map_devices<T>(snapshot: &SourceReading, of: impl Fn(&DetectedDevice) -> T) -> Vec<T> {
    snapshot.devices.iter().map(of).collect()
}

/// Returns the health of each device as text; empty if healthy.
pub fn health_reasons(snapshot: &SourceReading) -> Vec<String> {
    map_devices(snapshot, |device| match &device.health {
        Some(DeviceHealth::Healthy | DeviceHealth::ClaimedElsewhere(_)) => String::new(),
        Some(DeviceHealth::Unhealthy(why)) => why.to_string(),
        Some(DeviceHealth::Lost) => "lost".into(),
        None => "unknown".into(),
    })
}
