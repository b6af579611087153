//! A worker process of Python: the protocol here, the work there.
//!
//! `gpupool._worker` says what is to be done with a task; this unpacks tasks for it, packs its results, and counts. It runs in
//! the main thread, where Python's signal handlers run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use gpupool_dispatch::TaskId;
use gpupool_dispatch::protocol::{InterruptReason, WorkerCounters};
use gpupool_dispatch::worker::{self, TaskWorker, WorkerHello};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::carry::{Carrier, Main, Pickle};
use crate::values::to_python;

/// Where this worker finds what an interrupt is about.
static COUNTERS: OnceLock<Arc<WorkerCounters>> = OnceLock::new();
/// From then on only tasks are interrupted: nobody has use for half a cleaning up.
static IS_SET_UP: AtomicBool = AtomicBool::new(false);

/// Works until it is told to stop.
#[pyfunction]
pub(crate) fn serve_as_worker(py: Python<'_>) -> PyResult<()> {
    py.detach(worker::serve_tasks::<Serving>).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// What the interrupt that came is about: `too_long`, `unwanted`, or nothing that still matters.
#[pyfunction]
pub(crate) fn interrupted() -> Option<&'static str> {
    let counters = COUNTERS.get()?;
    match counters.interrupt_reason() {
        Some(InterruptReason::TaskTimedOut) => Some("too_long"),
        Some(InterruptReason::StopRequested) => Some("unwanted"),
        None => (!IS_SET_UP.load(Ordering::Relaxed) && counters.is_stop_requested()).then_some("unwanted"),
    }
}

/// What `gpupool._worker.set_up` gives.
#[derive(FromPyObject)]
struct Work {
    process: Py<PyAny>,
    clean_up: Py<PyAny>,
    load_main: Option<Py<PyAny>>,
}

struct Serving {
    work: Work,
    carrier: Carrier,
}

impl TaskWorker for Serving {
    fn set_up(hello: &WorkerHello) -> Result<Self, String> {
        if let Some(counters) = &hello.counters {
            let _ = COUNTERS.set(Arc::clone(counters));
        }
        let started = Python::attach(|py| Self::start(py, hello).map_err(|error| told(py, &error)));
        IS_SET_UP.store(true, Ordering::Relaxed);
        started
    }

    fn process(&mut self, _task: TaskId, payload: Bytes) -> Result<Bytes, String> {
        Python::attach(|py| {
            let done = self.carrier.unpack(py, &payload).and_then(|data| {
                let result = self.work.process.bind(py).call1((data,))?;
                self.carrier.pack(&result)
            });
            done.map(|packed| packed.payload).map_err(|error| told(py, &error))
        })
    }

    fn clean_up(self) -> Result<(), String> {
        Python::attach(|py| self.work.clean_up.call0(py).map(drop).map_err(|error| told(py, &error)))
    }
}

impl Serving {
    fn start(py: Python<'_>, hello: &WorkerHello) -> PyResult<Self> {
        let work: Work = py.import("gpupool._worker")?.call_method1("set_up", (to_python(py, hello)?,))?.extract()?;
        let main = match &work.load_main {
            Some(load) => Main::LoadedBy(Some(load.clone_ref(py)).into()),
            None => Main::IsKnown,
        };
        let carrier = Carrier::new(Pickle::new(py, main)?, hello.memory.clone())?;
        Ok(Self { work, carrier })
    }
}

/// An error as Python would print it.
pub(crate) fn told(py: Python<'_>, error: &PyErr) -> String {
    let printed = || -> PyResult<String> {
        let lines = py
            .import("traceback")?
            .call_method1("format_exception", (error.get_type(py), error.value(py), error.traceback(py)))?;
        pyo3::types::PyString::new(py, "").call_method1("join", (lines,))?.extract()
    };
    printed().unwrap_or_else(|_| error.to_string())
}
