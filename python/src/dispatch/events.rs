//! Events of a run for Python, as tuples
//! `(kind, task_id, worker_id, value, started_at, finished_at)`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use gpupool_confine::lock;
use gpupool_dispatch::job_log::{FinishedTasks, JobLog, JobLogEntry, JobLogError, RerunPolicy};
use gpupool_dispatch::{RunEvent, TaskEnd, TaskId, TaskOutcome, WorkerExitCause};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use pyo3::{IntoPyObjectExt, intern};

use super::PyRun;
use super::gpu_leases::GpuNotice;
use crate::task_worker::format_exception;

/// Converts instants to Python's time: seconds since 1970.
#[derive(Debug)]
pub(super) struct EpochClock {
    instant: Instant,
    time: f64,
}

impl EpochClock {
    pub fn now() -> Self {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { instant: Instant::now(), time: time.as_secs_f64() }
    }

    pub fn time(&self, at: Instant) -> f64 {
        let since = at.saturating_duration_since(self.instant).as_secs_f64();
        self.time + since - self.instant.saturating_duration_since(at).as_secs_f64()
    }
}

impl GpuNotice {
    pub fn into_tuple(self, py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        let none = py.None();
        let value = (self.gpu_id, self.text).into_pyobject(py)?;
        (self.kind, &none, self.worker, value, &none, &none).into_pyobject(py)
    }
}

impl PyRun {
    /// Converts an event to a tuple.
    pub(super) fn event_tuple<'py>(&self, py: Python<'py>, event: RunEvent) -> PyResult<Bound<'py, PyTuple>> {
        let none = py.None();
        match event {
            RunEvent::TaskEnded(over) => self.task_end_tuple(py, over),
            RunEvent::TaskStarted { task, worker, at } => {
                (intern!(py, "started"), self.place(task), worker.0, &none, self.clock.time(at), &none)
                    .into_pyobject(py)
            }
            RunEvent::TaskRetried { task, worker, outcome } => {
                let (kind, value) = self.outcome_value(py, &outcome)?;
                let value = (kind, value).into_pyobject(py)?;
                (intern!(py, "retried"), self.place(task), worker.0, value, &none, &none).into_pyobject(py)
            }
            RunEvent::WorkerReady { worker } => worker_tuple(py, "ready", worker.0, ""),
            RunEvent::WorkerSetupFailed { worker, why } => worker_tuple(py, "setup_failed", worker.0, &why),
            RunEvent::WorkerCleanupFailed { worker, why } => worker_tuple(py, "cleanup_failed", worker.0, &why),
            RunEvent::WorkerGone { worker, cause, output_tail, is_last } => {
                self.codec.reclaim_dead();
                let value = (cause.to_string(), output_tail.to_string(), is_last).into_pyobject(py)?;
                (intern!(py, "gone"), &none, worker.0, value, &none, &none).into_pyobject(py)
            }
            RunEvent::WorkerWrote { worker, bytes } => {
                (intern!(py, "wrote"), &none, worker.0, PyBytes::new(py, &bytes), &none, &none).into_pyobject(py)
            }
        }
    }

    /// Returns a task's position in the source: its number, unless an earlier run finished some.
    fn place(&self, task: TaskId) -> u64 {
        self.log.as_ref().and_then(|log| log.place(task)).unwrap_or(task.0)
    }

    fn task_end_tuple<'py>(&self, py: Python<'py>, over: TaskEnd) -> PyResult<Bound<'py, PyTuple>> {
        let (kind, value) = self.outcome_value(py, &over.outcome)?;
        self.codec.release_untaken(&self.loans.remove(over.task));
        let place = self.place(over.task);
        if let Some(log) = &self.log {
            log.record_end(&over);
        }
        let started = over.started.map(|started| self.clock.time(started));
        let worker = over.worker.map(|worker| worker.0);
        (kind, place, worker, value, started, self.clock.time(over.finished)).into_pyobject(py)
    }

    /// Converts an outcome; a result that cannot be unpacked is a failure.
    fn outcome_value<'py>(
        &self,
        py: Python<'py>,
        outcome: &TaskOutcome,
    ) -> PyResult<(&Bound<'py, pyo3::types::PyString>, Bound<'py, PyAny>)> {
        Ok(match outcome {
            TaskOutcome::Done(payload) => match self.codec.unpack(py, payload) {
                Ok(value) => (intern!(py, "done"), value),
                Err(error) => (intern!(py, "failed"), format_exception(py, &error).into_bound_py_any(py)?),
            },
            TaskOutcome::Failed(why) => (intern!(py, "failed"), String::from_utf8_lossy(why).into_bound_py_any(py)?),
            TaskOutcome::TimedOut(limit) => (intern!(py, "timed_out"), limit.as_secs_f64().into_bound_py_any(py)?),
            TaskOutcome::WorkerLost(loss) => (intern!(py, "lost"), loss.to_string().into_bound_py_any(py)?),
            TaskOutcome::Cancelled => (intern!(py, "cancelled"), py.None().into_bound(py)),
        })
    }
}

