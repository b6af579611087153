//! From a Rust future to what Python waits for: an `asyncio` future of whatever loop runs, or a thread that blocks.
//!
//! No thread per call: the future is carried by the threads of the runtime, and its end is told to the loop through
//! `call_soon_threadsafe`. Cancelling the Python future drops the Rust future at once; a result that comes too late, or for a
//! loop that is closed, is dropped as well, which gives back whatever it holds.

use std::future::Future;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::task::AbortHandle;

use crate::attaching::attached;
use crate::runtime;

/// How long is waited before signals are looked at again.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// What a future came to, before there is an interpreter to make Python values of it.
pub(crate) type Outcome<T> = Result<T, PyErr>;

/// An `asyncio` future of the running loop that ends as the Rust future does; `finish` makes its result a Python value.
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = Outcome<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let running = py.import("asyncio")?.call_method0("get_running_loop")?;
    let waited = running.call_method0("create_future")?;
    let (to_loop, to_future) = (running.unbind(), waited.clone().unbind());
    let task = runtime::handle()?.spawn(async move {
        let outcome = future.await;
        // `None` while the interpreter ends: nobody is there to be told.
        attached(move |py| tell(py, &to_loop, to_future, outcome, finish));
    });
    let cancel = Cancel { task: task.abort_handle(), process: std::process::id() };
    waited.call_method1("add_done_callback", (cancel,))?;
    Ok(waited)
}

fn tell<T: Send + 'static>(
    py: Python<'_>,
    to_loop: &Py<PyAny>,
    to_future: Py<PyAny>,
    outcome: Outcome<T>,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) {
    let result = outcome.and_then(|value| finish(py, value));
    let told = Tell { future: to_future, result: Mutex::new(Some(result)) };
    // A closed loop waits for nothing any more; the result is dropped.
    let _ = to_loop.call_method1(py, "call_soon_threadsafe", (told,));
}

/// Ends the Python future, in its loop.
#[pyclass(frozen)]
struct Tell {
    future: Py<PyAny>,
    result: Mutex<Option<PyResult<Py<PyAny>>>>,
}

#[pymethods]
impl Tell {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let future = self.future.bind(py);
        if future.call_method0("done")?.is_truthy()? {
            return Ok(());
        }
        match result {
            Some(Ok(value)) => future.call_method1("set_result", (value,))?,
            Some(Err(error)) => future.call_method1("set_exception", (error,))?,
            None => return Ok(()),
        };
        Ok(())
    }
}

/// Drops the Rust future when the Python future is done, whatever it was done by.
#[pyclass(frozen)]
struct Cancel {
    task: AbortHandle,
    process: u32,
}

#[pymethods]
impl Cancel {
    fn __call__(&self, _future: &Bound<'_, PyAny>) {
        // A forked child has no thread that carries it, and the parent goes on with it.
        if self.process == std::process::id() {
            self.task.abort();
        }
    }
}

/// Waits in this thread, without holding the interpreter; a signal's handler runs at once, and what it raises ends the wait
/// and drops the future.
pub(crate) fn blocking<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = Outcome<T>> + Send + 'static,
) -> PyResult<T> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?);
    let place = Arc::new(Mutex::new(None));
    let (rings, puts) = (Arc::clone(&bell), Arc::clone(&place));
    let task = runtime::handle()?.spawn(async move {
        let outcome = future.await;
        *puts.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        // A counter of 64 bits is not full.
        let _ = rustix::io::write(&*rings, &1_u64.to_ne_bytes());
    });
    let _waiting = StopOnDrop(task.abort_handle());
    loop {
        py.detach(|| {
            // A signal ends the poll early, and is looked at below; one that came a moment before it, after a while.
            let _ = poll(&mut [PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)], Some(&LOOK_AGAIN));
        });
        if let Some(outcome) = place.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return outcome;
        }
        if task.is_finished() {
            return Err(PyRuntimeError::new_err("what was waited for ended without a result"));
        }
        py.check_signals()?;
    }
}

struct StopOnDrop(AbortHandle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
