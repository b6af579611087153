//! What a resource pool is to be.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::{BoundExceeded, DeviceMemoryLimit, JobBounds};

use super::allocator::AllocatorRules;
use super::authority::GpuLeaseConfig;
use crate::gpu_leases::GpuError;
use crate::limits::{
    DEFAULT_ACQUIRE_PATIENCE, DEFAULT_CLEAN_UP_TIMEOUT, DEFAULT_IDLE_TIME, DEFAULT_SETUP_TIMEOUT, MAX_DURATION,
    MAX_TASK_ID_BYTES, MAX_WAITING, MAX_WORKERS,
};
use crate::plan::{RunPlan, WorkerProgram, WorkerSlot};
use crate::{SubmitError, WorkerExitCause, WorkerId, WorkerOutputPolicy};

/// What a resource pool is to be.
#[derive(Debug, Clone)]
pub struct ResourcePoolConfig {
    /// What workers run.
    pub program: WorkerProgram,
    /// Workers there are at least, also when nobody wants one.
    pub min_workers: u32,
    /// Workers there are at most, when many are wanted.
    pub max_workers: u32,
    /// How long a worker may be held.
    pub worker_timeout: Duration,
    /// Bytes of host memory a worker may use, with everything it starts.
    pub worker_memory: Option<u64>,
    /// Processes and threads a worker may have.
    pub worker_processes: Option<u64>,
    /// Processor time a worker may use in one hold.
    pub worker_cpu_time: Option<Duration>,
    /// What workers work on: the worker of number i has the device i modulo their number.
    pub devices: Vec<WorkerDevice>,
    /// In place of these, each worker has a GPU of its own that is leased, and sees no other. It is called `cuda:0`.
    pub gpus: Option<GpuLeaseConfig>,
    /// How long somebody waits for a worker.
    pub acquire_patience: Duration,
    /// How long a worker above the least number may idle before it is ended.
    pub idle_time: Duration,
    /// How long a worker may take to be set up.
    pub setup_timeout: Duration,
    /// How long a worker may take to clean up at the end.
    pub clean_up_timeout: Duration,
    /// Whatever workers are to know when they are set up.
    pub settings: serde_json::Value,
    /// A file to which the audit trail is appended.
    pub audit: Option<PathBuf>,
    /// Another program to keep the processes: see [`RunPlan::helper`].
    pub helper: Option<PathBuf>,
    /// Memory that is handed to each worker: see [`RunPlan::memory`].
    pub memory: Option<Arc<OwnedFd>>,
}

/// Something a worker works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerDevice {
    /// What people call it: `cpu`, `cuda:0`.
    pub name: String,
    /// The GPUs it is, by their numbers on the node.
    pub gpu_ids: Vec<u32>,
    /// What makes a worker see it, and only it; `None` removes a variable.
    pub environment: Vec<(String, Option<String>)>,
    /// How much of its memory a worker may use, where the kernel can hold it to that.
    pub device_memory: Vec<DeviceMemoryLimit>,
}

impl WorkerDevice {
    /// Without a GPU.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), gpu_ids: Vec::new(), environment: Vec::new(), device_memory: Vec::new() }
    }
}

impl ResourcePoolConfig {
    /// So many workers without a GPU, each held for so long at most.
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

