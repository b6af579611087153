//! What happens in a run, as Python is told: tuples of
//! `(kind, task_id, worker_id, value, started_at, finished_at)`.

use std::time::{Instant, SystemTime};

use gpupool_dispatch::{Event, Outcome, Over, TaskId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use pyo3::{IntoPyObjectExt, intern};

use super::Shared;
use super::feed::bytes_of;
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

/// Makes tuples of events.
pub(super) struct Telling<'a> {
    pub shared: &'a Shared,
    pub clock: &'a Clock,
}

impl Telling<'_> {
    /// What became of the run's GPUs.
    pub fn news<'py>(&self, py: Python<'py>, news: News) -> PyResult<Bound<'py, PyTuple>> {
        let none = py.None();
        let value = (news.gpu_id, news.text).into_pyobject(py)?;
        (news.kind, &none, news.worker, value, &none, &none).into_pyobject(py)
    }

    pub fn tell<'py>(&self, py: Python<'py>, event: Event) -> PyResult<Bound<'py, PyTuple>> {
        let none = py.None();
        match event {
            Event::Over(over) => self.over(py, over),
            Event::Started { task, worker, at } => {
                (intern!(py, "started"), self.place(task), worker.0, &none, self.clock.time(at), &none)
                    .into_pyobject(py)
            }
            Event::Retried { task, worker, outcome } => {
                let (kind, value) = self.outcome(py, &outcome)?;
                let value = (kind, value).into_pyobject(py)?;
                (intern!(py, "retried"), self.place(task), worker.0, value, &none, &none).into_pyobject(py)
            }
            Event::Ready { worker } => self.of_worker(py, "ready", worker.0, ""),
            Event::SetupFailed { worker, why } => self.of_worker(py, "setup_failed", worker.0, &why),
            Event::CleanupFailed { worker, why } => self.of_worker(py, "cleanup_failed", worker.0, &why),
            Event::Gone { worker, cause, last_words, is_last } => {
                self.shared.carrier.bury();
                let value = (cause.to_string(), last_words.to_string(), is_last).into_pyobject(py)?;
                (intern!(py, "gone"), &none, worker.0, value, &none, &none).into_pyobject(py)
            }
            Event::Wrote { worker, bytes } => {
                (intern!(py, "wrote"), &none, worker.0, PyBytes::new(py, &bytes), &none, &none).into_pyobject(py)
            }
        }
    }

    /// A task's place in the source: its number, unless an earlier run did some.
    fn place(&self, task: TaskId) -> u64 {
        self.shared.log.as_ref().and_then(|log| log.place(task)).unwrap_or(task.0)
    }

    fn of_worker<'py>(&self, py: Python<'py>, kind: &str, worker: u32, why: &str) -> PyResult<Bound<'py, PyTuple>> {
        let none = py.None();
        (kind, &none, worker, why, &none, &none).into_pyobject(py)
    }

    fn over<'py>(&self, py: Python<'py>, over: Over) -> PyResult<Bound<'py, PyTuple>> {
        let (kind, value) = self.outcome(py, &over.outcome)?;
        let lent = self.shared.tasks().remove(&over.task).unwrap_or_default();
        if !lent.is_empty() {
            self.shared.carrier.is_over(&lent);
            self.shared.budget.give_back(bytes_of(&lent));
        }
        let place = self.place(over.task);
        if let Some(log) = &self.shared.log {
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
        outcome: &Outcome,
    ) -> PyResult<(&Bound<'py, pyo3::types::PyString>, Bound<'py, PyAny>)> {
        Ok(match outcome {
            Outcome::Done(payload) => match self.shared.carrier.unpack(py, payload) {
                Ok(value) => (intern!(py, "done"), value),
                Err(error) => (intern!(py, "failed"), told(py, &error).into_bound_py_any(py)?),
            },
            Outcome::Failed(why) => (intern!(py, "failed"), String::from_utf8_lossy(why).into_bound_py_any(py)?),
            Outcome::TimedOut(limit) => (intern!(py, "timed_out"), limit.as_secs_f64().into_bound_py_any(py)?),
            Outcome::WorkerLost(loss) => (intern!(py, "lost"), loss.to_string().into_bound_py_any(py)?),
            Outcome::Cancelled => (intern!(py, "cancelled"), py.None().into_bound(py)),
        })
    }
}
