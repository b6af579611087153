//! A run of the dispatcher, for `gpu_dispatch`.
//!
//! One thread takes events ([`PyRun::events`]); another one submits tasks ([`PyRun::put`]). Both hold the interpreter
//! only while they handle Python values.

mod events;
mod gpu_leases;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use gpupool_confine::lock;
use gpupool_dispatch::job_log::JobLogError;
use gpupool_dispatch::{
    DispatchError, DispatchRules, Dispatcher, RunHandle, RunPlan, SubmitError, TaskId, WorkerId, WorkerOutputPolicy,
    WorkerProgram, WorkerSlot,
};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::conversion::to_python;
use crate::shared_memory::{self, LentSlot};
use crate::task_worker::format_exception;
use crate::value_codec::{MainModuleMode, PackedValue, Pickler, ValueCodec};
use events::{EpochClock, RunLog};
use gpu_leases::{GpuNotices, LeasedGpus};

/// Maximum wait for an event before control returns to Python.
const EVENT_WAIT: Duration = Duration::from_secs(1);

/// A run. Dropping it cancels unfinished tasks and leaves no process.
#[pyclass(frozen, name = "Run")]
pub(crate) struct PyRun {
    /// `None` once finished. The GPUs are released after the workers are gone.
    running: Mutex<Option<(Dispatcher, Option<LeasedGpus>)>>,
    remote: RunHandle,
    codec: ValueCodec,
    loans: TaskLoans,
    /// Number of items read from the source, including those finished in an earlier run.
    read: AtomicU64,
    /// Number of submitted tasks.
    put: AtomicU64,
    log: Option<RunLog>,
    notices: Arc<GpuNotices>,
    clock: EpochClock,
    process: u32,
}

#[pymethods]
impl PyRun {
    /// Starts the workers.
    #[new]
    fn start(py: Python<'_>, wish: RunSettings) -> PyResult<Self> {
        let memory = if wish.shares_memory { shared_memory::create().ok() } else { None };
        let main = if wish.by_value { MainModuleMode::ByValue } else { MainModuleMode::Known };
        let codec = ValueCodec::new(Pickler::new(py, main)?, memory.clone())?;
        let mut plan = wish.plan()?;
        plan.memory = memory;
        let log = wish.log()?;
        let dispatcher = py.detach(|| Dispatcher::start(plan)).map_err(plan_exception)?;
        let (remote, notices) = (dispatcher.handle(), Arc::new(GpuNotices::default()));
        let start = |(count, each)| LeasedGpus::start(py, count, each, remote.clone(), Arc::clone(&notices));
        let gpus = wish.gpus.map(start).transpose()?;
        Ok(Self {
            remote,
            running: Mutex::new(Some((dispatcher, gpus))),
            codec,
            loans: TaskLoans::default(),
            read: AtomicU64::new(0),
            put: AtomicU64::new(0),
            log,
            notices,
            clock: EpochClock::now(),
            process: std::process::id(),
        })
    }

    /// Submits the next item of the source and waits for room; for one thread. `False` if no more are accepted.
    ///
    /// Python reads the source: a thread that the interpreter terminates meanwhile must have no Rust frames on its
    /// stack.
    fn put(&self, item: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = item.py();
        let place = self.read.fetch_add(1, Ordering::Relaxed);
        if let Some(log) = &self.log
            && log.is_done(place).map_err(log_exception)?
        {
            return Ok(true);
        }
        let PackedValue { payload, lent } = self.pack_task(item);
        // No other thread submits tasks, so this is the number of the next task.
        let task = TaskId(self.put.fetch_add(1, Ordering::Relaxed));
        if let Some(log) = &self.log {
            log.record_place(task, place);
        }
        if !lent.is_empty() {
            // Recorded before the submission: the task may end before this thread continues.
            py.detach(|| self.loans.add(task, lent));
        }
        let outcome = match self.remote.submit(payload.clone()) {
            Err(SubmitError::Full) => py.detach(|| self.remote.submit_blocking(payload)),
            outcome => outcome,
        };
        match outcome {
            Ok(same) => debug_assert_eq!(same, task),
            Err(SubmitError::Closed) => return Ok(false),
            Err(refused) => return Err(PyValueError::new_err(format!("task {place}: {refused}"))),
        }
        Ok(true)
    }

