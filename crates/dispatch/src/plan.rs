//! Plan of a run: program, worker slots and rules.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpupool_confine::bounds::{DeviceMemoryLimit, JobBounds};

use crate::WorkerId;
use crate::event::{DispatchError, SubmitError};
use crate::limits::{DEFAULT_CLEAN_UP_TIMEOUT, MAX_FRAME_BYTES, MAX_WORKERS};
use crate::protocol::HEADER_BYTES;
use crate::scheduler::DispatchRules;

/// Plan of a run.
#[derive(Debug, Clone)]
pub struct RunPlan {
    /// Program of the workers.
    pub program: WorkerProgram,
    /// Worker slots. More may be added during the run.
    pub slots: Vec<WorkerSlot>,
    /// Rules for queueing, time limits and retries.
    pub rules: DispatchRules,
    /// Order of reported results.
    pub order: ResultOrder,
    /// Bounds on each worker and its descendants.
    pub bounds: JobBounds,
    /// Whether the CPU time bound applies to each task instead of the worker's lifetime.
    pub cpu_time_per_task: bool,
    /// Settings that each worker receives before its setup.
    pub settings: serde_json::Value,
    /// Time limit of a worker's setup.
    pub setup_timeout: Option<Duration>,
    /// Time limit of a worker's cleanup at the end, after which it is killed.
    pub clean_up_timeout: Duration,
    /// Lifetime of a worker, after which another process replaces it.
    pub worker_lifetime: Option<Duration>,
    /// Treatment of the workers' standard output and error.
    pub output: WorkerOutputPolicy,
    /// Whether [`crate::RunEvent::TaskStarted`] is reported.
    pub report_started: bool,
    /// Program that supervises processes and runs commands, with a `main` that calls [`crate::run_helper_if_requested`]. For
    /// programs that cannot do so themselves, such as an interpreter that loaded this crate.
    pub helper: Option<PathBuf>,
    /// Memory shared with each worker, for payloads that bypass the socket: see [`crate::worker::WorkerHello::memory`].
    pub memory: Option<Arc<OwnedFd>>,
}

impl RunPlan {
    /// Creates a plan with default rules and no worker slots.
    pub fn new(program: WorkerProgram) -> Self {
        Self {
            program,
            slots: Vec::new(),
            rules: DispatchRules::default(),
            order: ResultOrder::default(),
            bounds: JobBounds::default(),
            cpu_time_per_task: false,
            settings: serde_json::Value::Null,
            setup_timeout: None,
            clean_up_timeout: DEFAULT_CLEAN_UP_TIMEOUT,
            worker_lifetime: None,
            output: WorkerOutputPolicy::default(),
            report_started: false,
            helper: None,
            memory: None,
        }
    }

    /// Adds `count` worker slots without a GPU.
    pub fn workers(mut self, count: u32) -> Self {
        self.slots.extend((0..count).map(|id| WorkerSlot::new(WorkerId(id))));
        self
    }
}

impl RunPlan {
    pub(crate) fn counts_cpu_time_per_task(&self) -> bool {
        self.cpu_time_per_task && self.bounds.cpu_time.is_some()
    }

    pub(crate) fn check(&self) -> Result<(), DispatchError> {
        let invalid = |field, value: String, allowed| Err(DispatchError::Plan { field, value, allowed });
        if self.rules.queue_size == 0 {
            return invalid("queue_size", "0".into(), "at least 1");
        }
        if self.rules.task_timeout.is_some_and(|timeout| timeout.is_zero()) {
            return invalid("task_timeout", "0 s".into(), "more than 0 s");
        }
        if self.slots.len() > MAX_WORKERS {
            return invalid("slots", format!("{} workers", self.slots.len()), "at most 4096 workers");
        }
        let mut ids: Vec<WorkerId> = self.slots.iter().map(|slot| slot.id).collect();
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => invalid("slots", format!("worker {} twice", pair[0]), "a list of distinct workers"),
            None => Ok(()),
        }
    }
}

