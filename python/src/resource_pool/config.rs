//! What Python says a pool is to be.

use std::path::PathBuf;
use std::time::Duration;

use gpupool_dispatch::Program;
use gpupool_dispatch::limits::LONGEST_TIME;
use gpupool_dispatch::resource_pool::{Device, ResourceConfig};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The fields of a dict. The package has looked at them; here they are only bounded.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Wish {
    program: Vec<String>,
    /// JSON.
    settings: String,
    helper: PathBuf,
    /// What is defined in `__main__` travels by value.
    pub by_value: bool,
    max_workers: u32,
    min_workers: u32,
    worker_timeout_secs: f64,
    worker_memory_bytes: Option<u64>,
    worker_processes: Option<u64>,
    worker_cpu_secs: Option<f64>,
    devices: Vec<String>,
    /// In place of these, each worker leases a GPU.
    pub leases_gpus: bool,
    acquire_timeout_secs: f64,
    idle_secs: f64,
    setup_timeout_secs: f64,
    clean_up_timeout_secs: f64,
    audit_file: Option<PathBuf>,
}

impl Wish {
    pub fn config(self) -> PyResult<ResourceConfig> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program: it is empty"))?;
        let program = Program::native(program).args(arguments);
        let timeout = seconds("worker_timeout_secs", self.worker_timeout_secs)?;
        let cpu_time = self.worker_cpu_secs.map(|secs| seconds("worker_cpu_secs", secs)).transpose()?;
        let settings =
            serde_json::from_str(&self.settings).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(ResourceConfig {
            min_workers: self.min_workers,
            worker_memory: self.worker_memory_bytes,
            worker_processes: self.worker_processes,
            worker_cpu_time: cpu_time,
            devices: self.devices.into_iter().map(Device::new).collect(),
            acquire_patience: seconds("acquire_timeout_secs", self.acquire_timeout_secs)?,
            idle_time: seconds("idle_secs", self.idle_secs)?,
            setup_timeout: seconds("setup_timeout_secs", self.setup_timeout_secs)?,
            clean_up_timeout: seconds("clean_up_timeout_secs", self.clean_up_timeout_secs)?,
            settings,
            audit: self.audit_file,
            helper: Some(self.helper),
            ..ResourceConfig::new(program, self.max_workers, timeout)
        })
    }
}

fn seconds(field: &str, value: f64) -> PyResult<Duration> {
    let most = LONGEST_TIME.as_secs();
    let time = Duration::try_from_secs_f64(value).ok().filter(|time| *time <= LONGEST_TIME);
    time.ok_or_else(|| PyValueError::new_err(format!("{field} must be at most {most}, got {value}")))
}
