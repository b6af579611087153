//! Configuration and errors of a resource pool.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::{BoundExceeded, DeviceMemoryLimit, JobBounds};

use super::allocator::PoolRules;
use super::authority::GpuLeaseConfig;
use crate::gpu_leases::GpuError;
use crate::limits::{
    DEFAULT_ACQUIRE_PATIENCE, DEFAULT_CLEAN_UP_TIMEOUT, DEFAULT_IDLE_TIME, DEFAULT_SETUP_TIMEOUT, MAX_DURATION,
    MAX_TASK_ID_BYTES, MAX_WAITING, MAX_WORKERS,
};
use crate::plan::{RunPlan, WorkerProgram, WorkerSlot};
use crate::{SubmitError, WorkerExitCause, WorkerId, WorkerOutputPolicy};

/// Configuration of a resource pool.
#[derive(Debug, Clone)]
pub struct ResourcePoolConfig {
    /// Program of the workers.
    pub program: WorkerProgram,
    /// Minimum number of workers, kept even if none is needed.
    pub min_workers: u32,
    /// Maximum number of workers.
    pub max_workers: u32,
    /// Time limit of a hold.
    pub worker_timeout: Duration,
    /// Limit on the host memory of a worker and its descendants, in bytes.
    pub worker_memory: Option<u64>,
    /// Limit on the processes and threads of a worker.
    pub worker_processes: Option<u64>,
    /// Limit on the CPU time of a worker in one hold.
    pub worker_cpu_time: Option<Duration>,
    /// Devices of the workers; worker i has the device i modulo their number.
    pub devices: Vec<WorkerDevice>,
    /// GPU lease for each worker, instead of `devices`. Each worker sees only its own GPU, named `cuda:0`.
    pub gpus: Option<GpuLeaseConfig>,
    /// Time limit of an acquire.
    pub acquire_patience: Duration,
    /// Idle time after which a worker above the minimum stops.
    pub idle_time: Duration,
    /// Time limit of a worker's setup.
    pub setup_timeout: Duration,
    /// Time limit of a worker's cleanup.
    pub clean_up_timeout: Duration,
    /// Settings that each worker receives before its setup.
    pub settings: serde_json::Value,
    /// File to which the audit trail is appended.
    pub audit: Option<PathBuf>,
    /// Program that supervises the processes: see [`RunPlan::helper`].
    pub helper: Option<PathBuf>,
    /// Memory shared with each worker: see [`RunPlan::memory`].
    pub memory: Option<Arc<OwnedFd>>,
}

/// Device of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerDevice {
    /// Name, such as `cpu` or `cuda:0`.
    pub name: String,
    /// GPUs of the device, by their numbers on the node.
    pub gpu_ids: Vec<u32>,
    /// Variables that make exactly this device visible; `None` removes a variable.
    pub environment: Vec<(String, Option<String>)>,
    /// Limits on GPU memory, if the kernel can enforce them.
    pub device_memory: Vec<DeviceMemoryLimit>,
}

impl WorkerDevice {
    /// Creates a device without a GPU.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), gpu_ids: Vec::new(), environment: Vec::new(), device_memory: Vec::new() }
    }
}

impl ResourcePoolConfig {
    /// Creates a configuration of so many workers without a GPU, with a time limit of each hold.
    pub fn new(program: WorkerProgram, workers: u32, worker_timeout: Duration) -> Self {
        Self {
            program,
            min_workers: workers,
            max_workers: workers,
            worker_timeout,
            worker_memory: None,
            worker_processes: None,
            worker_cpu_time: None,
            devices: vec![WorkerDevice::new("cpu")],
            gpus: None,
            acquire_patience: DEFAULT_ACQUIRE_PATIENCE,
            idle_time: DEFAULT_IDLE_TIME,
            setup_timeout: DEFAULT_SETUP_TIMEOUT,
            clean_up_timeout: DEFAULT_CLEAN_UP_TIMEOUT,
            settings: serde_json::Value::Null,
            audit: None,
            helper: None,
            memory: None,
        }
    }