    /// Declares that no more tasks follow.
    fn close(&self) {
        self.remote.close();
    }

    /// Cancels everything now.
    fn cancel(&self) {
        self.remote.cancel();
        self.loans.close();
    }

    /// Abandons unfinished tasks; the workers clean up and end.
    fn stop(&self) {
        self.remote.stop();
        self.loans.close();
    }

    /// Waits for events: a list of tuples, empty after a while or a signal; `None` at the end of the run.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.check_process()?;
        if let Some(log) = &self.log {
            log.write().map_err(log_exception)?;
        }
        let waited = py.detach(|| {
            let mut running = lock(&self.running);
            let (dispatcher, _) = running.as_mut()?;
            let Some(first) = dispatcher.next_event_timeout(EVENT_WAIT) else {
                return (!dispatcher.is_finished()).then(Vec::new);
            };
            let mut events = vec![first];
            while dispatcher.has_event() {
                events.extend(dispatcher.next_event());
            }
            Some(events)
        });
        py.check_signals()?;
        let Some(events) = waited else { return Ok(None) };
        let tuples = PyList::empty(py);
        for notice in self.notices.take() {
            tuples.append(notice.into_tuple(py)?)?;
        }
        for event in events {
            tuples.append(self.event_tuple(py, event)?)?;
        }
        Ok(Some(tuples))
    }

    /// Discards unlogged ends after a callback that did not return.
    fn forget(&self) {
        if let Some(log) = &self.log {
            log.forget();
        }
    }

    /// Returns the statistics of the run.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.check_process()?;
        let stats = py.detach(|| self.remote.stats());
        let stats_dict = to_python(py, &stats)?;
        for (worker, known) in stats_dict.get_item("workers")?.try_iter()?.zip(&stats.workers) {
            worker?.set_item("task_since", known.task_since.map(|since| self.clock.time(since)))?;
        }
        Ok(stats_dict)
    }

    /// Finishes the run: `None`, or the reason why it could not continue, as (kind, text).
    fn finish(&self, py: Python<'_>) -> PyResult<Option<(&'static str, String)>> {
        self.check_process()?;
        let Some((dispatcher, gpus)) = lock(&self.running).take() else { return Ok(None) };
        let finished = py.detach(|| {
            let finished = dispatcher.finish();
            drop(gpus);
            finished
        });
        if let Some(log) = &self.log {
            py.detach(|| log.finish()).map_err(log_exception)?;
        }
        Ok(match finished {
            Ok(_) => self.notices.failure().map(|why| ("gpus", why)),
            Err(error @ DispatchError::AllFailedSetup { .. }) => Some(("setup", error.to_string())),
            Err(error) => Some(("other", error.to_string())),
        })
    }
}

impl PyRun {
    /// Packs a task. If that fails, the task itself fails in the worker with the reason.
    fn pack_task(&self, item: &Bound<'_, PyAny>) -> PackedValue {
        self.codec.pack(item).unwrap_or_else(|error| PackedValue {
            payload: ValueCodec::pack_error(&format!(
                "the task cannot be pickled:\n{}",
                format_exception(item.py(), &error)
            )),
            lent: Vec::new(),
        })
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err("this run was started by another process (before a fork)"))
    }
}

impl Drop for PyRun {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // A forked child has none of the run's threads, and the workers belong to the parent.
            std::mem::forget(running);
            return;
        }
        self.loans.close();
        // The drop waits for processes to end and does not need Python.
        Python::try_attach(|py| py.detach(|| drop(running)));
    }
}

fn log_exception(error: JobLogError) -> PyErr {
    match error {
        JobLogError::File { .. } => PyOSError::new_err(error.to_string()),
        other => PyValueError::new_err(other.to_string()),
    }
}

fn plan_exception(error: DispatchError) -> PyErr {
    match error {
        DispatchError::Plan { .. } => PyValueError::new_err(error.to_string()),
        other => PyRuntimeError::new_err(other.to_string()),
    }
}

// The plan of a run from Python.

