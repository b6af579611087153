//! The pool. Its processes end when it is closed, or when nobody has it any more.

use std::sync::Arc;

use gpupool_client::RequestBody;
use gpupool_dispatch::resource_pool::{LeasedGpus, ResourceConfig, ResourcePool as Pool};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use serde_json::json;
use tokio::task::spawn_blocking;

use super::carrying::Carrying;
use super::config::Wish;
use super::errors::{of_acquire, of_config};
use super::held::HeldWorker;
use crate::awaiting::{Outcome, awaitable, blocking};
use crate::carry::{Carrier, Main, Pickle};
use crate::local_agent;
use crate::memory;
use crate::owned::Owned;
use crate::values::to_python;

/// Workers that are handed out one by one.
#[pyclass(frozen, module = "gpupool._native")]
pub(crate) struct ResourcePool {
    pool: Owned<Pool>,
    carrying: Arc<Carrying>,
}

#[pymethods]
impl ResourcePool {
    /// Begins to start the workers.
    #[new]
    fn new(py: Python<'_>, wish: Wish) -> PyResult<Self> {
        // Without it, large values are sent as others are.
        let memory = memory::create().ok();
        let main = if wish.by_value { Main::ByValue } else { Main::IsKnown };
        let carrier = Carrier::new(Pickle::new(py, main)?.or_by_value(), memory.clone())?;
        let leases_gpus = wish.leases_gpus;
        let config = ResourceConfig { memory, ..wish.config()? };
        let gpus = if leases_gpus { Some(leased(py)?) } else { None };
        let config = ResourceConfig { gpus, ..config };
        // From a thread of ours: the pool's own threads take no signals then, either.
        let started = blocking(py, async move {
            let started = spawn_blocking(move || Pool::start(config)).await;
            started.map_err(|error| PyRuntimeError::new_err(error.to_string()))
        })?;
        let pool = started.map_err(|error| of_config(&error))?;
        Ok(Self { pool: Owned::new("resource pool", pool), carrying: Carrying::new(carrier) })
    }

    /// A future of the running loop that ends with a worker. The place in line is taken at the call.
    fn acquire<'py>(&self, py: Python<'py>, task_id: &str) -> PyResult<Bound<'py, PyAny>> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let carrying = Arc::clone(&self.carrying);
        awaitable(py, async move { Ok(acquiring.await) }, |py, got| {
            let worker = HeldWorker::new(got.map_err(|error| of_acquire(py, &error))?, carrying);
            Ok(Py::new(py, worker)?.into_any())
        })
    }

    /// The same, for a thread that waits.
    fn acquire_blocking(&self, py: Python<'_>, task_id: &str) -> PyResult<HeldWorker> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let got = blocking(py, async move { Ok(acquiring.await) })?;
        let held = got.map_err(|error| of_acquire(py, &error))?;
        Ok(HeldWorker::new(held, Arc::clone(&self.carrying)))
    }

    /// A future that ends when the least number of workers are set up, or says why none can be.
    fn ready<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ready = self.pool.get()?.ready();
        awaitable(py, async move { Ok(ready.await) }, |py, ready| {
            ready.map(|()| py.None()).map_err(|error| of_acquire(py, &error))
        })
    }

    /// How it stands.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let status = self.pool.get()?.status();
        to_python(
            py,
            &json!({
                "total_workers": status.total_workers,
                "ready_workers": status.available_workers,
                "active_tasks": status.active_tasks,
                "waiting_tasks": status.waiting_tasks,
                "active_task_ids": status.active_task_ids,
                "failure": status.failure,
                "clean_up_failure": status.clean_up_failure,
                "audit_failure": status.audit_failure,
            }),
        )
    }

    /// The last holds, in the order they began.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.pool.get()?.audit())
    }

    /// Ends it, begun at the call; the future ends when no process is left. A forked child ends nothing.
    fn shutdown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let over = self.pool.get().ok().map(Pool::shutdown);
        awaitable(py, until_over(over), |py, ()| Ok(py.None()))
    }

    /// The same, for a thread that waits.
    fn shutdown_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, until_over(self.pool.get().ok().map(Pool::shutdown)))
    }

    /// Ends it for good, with little patience: nobody has it any more, or the program ends. Waits without the threads that
    /// carry futures: this may be called by one of them, when it is there that Python finds that nobody has it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.pool.get().ok().map(Pool::close));
    }
}

fn leased(py: Python<'_>) -> PyResult<LeasedGpus> {
    let failed = |error| PyRuntimeError::new_err(format!("devices=\"auto\": {error}"));
    let find = async move { local_agent::find("a resource pool starts its workers").await.map_err(failed) };
    let body = RequestBody { worker_id: Some("resource_pool".into()), ..RequestBody::default() };
    Ok(LeasedGpus { agent: blocking(py, find)?, body })
}

async fn until_over(over: Option<impl Future<Output = ()>>) -> Outcome<()> {
    if let Some(over) = over {
        over.await;
    }
    Ok(())
}
