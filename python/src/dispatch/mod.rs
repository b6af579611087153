//! A run of the dispatcher, for `gpu_dispatch`.
//!
//! The thread of the run takes events ([`Run::events`]); another one feeds ([`Run::put`]). Both hold the interpreter only while
//! they deal with Python values.

mod events;
mod feed;
mod gpus;
mod joblog;
mod plan;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpupool_dispatch::joblog::JobLogError;
use gpupool_dispatch::{DispatchError, Dispatcher, Remote, TaskId};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::carry::{Carrier, Main, Pickle};
use crate::memory::{self, Lent};
use crate::values::to_python;
use events::{Clock, Telling};
use feed::{Budget, Feeding};
use gpus::{Board, Gpus};
use joblog::Log;
use plan::Wish;

/// How long a run may last whose end is waited for without its events being wanted.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A run. What is not over when it goes is cancelled, and no process is left.
#[pyclass(frozen, name = "Run")]
pub(crate) struct Run {
    dispatcher: Mutex<Option<Dispatcher>>,
    /// Given back after the workers are gone.
    gpus: Mutex<Option<Gpus>>,
    remote: Remote,
    shared: Arc<Shared>,
    clock: Clock,
    process: u32,
}

/// What the thread that feeds and the one that takes events both know.
struct Shared {
    carrier: Carrier,
    tasks: Mutex<HashMap<TaskId, Vec<Lent>>>,
    budget: Budget,
    feeding: Feeding,
    log: Option<Log>,
    board: Arc<Board>,
}

#[pymethods]
impl Run {
    /// Starts the workers.
    #[new]
    fn start(py: Python<'_>, wish: Wish) -> PyResult<Self> {
        let memory = if wish.shares_memory { memory::create().ok() } else { None };
        let main = if wish.by_value { Main::ByValue } else { Main::IsKnown };
        let carrier = Carrier::new(Pickle::new(py, main)?, memory.clone())?;
        let mut plan = wish.plan()?;
        plan.memory = memory;
        let log = wish.log()?;
        let dispatcher = py.detach(|| Dispatcher::start(plan)).map_err(of_plan)?;
        let (remote, board) = (dispatcher.remote(), Arc::new(Board::default()));
        let gpus = wish.gpus.map(|wanted| wanted.start(py, remote.clone(), Arc::clone(&board))).transpose()?;
        let shared = Shared {
            carrier,
            tasks: Mutex::default(),
            budget: Budget::default(),
            feeding: Feeding::default(),
            log,
            board,
        };
        Ok(Self {
            remote,
            dispatcher: Mutex::new(Some(dispatcher)),
            gpus: Mutex::new(gpus),
            shared: Arc::new(shared),
            clock: Clock::now(),
            process: std::process::id(),
        })
    }

    /// Puts the next of the source, waiting for room; for one thread. `False` where nobody wants more.
    ///
    /// The source is read in Python: a thread that the interpreter ends while it does must have nothing of ours below it.
    fn put(&self, item: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.shared.feeding.put(&self.remote, &self.shared, item)
    }

    /// No more tasks come.
    fn close(&self) {
        self.remote.close();
    }

    /// Ends everything now.
    fn cancel(&self) {
        self.remote.cancel();
        self.shared.budget.is_over();
    }

    /// Gives up what is not done; the workers clean up and end.
    fn stop(&self) {
        self.remote.stop();
        self.shared.budget.is_over();
    }

    /// What happened, waiting for it: a list of tuples, empty after a while or a signal; `None` when all is over.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.check_process()?;
        if let Some(log) = &self.shared.log {
            log.write().map_err(of_log)?;
        }
        let waited = py.detach(|| {
            let mut dispatcher = self.lock();
            let dispatcher = dispatcher.as_mut()?;
            let Some(first) = dispatcher.next_event_within(LOOK_AGAIN) else {
                return (!dispatcher.is_over()).then(Vec::new);
            };
            let mut events = vec![first];
            while dispatcher.has_event() {
                events.extend(dispatcher.next_event());
            }
            Some(events)
        });
        py.check_signals()?;
        let Some(events) = waited else { return Ok(None) };
        let telling = Telling { shared: &self.shared, clock: &self.clock };
        let told = PyList::empty(py);
        for news in self.shared.board.take() {
            told.append(telling.news(py, news)?)?;
        }
        for event in events {
            told.append(telling.tell(py, event)?)?;
        }
        Ok(Some(told))
    }

    /// A callback did not come back: what it was told of is not logged.
    fn forget(&self) {
        if let Some(log) = &self.shared.log {
            log.forget();
        }
    }

    /// How things stand.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.check_process()?;
        let stats = py.detach(|| self.remote.stats());
        let told = to_python(py, &stats)?;
        for (worker, known) in told.get_item("workers")?.try_iter()?.zip(&stats.workers) {
            worker?.set_item("task_since", known.task_since.map(|since| self.clock.time(since)))?;
        }
        Ok(told)
    }

    /// All is over: `None`, or why the run could not go on, as (kind, text).
    fn finish(&self, py: Python<'_>) -> PyResult<Option<(&'static str, String)>> {
        self.check_process()?;
        let Some(dispatcher) = self.lock().take() else { return Ok(None) };
        let finished = py.detach(|| dispatcher.finish());
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(gpus));
        if let Some(log) = &self.shared.log {
            py.detach(|| log.finish()).map_err(of_log)?;
        }
        Ok(match finished {
            Ok(_) => self.shared.board.failure().map(|why| ("gpus", why)),
            Err(error @ DispatchError::AllFailedSetup { .. }) => Some(("setup", error.to_string())),
            Err(error) => Some(("other", error.to_string())),
        })
    }
}

impl Run {
    fn lock(&self) -> MutexGuard<'_, Option<Dispatcher>> {
        self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err("this run was started by another process, of which this one is a copy"))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let dispatcher = self.dispatcher.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let gpus = self.gpus.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // A forked child has none of its threads, and its workers are the parent's.
            std::mem::forget((dispatcher, gpus));
            return;
        }
        self.shared.budget.is_over();
        // It waits for processes to end, and needs nothing of Python for that.
        Python::try_attach(|py| {
            py.detach(|| {
                drop(dispatcher);
                drop(gpus);
            });
        });
    }
}

impl Shared {
    fn tasks(&self) -> MutexGuard<'_, HashMap<TaskId, Vec<Lent>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of_log(error: JobLogError) -> PyErr {
    match error {
        JobLogError::File { .. } => PyOSError::new_err(error.to_string()),
        other => PyValueError::new_err(other.to_string()),
    }
}

fn of_plan(error: DispatchError) -> PyErr {
    match error {
        DispatchError::Plan { .. } => PyValueError::new_err(error.to_string()),
        other => PyRuntimeError::new_err(other.to_string()),
    }
}