/// Settings of a run: the attributes of an object.
#[derive(FromPyObject)]
struct RunSettings {
    program: Vec<String>,
    environment: HashMap<String, String>,
    settings: String,
    helper: PathBuf,
    pub by_value: bool,
    pub shares_memory: bool,
    /// Workers: number, GPUs and environment variables of each.
    places: Vec<(u32, Vec<u32>, HashMap<String, String>)>,
    queue_size: usize,
    task_timeout: Option<f64>,
    grace: f64,
    retries: u32,
    output: String,
    tell_started: bool,
    joblog: Option<PathBuf>,
    /// Text in the command column of the job log.
    name: String,
    /// Leased GPUs: their number, and the workers on each.
    pub gpus: Option<(Option<usize>, u32)>,
}

impl RunSettings {
    pub fn log(&self) -> PyResult<Option<RunLog>> {
        self.joblog.as_deref().map(|path| RunLog::open(path, self.name.clone()).map_err(log_exception)).transpose()
    }

    pub fn plan(&self) -> PyResult<RunPlan> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program is empty"))?;
        let mut program = WorkerProgram::native(program).args(arguments);
        for (name, value) in &self.environment {
            program = program.env(name, value);
        }
        let settings = serde_json::from_str(&self.settings);
        let output = match self.output.as_str() {
            "inherited" => WorkerOutputPolicy::Inherited,
            "dropped" => WorkerOutputPolicy::Discarded,
            "told" => WorkerOutputPolicy::Reported,
            other => return Err(PyValueError::new_err(format!("output: {other:?} is not inherited, dropped or told"))),
        };
        let rules = DispatchRules {
            queue_size: self.queue_size,
            task_timeout: self.task_timeout.map(|limit| seconds("task_timeout", limit)).transpose()?,
            grace: seconds("grace", self.grace)?,
            retries: self.retries,
            ..DispatchRules::default()
        };
        let places = self.places.iter().map(|(id, gpu_ids, environment)| WorkerSlot {
            gpu_ids: gpu_ids.clone(),
            environment: environment.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect(),
            ..WorkerSlot::new(WorkerId(*id))
        });
        Ok(RunPlan {
            slots: places.collect(),
            rules,
            settings: settings.map_err(|error| PyValueError::new_err(format!("settings: {error}")))?,
            output,
            report_started: self.tell_started,
            helper: Some(self.helper.clone()),
            ..RunPlan::new(program)
        })
    }
}

fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| PyValueError::new_err(format!("{what} must be a positive number of seconds, got {seconds}")))
}

// Shared memory of unfinished tasks.

/// Maximum bytes of shared memory for unfinished tasks. A larger task goes alone.
const MAX_LENT_BYTES: u64 = 256 << 20;

/// Lent slots of unfinished tasks.
#[derive(Debug, Default)]
struct TaskLoans {
    state: Mutex<TaskLoanState>,
    has_room: Condvar,
}

#[derive(Debug, Default)]
struct TaskLoanState {
    tasks: HashMap<TaskId, Vec<LentSlot>>,
    bytes: u64,
    is_over: bool,
}

impl TaskLoans {
    /// Waits for room and records the slots lent for a task.
    fn add(&self, task: TaskId, lent: Vec<LentSlot>) {
        let bytes = lent_bytes(&lent);
        let is_full =
            |state: &mut TaskLoanState| state.bytes > 0 && state.bytes + bytes > MAX_LENT_BYTES && !state.is_over;
        let waited = self.has_room.wait_while(lock(&self.state), is_full);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.bytes += bytes;
        state.tasks.insert(task, lent);
    }

    /// Removes a finished task and returns its slots.
    pub fn remove(&self, task: TaskId) -> Vec<LentSlot> {
        let mut state = lock(&self.state);
        let lent = state.tasks.remove(&task).unwrap_or_default();
        if !lent.is_empty() {
            state.bytes -= lent_bytes(&lent);
            self.has_room.notify_all();
        }
        lent
    }

    /// Stops all waits.
    fn close(&self) {
        lock(&self.state).is_over = true;
        self.has_room.notify_all();
    }
}

fn lent_bytes(lent: &[LentSlot]) -> u64 {
    lent.iter().map(|lent| lent.slot.capacity).sum()
}