    /// Checks the configuration.
    pub fn check(&self) -> Result<(), ResourcePoolError> {
        let limit = u32::try_from(MAX_WORKERS).unwrap_or(u32::MAX);
        positive("max_workers", self.max_workers > 0, self.max_workers)?;
        require("max_workers", self.max_workers <= limit, format!("at most {limit}"), self.max_workers)?;
        let range = format!("at most max_workers ({})", self.max_workers);
        require("min_workers", self.min_workers <= self.max_workers, range, self.min_workers)?;
        let times = [
            ("worker_timeout", self.worker_timeout),
            ("worker_cpu_time", self.worker_cpu_time.unwrap_or(MAX_DURATION)),
            ("acquire_patience", self.acquire_patience),
            ("setup_timeout", self.setup_timeout),
        ];
        for (field, time) in times {
            positive(field, !time.is_zero(), seconds(time))?;
        }
        let may_be_none = [("idle_time", self.idle_time), ("clean_up_timeout", self.clean_up_timeout)];
        for (field, time) in times.into_iter().chain(may_be_none) {
            let allowed = format!("at most {}", seconds(MAX_DURATION));
            require(field, time <= MAX_DURATION, allowed, seconds(time))?;
        }
        for (field, count) in [("worker_memory", self.worker_memory), ("worker_processes", self.worker_processes)] {
            positive(field, count.is_none_or(|count| count > 0), 0)?;
        }
        require("devices", !self.devices.is_empty(), "one or more".into(), "none")?;
        let unnamed = self.devices.iter().position(|device| device.name.is_empty());
        require("devices", unnamed.is_none(), "names that are not empty".into(), "\"\"")
    }
}

fn positive(field: &'static str, is_so: bool, value: impl ToString) -> Result<(), ResourcePoolError> {
    require(field, is_so, "positive".into(), value)
}

fn require(field: &'static str, is_so: bool, allowed: String, value: impl ToString) -> Result<(), ResourcePoolError> {
    if is_so { Ok(()) } else { Err(ResourcePoolError::Config { field, allowed, value: value.to_string() }) }
}

impl ResourcePoolConfig {
    pub(super) fn allocator_rules(&self) -> PoolRules {
        PoolRules {
            min_workers: self.min_workers as usize,
            max_workers: self.max_workers as usize,
            acquire_patience: self.acquire_patience,
            worker_timeout: self.worker_timeout,
            idle_time: self.idle_time,
            waits_for_devices: self.gpus.is_some(),
        }
    }

    pub(super) fn device_of_slot(&self, slot: usize) -> &WorkerDevice {
        &self.devices[slot % self.devices.len()]
    }

    /// Returns the worker slot for this index.
    pub(super) fn worker_slot(&self, slot: usize) -> WorkerSlot {
        let device = self.device_of_slot(slot);
        WorkerSlot {
            gpu_ids: device.gpu_ids.clone(),
            environment: device.environment.clone(),
            device_memory: device.device_memory.clone(),
            ..WorkerSlot::new(worker_id(slot))
        }
    }

    /// Returns the plan by which processes are started.
    pub(super) fn run_plan(&self) -> RunPlan {
        let bounds = JobBounds {
            host_memory: self.worker_memory,
            processes: self.worker_processes,
            cpu_time: self.worker_cpu_time,
            device_memory: Vec::new(),
        };
        RunPlan {
            bounds,
            settings: self.settings.clone(),
            output: WorkerOutputPolicy::Inherited,
            helper: self.helper.clone(),
            memory: self.memory.clone(),
            ..RunPlan::new(self.program.clone())
        }
    }
}

/// Slots never outnumber ids.
pub(super) fn worker_id(slot: usize) -> WorkerId {
    WorkerId(u32::try_from(slot).unwrap_or(u32::MAX))
}

// Errors of a resource pool.