/// Program that a worker runs.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    pub(crate) protocol: WorkerProtocol,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// A value of `None` removes the variable.
    pub(crate) environment: Vec<(OsString, Option<OsString>)>,
    pub(crate) directory: Option<PathBuf>,
}

/// Protocol between the dispatcher and a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerProtocol {
    /// Frames: see docs/worker-protocol.md.
    Frames,
    /// One line per task, one line per result.
    Lines,
    /// Frames to our own runner, which starts one command per task.
    Commands,
}

impl WorkerProtocol {
    /// Checks that a task can be sent with this protocol.
    pub(crate) fn check(self, payload: &[u8]) -> Result<(), SubmitError> {
        if payload.len() > MAX_FRAME_BYTES - HEADER_BYTES {
            return Err(SubmitError::TooLarge(payload.len()));
        }
        if self == Self::Lines && payload.contains(&b'\n') {
            return Err(SubmitError::NotALine);
        }
        Ok(())
    }
}

impl WorkerProgram {
    /// Describes a program that uses the worker protocol.
    pub fn native(program: impl Into<OsString>) -> Self {
        Self::new(WorkerProtocol::Frames, program.into())
    }

    /// Describes a program that reads one line per task from its standard input and writes one line per result.
    pub fn lines(program: impl Into<OsString>) -> Self {
        Self::new(WorkerProtocol::Lines, program.into())
    }

    /// Describes workers that run one command per task: see [`crate::command::CommandLine`].
    pub fn commands() -> Self {
        Self::new(WorkerProtocol::Commands, OsString::from("/proc/self/exe")).args([crate::command::RUNNER_ARGUMENT])
    }

    fn new(protocol: WorkerProtocol, program: OsString) -> Self {
        Self { protocol, program, arguments: Vec::new(), environment: Vec::new(), directory: None }
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable. Other variables are inherited.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Sets the working directory, which is inherited otherwise.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }
}

/// Slot of a worker: its id, GPUs and environment.
#[derive(Clone)]
pub struct WorkerSlot {
    /// Worker id.
    pub id: WorkerId,
    /// GPUs of the worker, by their numbers on the node.
    pub gpu_ids: Vec<u32>,
    /// Variables that make exactly these GPUs visible; `None` removes a variable.
    pub environment: Vec<(String, Option<String>)>,
    /// Limits on GPU memory, if the kernel can enforce them.
    pub device_memory: Vec<DeviceMemoryLimit>,
    /// Hook that is called from another thread with the worker's pid, before its program runs.
    pub attach: Option<AttachHook>,
}

/// Hook for a process that does not run its program yet. Returns whether the hook placed the process in a control
/// group, or the reason against starting it.
pub type AttachHook = Arc<dyn Fn(u32) -> Result<bool, AttachDenied> + Send + Sync>;

/// Reason against starting a worker's process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachDenied {
    /// The slot was revoked, with the effect of [`crate::RunHandle::withdraw_worker`].
    #[error("{0}")]
    SlotRevoked(String),
    /// A later attempt may succeed.
    #[error("{0}")]
    TryLater(String),
}

impl WorkerSlot {
    /// Creates a slot without a GPU.
    pub fn new(id: WorkerId) -> Self {
        Self { id, gpu_ids: Vec::new(), environment: Vec::new(), device_memory: Vec::new(), attach: None }
    }
}

impl fmt::Debug for WorkerSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerSlot").field("id", &self.id).field("gpu_ids", &self.gpu_ids).finish_non_exhaustive()
    }
}

/// Order in which results are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResultOrder {
    /// Order in which tasks end.
    #[default]
    Completion,
    /// Order in which tasks were submitted.
    Input,
}

/// Treatment of the workers' standard output and error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorkerOutputPolicy {
    /// The dispatcher's own streams are inherited.
    #[default]
    Inherited,
    /// Output is reported as [`crate::RunEvent::WorkerWrote`].
    Reported,
    /// Only the end of the output is kept, for workers that die.
    Discarded,
}
