//! The client for Python: requests and leases.
//!
//! Each waiting call exists twice, for `asyncio` and for a blocking thread. `settings` creates a client from arguments
//! and the environment. Background tasks belong to the client and end when it is stopped or collected, or with the
//! process.

mod settings;

pub(crate) use settings::{client_settings, local_agent};

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use gpupool_api::lease::{AttachBody, RevocationAction};
use gpupool_client::{ClientError, FrequentUpdates, RequestBody, StatusUpdate};
use gpupool_confine::lock;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tokio::task::block_in_place;

use crate::asyncio_bridge::{awaitable, blocking};
use crate::conversion::{self, parse_request, to_python};
use crate::runtime::{self, ProcessCount, ProcessOwned, with_interpreter};
use settings::ClientArguments;

type ClientResult<T> = Result<T, ClientError>;

/// Client of one or several endpoints. Belongs to the process that created it.
#[pyclass(frozen, weakref, module = "gpupool._native", name = "Client")]
pub(crate) struct PyClient {
    inner: ProcessOwned<gpupool_client::Client>,
    /// Set while Python subscribes to frequent updates.
    frequent_updates: Mutex<Option<FrequentUpdates>>,
}

impl PyClient {
    fn clone_client(&self) -> PyResult<gpupool_client::Client> {
        self.inner.get().cloned()
    }
}

impl Drop for PyClient {
    fn drop(&mut self) {
        // A client that was never started has nothing to release.
        if let Ok(client) = self.inner.get()
            && client.is_started()
        {
            stop_soon(client.clone());
        }
    }
}

#[pymethods]
impl PyClient {
    #[new]
    fn new(py: Python<'_>, settings: ClientArguments) -> PyResult<Self> {
        let client = settings.into_client(py)?;
        Ok(Self { inner: ProcessOwned::new("client", client), frequent_updates: Mutex::default() })
    }

    /// Whether this process created the client.
    #[getter]
    fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    /// Whether the client was started in this process.
    #[getter]
    fn is_started(&self) -> bool {
        self.inner.get().is_ok_and(gpupool_client::Client::is_started)
    }

    /// Whether the client is configured with several endpoints.
    #[getter]
    fn is_multi_endpoint(&self) -> PyResult<bool> {
        Ok(self.inner.get()?.is_multi_endpoint_mode())
    }

    /// Finds the endpoints and starts polling them.
    fn start<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_client()?;
        client_awaitable(py, async move { client.start().await }, |py, ()| Ok(py.None()))
    }

    fn start_blocking(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.clone_client()?;
        client_blocking(py, async move { client.start().await })
    }

    /// Releases everything and ends all tasks.
    fn stop<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        client_awaitable(py, stop_client(self.clone_client()?), |py, ()| Ok(py.None()))
    }

    fn stop_blocking(&self, py: Python<'_>) -> PyResult<()> {
        client_blocking(py, stop_client(self.clone_client()?))
    }

    /// Starts to stop without waiting.
    fn stop_soon(&self) -> PyResult<()> {
        stop_soon(self.clone_client()?);
        Ok(())
    }

    /// Requests the resources in the dict and waits for them.
    fn request<'py>(&self, py: Python<'py>, wish: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        let (client, body) = (self.clone_client()?, parse_request(wish)?);
        client_awaitable(py, request_lease(client, body), |py, lease| Ok(Py::new(py, PyLease::new(lease))?.into_any()))
    }

    fn request_blocking(&self, py: Python<'_>, wish: &Bound<'_, PyDict>) -> PyResult<PyLease> {
        let (client, body) = (self.clone_client()?, parse_request(wish)?);
        client_blocking(py, request_lease(client, body)).map(PyLease::new)
    }

    /// Polls an endpoint now, regardless of its circuit breaker.
    fn trigger_endpoint_recovery<'py>(&self, py: Python<'py>, endpoint_id: String) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_client()?;
        let recovered = async move { client.trigger_endpoint_recovery(&endpoint_id).await };
        client_awaitable(py, recovered, |py, is_known| Ok(is_known.into_pyobject(py)?.to_owned().into_any().unbind()))
    }

    /// Waits until an endpoint is healthy; returns at once if one is.
    fn until_healthy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.clone_client()?;
        let healthy = async move { client.queue_request_for_retry(|| async { Ok(()) }).await };
        client_awaitable(py, healthy, |py, ()| Ok(py.None()))
    }

    fn pool_status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact_to_python(py, self.inner.get()?.pool_status())
    }

    fn detailed_metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact_to_python(py, self.inner.get()?.detailed_metrics())
    }

    fn endpoints_info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact_to_python(py, self.inner.get()?.endpoints_info())
    }

    fn health<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact_to_python(py, self.inner.get()?.health())
    }

    fn error_recovery_status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        fact_to_python(py, self.inner.get()?.error_recovery_status())
    }

    /// Returns the error recovery status as a short report.
    fn error_recovery_summary(&self, py: Python<'_>) -> PyResult<String> {
        let status = self.inner.get()?.error_recovery_status();
        status.map(|status| status.to_string()).map_err(|error| exception(py, &error))
    }

    /// Calls a function with each update, in one of our threads, until the client is gone.
    fn follow(&self, sink: Py<PyAny>) -> PyResult<()> {
        follow(self.inner.get()?, sink)
    }

    /// Sets whether frequent updates are reported, too: statistics, and actions of this program.
    fn set_wants_all(&self, wants_all: bool) -> PyResult<()> {
        let frequent_updates =
            wants_all.then(|| self.inner.get().map(gpupool_client::Client::enable_frequent_updates)).transpose()?;
        *lock(&self.frequent_updates) = frequent_updates;
        Ok(())
    }
}

