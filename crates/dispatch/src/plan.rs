//! What is to be run, by whom, and by which rules.

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

/// A run.
#[derive(Debug, Clone)]
pub struct RunPlan {
    /// What workers run.
    pub program: WorkerProgram,
    /// The workers. More may be added while it runs.
    pub slots: Vec<WorkerSlot>,
    /// How tasks are dealt with.
    pub rules: DispatchRules,
    /// In which order results are told.
    pub order: ResultOrder,
    /// What a worker may use, with everything it starts.
    pub bounds: JobBounds,
    /// Whether the CPU time of the bounds is that of one task, and not of the worker's life.
    pub cpu_time_per_task: bool,
    /// Whatever workers are to know when they are set up.
    pub settings: serde_json::Value,
    /// How long a worker may take to be set up.
    pub setup_timeout: Option<Duration>,
    /// How long a worker may take to clean up when all is over, before it is killed.
    pub clean_up_timeout: Duration,
    /// How long a worker may live; another takes its place then.
    pub worker_lifetime: Option<Duration>,
    /// What becomes of what workers write to their standard output and error.
    pub output: WorkerOutputPolicy,
    /// Whether [`crate::RunEvent::TaskStarted`] is told.
    pub report_started: bool,
    /// Another program to keep the processes and to run commands: one whose `main` calls [`crate::run_helper_if_requested`]. For
    /// programs that cannot do so themselves, such as an interpreter that loaded this crate.
    pub helper: Option<PathBuf>,
    /// Memory that is handed to each worker, for payloads that are not to be sent: see [`crate::worker::WorkerHello::memory`].
    pub memory: Option<Arc<OwnedFd>>,
}

impl RunPlan {
    /// The usual rules, and no worker yet.
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

    /// So many workers without a GPU.
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
            return invalid("queue_size", "0".into(), "1 and more");
        }
        if self.rules.task_timeout.is_some_and(|timeout| timeout.is_zero()) {
            return invalid("task_timeout", "0 s".into(), "more than 0 s");
        }
        if self.slots.len() > MAX_WORKERS {
            return invalid("slots", format!("{} workers", self.slots.len()), "4096 and less");
        }
        let mut ids: Vec<WorkerId> = self.slots.iter().map(|slot| slot.id).collect();
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => invalid("slots", format!("worker {} twice", pair[0]), "each worker once"),
            None => Ok(()),
        }
    }
}

/// What a worker runs.
#[derive(Debug, Clone)]
pub struct WorkerProgram {
    pub(crate) protocol: WorkerProtocol,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    /// `None` removes a variable.
    pub(crate) environment: Vec<(OsString, Option<OsString>)>,
    pub(crate) directory: Option<PathBuf>,
}

/// How a worker is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerProtocol {
    /// In frames: see docs/worker-protocol.md.
    Frames,
    /// A line for each task, a line for each result.
    Lines,
    /// It is ours, and starts a command for each task.
    Commands,
}

impl WorkerProtocol {
    /// Whether a task can be told to it.
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
    /// A program that speaks the protocol of workers.
    pub fn native(program: impl Into<OsString>) -> Self {
        Self::new(WorkerProtocol::Frames, program.into())
    }

    /// A program that reads one line for each task from its standard input, and writes one for each result.
    pub fn lines(program: impl Into<OsString>) -> Self {
        Self::new(WorkerProtocol::Lines, program.into())
    }

    /// A command for each task: see [`crate::command::CommandLine`].
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

    /// Sets a variable of its environment, which else is ours.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// The directory it runs in, else ours.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }
}

/// Where a worker works.
#[derive(Clone)]
pub struct WorkerSlot {
    /// Who it is.
    pub id: WorkerId,
    /// The GPUs it has, by their numbers on the node.
    pub gpu_ids: Vec<u32>,
    /// What makes it see them, and only them; `None` removes a variable.
    pub environment: Vec<(String, Option<String>)>,
    /// How much memory of its GPUs it may use, where the kernel can hold it to that.
    pub device_memory: Vec<DeviceMemoryLimit>,
    /// Called with its process before its program runs, and from another thread.
    pub attach: Option<AttachHook>,
}

/// Tells somebody of a process that does not run its program yet; whether that one has put it into a control group, or why
/// it must not be started.
pub type AttachHook = Arc<dyn Fn(u32) -> Result<bool, AttachDenied> + Send + Sync>;

/// Why a worker's process must not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachDenied {
    /// The place is not ours any more: as if it had been taken away ([`crate::RunHandle::withdraw_worker`]).
    #[error("{0}")]
    SlotRevoked(String),
    /// It may be started later, if tried again.
    #[error("{0}")]
    TryLater(String),
}

impl WorkerSlot {
    /// A place without a GPU.
    pub fn new(id: WorkerId) -> Self {
        Self { id, gpu_ids: Vec::new(), environment: Vec::new(), device_memory: Vec::new(), attach: None }
    }
}

impl fmt::Debug for WorkerSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerSlot").field("id", &self.id).field("gpu_ids", &self.gpu_ids).finish_non_exhaustive()
    }
}

/// In which order results are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResultOrder {
    /// As they come.
    #[default]
    Completion,
    /// As the tasks came.
    Input,
}

/// What becomes of what workers write to their standard output and error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorkerOutputPolicy {
    /// It goes where ours goes.
    #[default]
    Inherited,
    /// It is told as [`crate::RunEvent::WorkerWrote`].
    Reported,
    /// Only the last words of those that die are kept.
    Discarded,
}
