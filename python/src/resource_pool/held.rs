//! A worker somebody has, until it is given back or nobody has it any more.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use gpupool_dispatch::resource_pool::{HeldWorker as Held, WorkerError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::carrying::Carrying;
use super::errors::of_worker;
use crate::awaiting::{Outcome, awaitable, blocking, running_loop};
use crate::mailbox::Mailbox;
use crate::owned::Owned;
use crate::runtime;

/// A worker somebody has.
#[pyclass(frozen, module = "gpupool._native")]
pub(crate) struct HeldWorker {
    #[pyo3(get)]
    id: u32,
    #[pyo3(get)]
    device: String,
    #[pyo3(get)]
    gpu_ids: Vec<u32>,
    #[pyo3(get)]
    pid: u32,
    /// Nothing, once it is given back. A lock only because Python shares it between threads; nobody keeps it for long.
    held: Owned<Mutex<Option<Held>>>,
    carrying: Arc<Carrying>,
}

impl HeldWorker {
    pub(super) fn new(held: Held, carrying: Arc<Carrying>) -> Self {
        let (id, device, pid) = (held.id().0, held.device().to_owned(), held.pid());
        let gpu_ids = held.gpu_ids().to_vec();
        carrying.meet(id, pid);
        Self { id, device, gpu_ids, pid, carrying, held: Owned::new("worker", Mutex::new(Some(held))) }
    }

    fn with<T>(&self, does: impl FnOnce(&Held) -> T) -> PyResult<T> {
        let held = self.held.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        let given_back = || PyRuntimeError::new_err(format!("worker {} was given back", self.id));
        held.as_ref().map(does).ok_or_else(given_back)
    }

    /// Has it work; what was lent for that is the worker's until it is over, or nobody waits for it.
    fn begin(
        &self,
        work: &Bound<'_, PyAny>,
    ) -> PyResult<impl Future<Output = Outcome<Result<Bytes, WorkerError>>> + Send + use<>> {
        let (payload, lent) = self.carrying.pack(work)?;
        let run = self.with(|held| held.run(payload))?;
        Ok(async move {
            let ran = run.await;
            drop(lent);
            Ok(ran)
        })
    }

    fn take(&self) -> Option<Held> {
        self.held.get().ok()?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl HeldWorker {
    /// Bytes of host memory it uses now, with all it started; None where it has ended.
    fn memory_usage(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        py.detach(|| self.with(Held::memory_usage))
    }

    /// Kills it, with all it started.
    fn kill(&self) -> PyResult<()> {
        self.with(Held::kill)
    }

    /// How it ended, as an exception, if it has.
    fn ended(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        Ok(self.with(Held::ended)?.map(|error| of_worker(py, &error)))
    }

    /// A future of the running loop that ends with what came of the work, to be unpacked; told to the worker at the call.
    fn run<'py>(&self, work: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let run = self.begin(work)?;
        awaitable(work.py(), run, |py, ran| Ok(answer(py, ran)?.into_any()))
    }

    /// The same, for a thread that waits.
    fn run_blocking(&self, work: &Bound<'_, PyAny>) -> PyResult<Py<PyBytes>> {
        let run = self.begin(work)?;
        answer(work.py(), blocking(work.py(), run)?)
    }

    /// The value of an answer.
    fn unpack<'py>(&self, py: Python<'py>, answer: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        self.carrying.unpack(py, answer)
    }

    /// Calls back, in the running loop, with the exception, when a limit is passed; not at all when the hold ends else.
    fn on_limit(&self, py: Python<'_>, call: Py<PyAny>) -> PyResult<()> {
        let over = self.with(Held::over)?;
        let mailbox = Mailbox::of(&running_loop(py)?)?;
        runtime::handle()?.spawn(async move {
            let how = over.await;
            if how.is_limit() {
                mailbox.post(move |py| {
                    if let Err(error) = call.call1(py, (of_worker(py, &how).into_value(py),)) {
                        error.write_unraisable(py, Some(call.bind(py)));
                    }
                });
            }
        });
        Ok(())
    }

    /// Gives it back, without waiting.
    fn give_back(&self) {
        drop(self.take());
    }

    /// Gives it back; the future ends when others can see that. What was given back before stays so.
    fn release<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let released = self.take().map(Held::release);
        awaitable(py, until_seen(released), |py, ()| Ok(py.None()))
    }

    /// The same, for a thread that waits.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, until_seen(self.take().map(Held::release)))
    }
}

async fn until_seen(released: Option<impl Future<Output = ()>>) -> Outcome<()> {
    if let Some(released) = released {
        released.await;
    }
    Ok(())
}

fn answer(py: Python<'_>, ran: Result<Bytes, WorkerError>) -> PyResult<Py<PyBytes>> {
    match ran {
        Ok(result) => Ok(PyBytes::new(py, &result).unbind()),
        Err(error) => Err(of_worker(py, &error)),
    }
}