fn worker_tuple<'py>(py: Python<'py>, kind: &str, worker: u32, why: &str) -> PyResult<Bound<'py, PyTuple>> {
    let none = py.None();
    (kind, &none, worker, why, &none, &none).into_pyobject(py)
}

// The job log of a run: tasks finished by an earlier run, and the outcomes of this one.
//
// A task is logged after its callback returned, so that no task counts as finished without its result being delivered.

/// Job log, shared by the thread that submits tasks and the thread that takes events.
#[derive(Debug)]
pub(super) struct RunLog {
    /// Text in the command column.
    name: String,
    finished: Mutex<FinishedTasks>,
    state: Mutex<RunLogState>,
}

#[derive(Debug)]
struct RunLogState {
    file: Option<JobLog>,
    /// Positions in the source by task number of this run.
    places: HashMap<TaskId, u64>,
    /// Finished tasks that are not logged yet; the command is added later.
    pending: Vec<JobLogEntry<'static>>,
}

impl RunLog {
    /// Resumes or creates a log. Failed tasks run again.
    pub fn open(path: &Path, name: String) -> Result<Self, JobLogError> {
        let (file, finished) = JobLog::resume(path, RerunPolicy::Failed)?;
        let state = RunLogState { file: Some(file), places: HashMap::new(), pending: Vec::new() };
        Ok(Self { name, finished: Mutex::new(finished), state: Mutex::new(state) })
    }

    /// Whether an earlier run finished the task at this position of the source.
    pub fn is_done(&self, place: u64) -> Result<bool, JobLogError> {
        lock(&self.finished).contains(place + 1, self.name.as_bytes())
    }

    /// Records the position of a task in the source.
    pub fn record_place(&self, task: TaskId, place: u64) {
        lock(&self.state).places.insert(task, place);
    }

    /// Returns the position of a task.
    pub fn place(&self, task: TaskId) -> Option<u64> {
        lock(&self.state).places.get(&task).copied()
    }

    /// Records the end of a task for [`RunLog::write`].
    pub fn record_end(&self, over: &TaskEnd) {
        let mut state = lock(&self.state);
        let Some(place) = state.places.remove(&over.task) else { return };
        let took = over.started.map_or(Duration::ZERO, |started| over.finished.saturating_duration_since(started));
        let started = SystemTime::now().checked_sub(took + over.finished.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let (received, exit_code, signal) = match &over.outcome {
            TaskOutcome::Done(result) => (result.len() as u64, 0, 0),
            TaskOutcome::Failed(_) => (0, 1, 0),
            TaskOutcome::TimedOut(_) => (0, -1, 0),
            TaskOutcome::WorkerLost(loss) => {
                (0, -1, if let WorkerExitCause::Signalled(signal) = loss.cause { signal } else { 0 })
            }
            TaskOutcome::Cancelled => return,
        };
        let (seq, command) = (place + 1, b"");
        state.pending.push(JobLogEntry { seq, started, took, received, exit_code, signal, command });
    }

    /// Writes all recorded ends; their callbacks have returned.
    pub fn write(&self) -> Result<(), JobLogError> {
        let mut state = lock(&self.state);
        let RunLogState { file, pending, .. } = &mut *state;
        let Some(file) = file else { return Ok(()) };
        for ended in pending.drain(..) {
            file.append(&JobLogEntry { command: self.name.as_bytes(), ..ended })?;
        }
        Ok(())
    }

    /// Discards the recorded ends: their callbacks did not return.
    pub fn forget(&self) {
        lock(&self.state).pending.clear();
    }

    /// Closes the log and waits until it is on disk.
    pub fn finish(&self) -> Result<(), JobLogError> {
        self.write()?;
        let file = lock(&self.state).file.take();
        file.map_or(Ok(()), JobLog::finish)
    }
}