fn request_lease(
    client: gpupool_client::Client,
    body: RequestBody,
) -> impl Future<Output = ClientResult<gpupool_client::HeldLease>> + Send + use<> {
    // Called now, so that requests keep the order of the calls; polling may start in another order. Boxed because the
    // future is large and moved several times.
    let request = Box::pin(client.request(body));
    async move {
        let lease = request.await?;
        attach_process(&client, &lease).await;
        Ok(lease)
    }
}

/// Attaches this process to the lease. Over a Unix socket the agent notices the end of this process at once; otherwise
/// the lease ends with its ttl.
async fn attach_process(client: &gpupool_client::Client, lease: &gpupool_client::HeldLease) {
    let Some(agent) = client.endpoint(lease.endpoint_id()).filter(|agent| agent.endpoint().socket().is_some()) else {
        return;
    };
    if let Some(token) = lease.token() {
        // Python is notified of a lost lease and not killed for it: it may hold others.
        let body = AttachBody { token, on_revocation: RevocationAction::EndJobs, ..AttachBody::default() };
        let _ = agent.attach(lease.id(), &body).await;
    }
}

async fn stop_client(client: gpupool_client::Client) -> ClientResult<()> {
    client.stop().await;
    Ok(())
}

/// Creates a future of the running loop for a client call, with errors as exceptions.
fn client_awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = ClientResult<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    awaitable(py, future, |py, answer| finish(py, answer.map_err(|error| exception(py, &error))?))
}

fn client_blocking<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = ClientResult<T>> + Send + 'static,
) -> PyResult<T> {
    blocking(py, future)?.map_err(|error| exception(py, &error))
}

fn fact_to_python<'py>(py: Python<'py>, fact: ClientResult<impl serde::Serialize>) -> PyResult<Bound<'py, PyAny>> {
    match fact {
        Ok(fact) => to_python(py, &fact),
        Err(error) => Err(exception(py, &error)),
    }
}

// Leases: renewed in the background until released, lost, or no longer referenced.

/// A lease of GPUs. Its description can be read in any process; only the process that requested it can release it.
#[pyclass(frozen, weakref, module = "gpupool._native", name = "Lease")]
pub(crate) struct PyLease {
    /// Empty once the lease is released.
    held: ProcessOwned<Mutex<Option<gpupool_client::HeldLease>>>,
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
    granted: Arc<gpupool_api::lease::LeaseBody>,
    devices: PyOnceLock<Py<PyAny>>,
    env: PyOnceLock<Py<PyAny>>,
}

impl PyLease {
    fn new(lease: gpupool_client::HeldLease) -> Self {
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
            held: ProcessOwned::new("lease", Mutex::new(Some(lease))),
        }
    }

    fn take(&self) -> PyResult<Option<gpupool_client::HeldLease>> {
        Ok(self.lock()?.take())
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Option<gpupool_client::HeldLease>>> {
        self.held.get().map(lock)
    }
}

#[pymethods]
impl PyLease {
    /// Returns the devices, converted at the first call.
    #[getter]
    fn devices(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let made = || to_python(py, &self.granted.devices).map(Bound::unbind);
        Ok(self.devices.get_or_try_init(py, made)?.clone_ref(py))
    }

    /// Returns the environment variables for its job, converted at the first call.
    #[getter]
    fn env(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let made = || to_python(py, &self.granted.env).map(Bound::unbind);
        Ok(self.env.get_or_try_init(py, made)?.clone_ref(py))
    }

    /// Whether the lease is neither released nor lost, as far as known.
    #[getter]
    fn is_held(&self) -> PyResult<bool> {
        Ok(self.lock()?.as_ref().is_some_and(|lease| lease.check_held().is_ok()))
    }