    /// Whether there can be such a pool.
    pub fn check(&self) -> Result<(), ResourcePoolError> {
        let most = u32::try_from(MAX_WORKERS).unwrap_or(u32::MAX);
        positive("max_workers", self.max_workers > 0, self.max_workers)?;
        require("max_workers", self.max_workers <= most, format!("at most {most}"), self.max_workers)?;
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
    pub(super) fn allocator_rules(&self) -> AllocatorRules {
        AllocatorRules {
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

    /// Where the worker of a slot works.
    pub(super) fn worker_slot(&self, slot: usize) -> WorkerSlot {
        let device = self.device_of_slot(slot);
        WorkerSlot {
            gpu_ids: device.gpu_ids.clone(),
            environment: device.environment.clone(),
            device_memory: device.device_memory.clone(),
            ..WorkerSlot::new(worker_id(slot))
        }
    }

    /// How processes are started.
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

/// There are never more slots than numbers.
pub(super) fn worker_id(slot: usize) -> WorkerId {
    WorkerId(u32::try_from(slot).unwrap_or(u32::MAX))
}

// What can go wrong with a resource pool, by who is told.

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum ResourcePoolError {
    /// The configuration asks for what cannot be.
    #[error("{field} must be {allowed}, got {value}")]
    Config {
        /// Which field.
        field: &'static str,
        /// What it may say.
        allowed: String,
        /// What it says.
        value: String,
    },
    /// The file of the audit trail cannot be written.
    #[error("the audit trail {}: {source}", path.display())]
    Audit {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// GPUs cannot be asked for.
    #[error(transparent)]
    Gpus(#[from] GpuError),
    /// The system refused what a pool cannot do without.
    #[error("the resource pool: {0}")]
    System(#[from] io::Error),
}

/// Why somebody got no worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    /// None was free in time.
    #[error("no worker was free within {}{}", seconds(*patience), because(why.as_ref()))]
    Timeout {
        /// How long it was waited.
        patience: Duration,
        /// Why there is none at all, if none lives.
        why: Option<Arc<str>>,
    },
    /// There is none, and none can be started.
    #[error("no worker can be started: {0}")]
    NoWorker(Arc<str>),
    /// The pool is shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// Too many wait already.
    #[error("{MAX_WAITING} wait for a worker already, and no more may")]
    TooManyWaiting,
    /// The name of the task is too long.
    #[error("a task id of {0} bytes; allowed are up to {MAX_TASK_ID_BYTES}")]
    TaskId(usize),
}

/// Why a worker did not do what was wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeldWorkerError {
    /// The work itself failed; in the worker's words, such as a traceback. The worker lives on.
    #[error("{}", String::from_utf8_lossy(.0))]
    Failed(Bytes),
    /// It was held for longer than it may be, and was killed.
    #[error("Worker exceeded {} timeout", seconds(*.0))]
    Timeout(Duration),
    /// It used more memory than it may (in bytes), and was killed.
    #[error("Worker exceeded {}MB memory limit", mebibytes(*.0))]
    Memory(u64),
    /// It used more of something else than it may, and was killed.
    #[error("Worker exceeded its limits: {0}")]
    BoundExceeded(BoundExceeded),
    /// Whoever held it killed it.
    #[error("the worker was killed by whoever held it")]
    Killed,
    /// It died.
    #[error("the worker was lost: {0}")]
    Lost(WorkerExitCause),
    /// It was given back while it was still at this.
    #[error("the worker was given back before it was done")]
    GivenBack,
    /// The pool was shut down.
    #[error("the resource pool is shut down")]
    Closed,
    /// The work was not taken.
    #[error(transparent)]
    Refused(#[from] SubmitError),
}

impl HeldWorkerError {
    /// Whether it tells of a limit that was passed.
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

/// A time as people write it: `1s`, `0.25s`.
fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs_f64())
}

#[allow(clippy::cast_precision_loss, reason = "it is for people")]
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
    fn what_cannot_be_is_named_with_what_can() {
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
    fn limits_are_told_in_the_words_programs_know() {
        let timeout = |millis| HeldWorkerError::Timeout(Duration::from_millis(millis)).to_string();
        assert_eq!(timeout(1_000), "Worker exceeded 1s timeout");
        assert_eq!(timeout(250), "Worker exceeded 0.25s timeout");
        assert_eq!(HeldWorkerError::Memory(512 << 20).to_string(), "Worker exceeded 512MB memory limit");
        assert_eq!(HeldWorkerError::Memory(3 << 19).to_string(), "Worker exceeded 1.5MB memory limit");
    }
}
