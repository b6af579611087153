//! What was granted: renewed in the background until it is given back, lost, or not referred to any more.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use gpupool_client::ClientError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::errors::exception;
use crate::awaiting::{awaitable_soon, blocking};
use crate::owned::Owned;
use crate::values::to_python;

/// GPUs that are held. What names them can be read anywhere; it is kept and given back in the process that asked for it.
#[pyclass(frozen, weakref, module = "gpupool._native")]
pub(crate) struct Lease {
    /// Taken out when it is given back.
    held: Owned<Mutex<Option<gpupool_client::Lease>>>,
    #[pyo3(get)]
    id: u64,
    #[pyo3(get)]
    worker_id: String,
    #[pyo3(get)]
    endpoint_id: String,
    #[pyo3(get)]
    gpu_ids: Vec<u32>,
    #[pyo3(get)]
    token: Option<u64>,
    /// Seconds since 1970.
    #[pyo3(get)]
    assigned_at: f64,
    granted: Arc<gpupool_api::lease::Lease>,
    devices: PyOnceLock<Py<PyAny>>,
    env: PyOnceLock<Py<PyAny>>,
}

impl Lease {
    pub(super) fn new(lease: gpupool_client::Lease) -> Self {
        Self {
            id: lease.id(),
            worker_id: lease.worker_id().to_owned(),
            endpoint_id: lease.endpoint_id().to_owned(),
            gpu_ids: lease.devices().iter().map(|device| device.gpu_id).collect(),
            token: lease.token(),
            assigned_at: lease.assigned_at().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            granted: lease.granted().clone(),
            devices: PyOnceLock::new(),
            env: PyOnceLock::new(),
            held: Owned::new("lease", Mutex::new(Some(lease))),
        }
    }

    fn take(&self) -> PyResult<Option<gpupool_client::Lease>> {
        Ok(self.held.get()?.lock().unwrap_or_else(PoisonError::into_inner).take())
    }
}

#[pymethods]
impl Lease {
    /// What it holds. Made when somebody looks.
    #[getter]
    fn devices(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let made = || to_python(py, &self.granted.devices).map(Bound::unbind);
        Ok(self.devices.get_or_try_init(py, made)?.clone_ref(py))
    }

    /// What to set in the environment of its job.
    #[getter]
    fn env(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let made = || to_python(py, &self.granted.env).map(Bound::unbind);
        Ok(self.env.get_or_try_init(py, made)?.clone_ref(py))
    }

    /// Whether it was neither given back nor lost, as far as is known here.
    #[getter]
    fn is_held(&self) -> PyResult<bool> {
        let held = self.held.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(held.as_ref().is_some_and(|lease| lease.check().is_ok()))
    }

    /// Why it is lost; `None` while it is not.
    #[getter]
    fn lost(&self) -> PyResult<Option<String>> {
        let held = self.held.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(match held.as_ref().map(gpupool_client::Lease::check) {
            Some(Err(ClientError::Stale { lost, .. })) => Some(lost.to_string()),
            _ => None,
        })
    }

    /// Raises where it is lost.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.held.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        let checked = held.as_ref().map_or(Ok(()), gpupool_client::Lease::check);
        checked.map_err(|error| exception(py, &error))
    }

    /// Gives it back. Twice is harmless.
    fn release<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let lease = self.take()?;
        awaitable_soon(py, async move { Ok(given_back(lease).await) }, |py, released| {
            released.map(|()| py.None()).map_err(|error| exception(py, &error))
        })
    }

    /// The same for a thread that blocks.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        let lease = self.take()?;
        let released = blocking(py, async move { Ok(given_back(lease).await) })?;
        released.map_err(|error| exception(py, &error))
    }
}

async fn given_back(lease: Option<gpupool_client::Lease>) -> Result<(), ClientError> {
    match lease {
        Some(lease) => lease.release().await,
        None => Ok(()),
    }
}
