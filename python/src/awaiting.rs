//! From a Rust future to what Python waits for: an `asyncio` future of whatever loop runs, or a thread that blocks.
//!
//! No thread per call: the future is carried by the thread of the runtime or by the loop itself, and its end is told to the loop
//! through its mailbox.
//! Cancelling the Python future drops the Rust future at once; a result that comes too late, or for a loop that is closed, is
//! dropped as well, which gives back whatever it holds.

use std::future::Future;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::task::AbortHandle;

use crate::mailbox::{Carried, Letter, Mailbox};
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
    let running = running_loop(py)?;
    let mailbox = Mailbox::of(&running)?;
    let waited = running.call_method0(intern!(py, "create_future"))?;
    let letter = letter_to(waited.clone().unbind(), future, finish);
    let task = runtime::handle()?.spawn(async move { mailbox.post(letter.await) });
    cancelling(&waited, Carrying::ByRuntime(task.abort_handle()))?;
    Ok(waited)
}

/// The same for what is answered soon: the loop itself polls it, so that the answer wakes the loop and no other thread first.
pub(crate) fn awaitable_soon<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = Outcome<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let running = running_loop(py)?;
    let mailbox = Mailbox::of(&running)?;
    if !mailbox.carries() {
        return awaitable(py, future, finish);
    }
    let waited = running.call_method0(intern!(py, "create_future"))?;
    if let Some(carried) = mailbox.carry(py, letter_to(waited.clone().unbind(), future, finish)) {
        cancelling(&waited, Carrying::ByLoop(carried))?;
    }
    Ok(waited)
}

/// What the loop is told in the end.
async fn letter_to<T: Send + 'static>(
    waited: Py<PyAny>,
    future: impl Future<Output = Outcome<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> Letter {
    let outcome = future.await;
    Box::new(move |py| tell(waited.bind(py), outcome.and_then(|value| finish(py, value))))
}

/// Drops what is carried when the Python future is done, whatever it was done by.
fn cancelling(waited: &Bound<'_, PyAny>, carrying: Carrying) -> PyResult<()> {
    let cancel = Cancel { carrying, process: std::process::id() };
    waited.call_method1(intern!(waited.py(), "add_done_callback"), (cancel,)).map(drop)
}

/// The loop that runs in this thread.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    GET.import(py, "asyncio", "get_running_loop")?.call0()
}

/// Ends a Python future, in its loop, unless it has ended.
fn tell(future: &Bound<'_, PyAny>, result: PyResult<Py<PyAny>>) {
    let py = future.py();
    let ended = || -> PyResult<()> {
        if future.call_method0(intern!(py, "done"))?.is_truthy()? {
            return Ok(());
        }
        match result {
            Ok(value) => future.call_method1(intern!(py, "set_result"), (value,))?,
            Err(error) => future.call_method1(intern!(py, "set_exception"), (error,))?,
        };
        Ok(())
    };
    if let Err(error) = ended() {
        error.write_unraisable(py, Some(future));
    }
}

/// Drops the Rust future when the Python future is done.
#[pyclass(frozen)]
struct Cancel {
    carrying: Carrying,
    process: u32,
}

enum Carrying {
    ByRuntime(AbortHandle),
    ByLoop(Arc<Carried>),
}

#[pymethods]
impl Cancel {
    fn __call__(&self, _future: &Bound<'_, PyAny>) {
        // A forked child has no thread that carries it, and the parent goes on with it.
        if self.process == std::process::id() {
            match &self.carrying {
                Carrying::ByRuntime(task) => task.abort(),
                Carrying::ByLoop(carried) => carried.stop(),
            }
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