    /// Returns the reason of the loss; `None` if the lease is not lost.
    #[getter]
    fn lost(&self) -> PyResult<Option<String>> {
        Ok(match self.lock()?.as_ref().map(gpupool_client::HeldLease::check_held) {
            Some(Err(ClientError::Stale { lost, .. })) => Some(lost.to_string()),
            _ => None,
        })
    }

    /// Raises an exception if the lease is lost.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = self.lock()?.as_ref().map_or(Ok(()), gpupool_client::HeldLease::check_held);
        checked.map_err(|error| exception(py, &error))
    }

    /// Releases the lease. A second call does nothing.
    fn release<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        client_awaitable(py, release_lease(self.take()?), |py, ()| Ok(py.None()))
    }

    /// Releases the lease and blocks until done.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        client_blocking(py, release_lease(self.take()?))
    }
}

async fn release_lease(lease: Option<gpupool_client::HeldLease>) -> Result<(), ClientError> {
    match lease {
        Some(lease) => lease.release().await,
        None => Ok(()),
    }
}

// Updates of a client for a Python function, delivered by a task that ends with the client.

/// Calls `sink` with each update as a dict, in one of our threads; frequent updates arrive only if requested.
fn follow(client: &gpupool_client::Client, sink: Py<PyAny>) -> PyResult<()> {
    let mut updates = client.infrequent_updates();
    runtime::handle()?.spawn(async move {
        while let Some(update) = updates.next().await {
            // The interpreter may be held for long; other work of this thread must not wait for it.
            if block_in_place(|| with_interpreter(|py| deliver_update(py, &sink, &update))).is_none() {
                return;
            }
        }
    });
    Ok(())
}

fn deliver_update(py: Python<'_>, sink: &Py<PyAny>, update: &StatusUpdate) {
    let delivered = to_python(py, update).and_then(|update| sink.call1(py, (update,)));
    if let Err(error) = delivered {
        error.write_unraisable(py, Some(sink.bind(py)));
    }
}

// Clients without references: they release their leases in the background, and the interpreter waits for that at its
// exit.

/// Number of clients that are stopping.
static ENDING_CLIENTS: ProcessCount = ProcessCount::new();

/// Interval at which the exit checks for stopping clients.
const ENDING_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Stops a client in the background.
fn stop_soon(client: gpupool_client::Client) {
    let Ok(handle) = runtime::handle() else { return };
    let ending = ENDING_CLIENTS.enter();
    handle.spawn(async move {
        client.stop().await;
        drop(ending);
    });
}

/// Waits until all background releases are done.
#[pyfunction]
pub(crate) fn wait_for_ending(py: Python<'_>) -> PyResult<()> {
    if ENDING_CLIENTS.get() == 0 {
        return Ok(());
    }
    // Stopping has its own timeout, so this ends.
    blocking(py, async {
        while ENDING_CLIENTS.get() > 0 {
            tokio::time::sleep(ENDING_POLL_INTERVAL).await;
        }
    })
}

// Errors as exceptions of `gpupool.errors`, with the client's messages.

/// Converts an error to its exception.
fn exception(py: Python<'_>, error: &ClientError) -> PyErr {
    let raised = conversion::exception(py, "gpupool.errors", exception_class(error), error.to_string());
    let attributes = || -> PyResult<()> {
        if let Some(code) = error.code() {
            raised.value(py).setattr("code", code)?;
        }
        if let ClientError::WaitedTooLong { worker_id, .. } | ClientError::Stale { worker_id, .. } = error {
            raised.value(py).setattr("worker_id", worker_id)?;
        }
        Ok(())
    };
    attributes().err().unwrap_or(raised)
}

/// Returns the name of the exception class, by what a program can do about the error.
fn exception_class(error: &ClientError) -> &'static str {
    match error {
        ClientError::InvalidEndpoint { .. } | ClientError::Setting { .. } | ClientError::Configuration(_) => {
            "ConfigurationError"
        }
        ClientError::AlreadyStarted | ClientError::NotStarted { .. } => "ClientStateError",
        ClientError::WaitedTooLong { .. } => "WorkerTimeoutError",
        ClientError::Stale { .. } => "StaleAssignmentError",
        ClientError::BreakerOpen { .. } => "CircuitBreakerOpenError",
        ClientError::NeverGranted { .. } => "InvalidAssignmentError",
        ClientError::Problem(problem) => match (problem.code.as_str(), problem.status) {
            ("no_capacity", _) => "NoCapacityError",
            (_, 401 | 403) => "NotAllowedError",
            (_, 429 | 500..) => "ServiceUnavailableError",
            _ => "RequestRefusedError",
        },
        ClientError::Ended(_) => "RequestRefusedError",
        _ => "ServiceUnavailableError",
    }
}
