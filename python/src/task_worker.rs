//! A Python worker process: this module implements the protocol, `gpupool._worker` processes the tasks.
//!
//! It unpacks tasks, packs their results, and counts. It runs in the main thread, where Python's signal handlers run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use gpupool_dispatch::TaskId;
use gpupool_dispatch::protocol::{InterruptReason, WorkerCounters};
use gpupool_dispatch::worker::{self, TaskWorker, WorkerHello};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::conversion::to_python;
use crate::value_codec::{MainModuleMode, Pickler, ValueCodec};

/// Counters with the reason of an interrupt.
static COUNTERS: OnceLock<Arc<WorkerCounters>> = OnceLock::new();
/// Set after set-up: from then on only tasks are interrupted, because an aborted clean-up is useless.
static IS_SET_UP: AtomicBool = AtomicBool::new(false);

/// Processes tasks until the worker is stopped.
#[pyfunction]
pub(crate) fn serve_as_worker(py: Python<'_>) -> PyResult<()> {
    py.detach(worker::serve_tasks::<PythonTaskWorker>).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// Returns the reason of the latest interrupt: `too_long`, `unwanted`, or `None` if it no longer matters.
#[pyfunction]
pub(crate) fn interrupted() -> Option<&'static str> {
    let counters = COUNTERS.get()?;
    match counters.interrupt_reason() {
        Some(InterruptReason::TaskTimedOut) => Some("too_long"),
        Some(InterruptReason::StopRequested) => Some("unwanted"),
        None => (!IS_SET_UP.load(Ordering::Relaxed) && counters.is_stop_requested()).then_some("unwanted"),
    }
}

/// Result of `gpupool._worker.set_up`.
#[derive(FromPyObject)]
struct WorkFunctions {
    process: Py<PyAny>,
    clean_up: Py<PyAny>,
    load_main: Option<Py<PyAny>>,
}

struct PythonTaskWorker {
    work: WorkFunctions,
    codec: ValueCodec,
}

impl TaskWorker for PythonTaskWorker {
    fn set_up(hello: &WorkerHello) -> Result<Self, String> {
        if let Some(counters) = &hello.counters {
            let _ = COUNTERS.set(Arc::clone(counters));
        }
        let started = Python::attach(|py| Self::start(py, hello).map_err(|error| format_exception(py, &error)));
        IS_SET_UP.store(true, Ordering::Relaxed);
        started
    }

    fn process(&mut self, _task: TaskId, payload: Bytes) -> Result<Bytes, String> {
        Python::attach(|py| {
            let done = self.codec.unpack(py, &payload).and_then(|data| {
                let result = self.work.process.bind(py).call1((data,))?;
                self.codec.pack(&result)
            });
            done.map(|packed| packed.payload).map_err(|error| format_exception(py, &error))
        })
    }

    fn clean_up(self) -> Result<(), String> {
        Python::attach(|py| self.work.clean_up.call0(py).map(drop).map_err(|error| format_exception(py, &error)))
    }
}

impl PythonTaskWorker {
    fn start(py: Python<'_>, hello: &WorkerHello) -> PyResult<Self> {
        let work: WorkFunctions =
            py.import("gpupool._worker")?.call_method1("set_up", (to_python(py, hello)?,))?.extract()?;
        let main = match &work.load_main {
            Some(load) => MainModuleMode::LoadedBy(Some(load.clone_ref(py)).into()),
            None => MainModuleMode::Known,
        };
        let codec = ValueCodec::new(Pickler::new(py, main)?, hello.memory.clone())?;
        Ok(Self { work, codec })
    }
}

/// Formats an error as Python prints it.
pub(crate) fn format_exception(py: Python<'_>, error: &PyErr) -> String {
    let printed = || -> PyResult<String> {
        let lines = py
            .import("traceback")?
            .call_method1("format_exception", (error.get_type(py), error.value(py), error.traceback(py)))?;
        pyo3::types::PyString::new(py, "").call_method1("join", (lines,))?.extract()
    };
    printed().unwrap_or_else(|_| error.to_string())
}
