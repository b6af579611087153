//! The client itself: each call that waits comes twice, for `asyncio` and for a thread that blocks.

use std::sync::{Mutex, PoisonError};

use gpupool_api::lease::{AttachBody, IfTaken};
use gpupool_client::{ClientError, Everything, RequestBody};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::ending::stop_soon;
use super::errors::exception;
use super::follow::follow;
use super::lease::Lease;
use super::setup::Settings;
use super::wish::request;
use crate::awaiting::{awaitable, awaitable_soon, blocking};
use crate::owned::Owned;
use crate::values::to_python;

type Answer<T> = Result<T, ClientError>;

/// Asks one or many endpoints for GPUs. Belongs to the process that made it.
#[pyclass(frozen, weakref, module = "gpupool._native")]
pub(crate) struct Client {
    inner: Owned<gpupool_client::Client>,
    /// There while somebody subscribed.
    everything: Mutex<Option<Everything>>,
}

impl Client {
    fn clone_of(&self) -> PyResult<gpupool_client::Client> {
        self.inner.get().cloned()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A client that was never started has nothing to give back.
        if let Ok(client) = self.inner.get()
            && client.is_started()
        {
            stop_soon(client.clone());
        }
    }
}

#[pymethods]
impl Client {
    #[new]
    fn new(py: Python<'_>, settings: Settings) -> PyResult<Self> {
        let client = settings.client(py)?;
        Ok(Self { inner: Owned::new("client", client), everything: Mutex::default() })
    }

    /// Whether this process made it.
    #[getter]
    fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    /// Whether it was started, in this process.
    #[getter]
    fn is_started(&self) -> bool {
        self.inner.get().is_ok_and(gpupool_client::Client::is_started)
    }

    /// Whether it was told of several endpoints.
    #[getter]
    fn is_multi_endpoint(&self) -> PyResult<bool> {
        Ok(self.inner.get()?.is_multi_endpoint_mode())
    }

    /// Looks for the endpoints and begins to watch them.
    fn start<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_of()?;
        answered(py, async move { client.start().await }, |py, ()| Ok(py.None()))
    }

    fn start_blocking(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.clone_of()?;
        wait(py, async move { client.start().await })
    }

    /// Gives back everything and ends all tasks.
    fn stop<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_of()?;
        answered(py, async move { stopped(client).await }, |py, ()| Ok(py.None()))
    }

    fn stop_blocking(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.clone_of()?;
        wait(py, stopped(client))
    }

    /// Begins to stop, and does not wait for it.
    fn stop_soon(&self) -> PyResult<()> {
        stop_soon(self.clone_of()?);
        Ok(())
    }

    /// Asks for what the dict says, and waits for it.
    fn request<'py>(&self, py: Python<'py>, wish: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        let (client, body) = (self.clone_of()?, request(wish)?);
        answered_soon(py, taken(client, body), |py, lease| Ok(Py::new(py, Lease::new(lease))?.into_any()))
    }

    fn request_blocking(&self, py: Python<'_>, wish: &Bound<'_, PyDict>) -> PyResult<Lease> {
        let (client, body) = (self.clone_of()?, request(wish)?);
        wait(py, taken(client, body)).map(Lease::new)
    }

    /// Looks at an endpoint now, whatever its breaker says.
    fn trigger_endpoint_recovery<'py>(&self, py: Python<'py>, endpoint_id: String) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_of()?;
        let looked = async move { client.trigger_endpoint_recovery(&endpoint_id).await };
        answered(py, looked, |py, is_known| Ok(is_known.into_pyobject(py)?.to_owned().into_any().unbind()))
    }

    /// Waits until any endpoint can be asked; at once where one can.
    fn until_healthy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_of()?;
        let healthy = async move { client.queue_request_for_retry(|| async { Ok(()) }).await };
        answered(py, healthy, |py, ()| Ok(py.None()))
    }

    fn pool_status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact(py, self.inner.get()?.pool_status())
    }

    fn detailed_metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact(py, self.inner.get()?.detailed_metrics())
    }

    fn endpoints_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact(py, self.inner.get()?.endpoints_info())
    }

    fn health<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact(py, self.inner.get()?.health())
    }

    fn error_recovery_status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact(py, self.inner.get()?.error_recovery_status())
    }

    /// The same as a short report.
    fn error_recovery_summary(&self, py: Python<'_>) -> PyResult<String> {
        let status = self.inner.get()?.error_recovery_status();
        status.map(|status| status.to_string()).map_err(|error| exception(py, &error))
    }

    /// Calls a function with what happens, in a thread of ours, until the client is gone.
    fn follow(&self, sink: Py<PyAny>) -> PyResult<()> {
        follow(self.inner.get()?, sink)
    }

    /// Whether what comes often is told as well: statistics, and what this program did itself.
    fn set_wants_all(&self, wants_all: bool) -> PyResult<()> {
        let everything = wants_all.then(|| self.inner.get().map(gpupool_client::Client::everything)).transpose()?;
        *self.everything.lock().unwrap_or_else(PoisonError::into_inner) = everything;
        Ok(())
    }
}

fn taken(
    client: gpupool_client::Client,
    body: RequestBody,
) -> impl Future<Output = Answer<gpupool_client::Lease>> + Send + use<> {
    // Asked for now, in the order of the calls; what carries it may begin it in another. In a box, because it is large and on
    // its way to its place is moved several times.
    let asked = Box::pin(client.request(body));
    async move {
        let lease = asked.await?;
        tie(&client, &lease).await;
        Ok(lease)
    }
}

/// Over a Unix socket the agent sees the end of this process, so that nothing has to run out first. Where that does not
/// work the lease still ends with its ttl.
async fn tie(client: &gpupool_client::Client, lease: &gpupool_client::Lease) {
    let Some(agent) = client.endpoint(lease.endpoint_id()).filter(|agent| agent.endpoint().socket().is_some()) else {
        return;
    };
    if let Some(token) = lease.token() {
        // Python is told that a lease is lost, and not killed for it: it may hold others.
        let body = AttachBody { token, if_taken: IfTaken::EndJobs, ..AttachBody::default() };
        let _ = agent.attach(lease.id(), &body).await;
    }
}

async fn stopped(client: gpupool_client::Client) -> Answer<()> {
    client.stop().await;
    Ok(())
}

fn answered<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = Answer<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    awaitable(py, async move { Ok(future.await) }, or_raised(finish))
}

/// The same for what most often takes no longer than its question.
fn answered_soon<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = Answer<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    awaitable_soon(py, async move { Ok(future.await) }, or_raised(finish))
}

/// Makes an answer a Python value, or an exception.
fn or_raised<T>(
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>>,
) -> impl FnOnce(Python<'_>, Answer<T>) -> PyResult<Py<PyAny>> {
    |py, answer| match answer {
        Ok(value) => finish(py, value),
        Err(error) => Err(exception(py, &error)),
    }
}

fn wait<T: Send + 'static>(py: Python<'_>, future: impl Future<Output = Answer<T>> + Send + 'static) -> PyResult<T> {
    blocking(py, async move { Ok(future.await) })?.map_err(|error| exception(py, &error))
}

fn fact<'py>(py: Python<'py>, fact: Answer<impl serde::Serialize>) -> PyResult<Bound<'py, PyAny>> {
    match fact {
        Ok(fact) => to_python(py, &fact),
        Err(error) => Err(exception(py, &error)),
    }
}