/// Error that prevents the start of a pool.
#[derive(Debug, thiserror::Error)]
pub enum ResourcePoolError {
    /// A field of the configuration is invalid.
    #[error("{field} must be {allowed}, got {value}")]
    Config {
        /// Field of the configuration.
        field: &'static str,
        /// Allowed values.
        allowed: String,
        /// Value of the field.
        value: String,
    },
    /// The audit file cannot be written.
    #[error("cannot open the audit trail {}: {source}", path.display())]
    Audit {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The GPU leases could not be requested.
    #[error(transparent)]
    Gpus(#[from] GpuError),
    /// A system call that the pool depends on failed.
    #[error("the resource pool failed: {0}")]
    System(#[from] io::Error),
}

/// Error of an acquire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// No worker was free in time.
    #[error("no worker was free within {}{}", seconds(*patience), because(why.as_ref()))]
    Timeout {
        /// Time limit of the acquire.
        patience: Duration,
        /// Reason for which no worker runs at all.
        why: Option<Arc<str>>,
    },
    /// No worker runs, and none can be started.
    #[error("no worker can be started: {0}")]
    NoWorker(Arc<str>),
    /// The pool is shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// Too many acquires wait already.
    #[error("{MAX_WAITING} requests already wait for a worker; no more are accepted")]
    TooManyWaiting,
    /// The task id is too long.
    #[error("a task id of {0} bytes; at most {MAX_TASK_ID_BYTES} are allowed")]
    TaskId(usize),
}

/// Error of a held worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeldWorkerError {
    /// The task failed, with the worker's error text, such as a traceback. The worker stays usable.
    #[error("{}", String::from_utf8_lossy(.0))]
    Failed(Bytes),
    /// The hold reached this time limit, and the worker was killed.
    #[error("Worker exceeded {} timeout", seconds(*.0))]
    Timeout(Duration),
    /// The worker exceeded this memory limit (in bytes) and was killed.
    #[error("Worker exceeded {}MB memory limit", mebibytes(*.0))]
    Memory(u64),
    /// The worker exceeded another limit and was killed.
    #[error("Worker exceeded its limits: {0}")]
    BoundExceeded(BoundExceeded),
    /// The holder killed the worker.
    #[error("the worker was killed by its holder")]
    Killed,
    /// The worker exited.
    #[error("the worker was lost: {0}")]
    Lost(WorkerExitCause),
    /// The worker was returned before the task ended.
    #[error("the worker was given back before it was done")]
    GivenBack,
    /// The pool was shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// The task was not accepted.
    #[error(transparent)]
    Refused(#[from] SubmitError),
}

impl HeldWorkerError {
    /// Whether a limit was exceeded.
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::Timeout(_) | Self::Memory(_) | Self::BoundExceeded(_))
    }

    pub(super) fn of_excess(excess: BoundExceeded) -> Self {
        match excess {
            BoundExceeded::HostMemory { allowed, .. } => Self::Memory(allowed),
            other => Self::BoundExceeded(other),
        }
    }
}

/// Formats a duration like `1s` or `0.25s`.
fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs_f64())
}

#[allow(clippy::cast_precision_loss, reason = "a number for people")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn because(why: Option<&Arc<str>>) -> String {
    why.map(|why| format!("; {why}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: fn(&mut ResourcePoolConfig)) -> String {
        let mut config = ResourcePoolConfig::new(WorkerProgram::native("worker"), 4, Duration::from_secs(1));
        config.check().unwrap();
        change(&mut config);
        config.check().unwrap_err().to_string()
    }

    #[test]
    fn an_invalid_field_is_named_with_its_allowed_values() {
        assert_eq!(refused(|config| config.max_workers = 0), "max_workers must be positive, got 0");
        assert_eq!(refused(|config| config.max_workers = 5_000), "max_workers must be at most 4096, got 5000");
        assert_eq!(refused(|config| config.min_workers = 5), "min_workers must be at most max_workers (4), got 5");
        assert_eq!(refused(|config| config.worker_timeout = Duration::ZERO), "worker_timeout must be positive, got 0s");
        assert_eq!(
            refused(|config| config.setup_timeout = Duration::from_secs(400_000_000)),
            "setup_timeout must be at most 315360000s, got 400000000s"
        );
        assert_eq!(refused(|config| config.worker_memory = Some(0)), "worker_memory must be positive, got 0");
        assert_eq!(refused(|config| config.devices.clear()), "devices must be one or more, got none");
        assert_eq!(
            refused(|config| config.devices.push(WorkerDevice::new(""))),
            "devices must be names that are not empty, got \"\""
        );
    }

    #[test]
    fn limits_have_the_published_messages() {
        let timeout = |millis| HeldWorkerError::Timeout(Duration::from_millis(millis)).to_string();
        assert_eq!(timeout(1_000), "Worker exceeded 1s timeout");
        assert_eq!(timeout(250), "Worker exceeded 0.25s timeout");
        assert_eq!(HeldWorkerError::Memory(512 << 20).to_string(), "Worker exceeded 512MB memory limit");
        assert_eq!(HeldWorkerError::Memory(3 << 19).to_string(), "Worker exceeded 1.5MB memory limit");
    }
}
