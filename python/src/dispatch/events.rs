//! What happens in a run, as Python is told: tuples of
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

use super::Run;
use super::gpus::News;
use crate::worker::told;

/// Tells times as Python has them: seconds since 1970.
#[derive(Debug)]
pub(super) struct Clock {
    instant: Instant,
    time: f64,
}

impl Clock {
    pub fn now() -> Self {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { instant: Instant::now(), time: time.as_secs_f64() }
    }

    pub fn time(&self, at: Instant) -> f64 {
        let since = at.saturating_duration_since(self.instant).as_secs_f64();
        self.time + since - self.instant.saturating_duration_since(at).as_secs_f64()
    }
}

impl News {
    pub fn tell(self, py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        let none = py.None();
        let value = (self.gpu_id, self.text).into_pyobject(py)?;
        (self.kind, &none, self.worker, value, &none, &none).into_pyobject(py)
    }
}

impl Run {
    /// The tuple of an event.
    pub(super) fn tell<'py>(&self, py: Python<'py>, event: RunEvent) -> PyResult<Bound<'py, PyTuple>> {
        let none = py.None();
        match event {
            RunEvent::TaskEnded(over) => self.over(py, over),
            RunEvent::TaskStarted { task, worker, at } => {
                (intern!(py, "started"), self.place(task), worker.0, &none, self.clock.time(at), &none)
                    .into_pyobject(py)
            }
            RunEvent::TaskRetried { task, worker, outcome } => {
                let (kind, value) = self.outcome(py, &outcome)?;
                let value = (kind, value).into_pyobject(py)?;
                (intern!(py, "retried"), self.place(task), worker.0, value, &none, &none).into_pyobject(py)
            }
            RunEvent::WorkerReady { worker } => of_worker(py, "ready", worker.0, ""),
            RunEvent::WorkerSetupFailed { worker, why } => of_worker(py, "setup_failed", worker.0, &why),
            RunEvent::WorkerCleanupFailed { worker, why } => of_worker(py, "cleanup_failed", worker.0, &why),
            RunEvent::WorkerGone { worker, cause, output_tail, is_last } => {
                self.carrier.bury();
                let value = (cause.to_string(), output_tail.to_string(), is_last).into_pyobject(py)?;
                (intern!(py, "gone"), &none, worker.0, value, &none, &none).into_pyobject(py)
            }
            RunEvent::WorkerWrote { worker, bytes } => {
                (intern!(py, "wrote"), &none, worker.0, PyBytes::new(py, &bytes), &none, &none).into_pyobject(py)
            }
        }
    }

    /// A task's place in the source: its number, unless an earlier run did some.
    fn place(&self, task: TaskId) -> u64 {
        self.log.as_ref().and_then(|log| log.place(task)).unwrap_or(task.0)
    }

    fn over<'py>(&self, py: Python<'py>, over: TaskEnd) -> PyResult<Bound<'py, PyTuple>> {
        let (kind, value) = self.outcome(py, &over.outcome)?;
        self.carrier.is_over(&self.loans.remove(over.task));
        let place = self.place(over.task);
        if let Some(log) = &self.log {
            log.over(&over);
        }
        let started = over.started.map(|started| self.clock.time(started));
        let worker = over.worker.map(|worker| worker.0);
        (kind, place, worker, value, started, self.clock.time(over.finished)).into_pyobject(py)
    }

    /// A result that cannot be unpacked here is a failure.
    fn outcome<'py>(
        &self,
        py: Python<'py>,
        outcome: &TaskOutcome,
    ) -> PyResult<(&Bound<'py, pyo3::types::PyString>, Bound<'py, PyAny>)> {
        Ok(match outcome {
            TaskOutcome::Done(payload) => match self.carrier.unpack(py, payload) {
                Ok(value) => (intern!(py, "done"), value),
                Err(error) => (intern!(py, "failed"), told(py, &error).into_bound_py_any(py)?),
            },
            TaskOutcome::Failed(why) => (intern!(py, "failed"), String::from_utf8_lossy(why).into_bound_py_any(py)?),
            TaskOutcome::TimedOut(limit) => (intern!(py, "timed_out"), limit.as_secs_f64().into_bound_py_any(py)?),
            TaskOutcome::WorkerLost(loss) => (intern!(py, "lost"), loss.to_string().into_bound_py_any(py)?),
            TaskOutcome::Cancelled => (intern!(py, "cancelled"), py.None().into_bound(py)),
        })
    }
}

fn of_worker<'py>(py: Python<'py>, kind: &str, worker: u32, why: &str) -> PyResult<Bound<'py, PyTuple>> {
    let none = py.None();
    (kind, &none, worker, why, &none, &none).into_pyobject(py)
}

// The job log of a run: which tasks an earlier run did, and what becomes of those of this one.
//
// A task is logged when its callback has come back, so that none is taken for done whose result nobody got.

/// What is known of the log, by the thread that feeds and the one that takes events.
#[derive(Debug)]
pub(super) struct Log {
    /// What stands for the command.
    name: String,
    finished: Mutex<FinishedTasks>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    file: Option<JobLog>,
    /// Tasks' places in the source, by their numbers in this run.
    places: HashMap<TaskId, u64>,
    /// Over, and not logged yet. The command is added then.
    told: Vec<JobLogEntry<'static>>,
}

impl Log {
    /// Goes on with a log, or begins one. What failed is done again.
    pub fn open(path: &Path, name: String) -> Result<Self, JobLogError> {
        let (file, finished) = JobLog::resume(path, RerunPolicy::Failed)?;
        let books = Books { file: Some(file), places: HashMap::new(), told: Vec::new() };
        Ok(Self { name, finished: Mutex::new(finished), books: Mutex::new(books) })
    }

    /// Whether an earlier run did the task at this place of the source.
    pub fn has(&self, place: u64) -> Result<bool, JobLogError> {
        lock(&self.finished).contains(place + 1, self.name.as_bytes())
    }

    /// The task of this number is at that place of the source.
    pub fn put(&self, task: TaskId, place: u64) {
        lock(&self.books).places.insert(task, place);
    }

    /// The place of a task.
    pub fn place(&self, task: TaskId) -> Option<u64> {
        lock(&self.books).places.get(&task).copied()
    }

    /// A task is over. It is logged by [`Log::write`].
    pub fn over(&self, over: &TaskEnd) {
        let mut books = lock(&self.books);
        let Some(place) = books.places.remove(&over.task) else { return };
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
        books.told.push(JobLogEntry { seq, started, took, received, exit_code, signal, command });
    }

    /// The callbacks of all that is over have come back.
    pub fn write(&self) -> Result<(), JobLogError> {
        let mut books = lock(&self.books);
        let Books { file, told, .. } = &mut *books;
        let Some(file) = file else { return Ok(()) };
        for ended in told.drain(..) {
            file.append(&JobLogEntry { command: self.name.as_bytes(), ..ended })?;
        }
        Ok(())
    }

    /// What was not written is not: its callbacks did not come back.
    pub fn forget(&self) {
        lock(&self.books).told.clear();
    }

    /// All is over: waits until it is on the disk.
    pub fn finish(&self) -> Result<(), JobLogError> {
        self.write()?;
        let file = lock(&self.books).file.take();
        file.map_or(Ok(()), JobLog::finish)
    }
}
