//! The client in Python's hands: asking for GPUs and keeping what was granted.
//!
//! Each call that waits comes twice, for `asyncio` and for a thread that blocks. `setup` makes a client from arguments and the
//! environment. Tasks in the background belong to the client and end when it is stopped, collected, or with the process.

mod setup;

pub(crate) use setup::{client_settings, local_agent};

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use gpupool_api::lease::{AttachBody, RevocationAction};
use gpupool_client::{ClientError, FrequentUpdates, RequestBody, StatusUpdate};
use gpupool_confine::lock;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tokio::task::block_in_place;

use crate::awaiting::{awaitable, blocking};
use crate::runtime::{self, Owned, ProcessCount, attached};
use crate::values::{self, request, to_python};
use setup::Settings;

type Answer<T> = Result<T, ClientError>;

/// Asks one or many endpoints for GPUs. Belongs to the process that made it.
#[pyclass(frozen, weakref, module = "gpupool._native")]
pub(crate) struct Client {
    inner: Owned<gpupool_client::Client>,
    /// There while somebody subscribed.
    frequent_updates: Mutex<Option<FrequentUpdates>>,
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
        Ok(Self { inner: Owned::new("client", client), frequent_updates: Mutex::default() })
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
        answered(py, stopped(self.clone_of()?), |py, ()| Ok(py.None()))
    }

    fn stop_blocking(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, stopped(self.clone_of()?))
    }

    /// Begins to stop, and does not wait for it.
    fn stop_soon(&self) -> PyResult<()> {
        stop_soon(self.clone_of()?);
        Ok(())
    }

    /// Asks for what the dict says, and waits for it.
    fn request<'py>(&self, py: Python<'py>, wish: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        let (client, body) = (self.clone_of()?, request(wish)?);
        answered(py, taken(client, body), |py, lease| Ok(Py::new(py, Lease::new(lease))?.into_any()))
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
        let frequent_updates =
            wants_all.then(|| self.inner.get().map(gpupool_client::Client::enable_frequent_updates)).transpose()?;
        *lock(&self.frequent_updates) = frequent_updates;
        Ok(())
    }
}

fn taken(
    client: gpupool_client::Client,
    body: RequestBody,
) -> impl Future<Output = Answer<gpupool_client::HeldLease>> + Send + use<> {
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
async fn tie(client: &gpupool_client::Client, lease: &gpupool_client::HeldLease) {
    let Some(agent) = client.endpoint(lease.endpoint_id()).filter(|agent| agent.endpoint().socket().is_some()) else {
        return;
    };
    if let Some(token) = lease.token() {
        // Python is told that a lease is lost, and not killed for it: it may hold others.
        let body = AttachBody { token, on_revocation: RevocationAction::EndJobs, ..AttachBody::default() };
        let _ = agent.attach(lease.id(), &body).await;
    }
}

async fn stopped(client: gpupool_client::Client) -> Answer<()> {
    client.stop().await;
    Ok(())
}

/// A future of the running loop that ends with the answer as a Python value, or with an exception.
fn answered<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = Answer<T>> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    awaitable(py, future, |py, answer| finish(py, answer.map_err(|error| exception(py, &error))?))
}

fn wait<T: Send + 'static>(py: Python<'_>, future: impl Future<Output = Answer<T>> + Send + 'static) -> PyResult<T> {
    blocking(py, future)?.map_err(|error| exception(py, &error))
}

fn fact<'py>(py: Python<'py>, fact: Answer<impl serde::Serialize>) -> PyResult<Bound<'py, PyAny>> {
    match fact {
        Ok(fact) => to_python(py, &fact),
        Err(error) => Err(exception(py, &error)),
    }
}

// What was granted: renewed in the background until it is given back, lost, or not referred to any more.

/// GPUs that are held. What names them can be read anywhere; it is kept and given back in the process that asked for it.
#[pyclass(frozen, weakref, module = "gpupool._native")]
pub(crate) struct Lease {
    /// Taken out when it is given back.
    held: Owned<Mutex<Option<gpupool_client::HeldLease>>>,
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

impl Lease {
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
            held: Owned::new("lease", Mutex::new(Some(lease))),
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
        Ok(self.lock()?.as_ref().is_some_and(|lease| lease.check_held().is_ok()))
    }

    /// Why it is lost; `None` while it is not.
    #[getter]
    fn lost(&self) -> PyResult<Option<String>> {
        Ok(match self.lock()?.as_ref().map(gpupool_client::HeldLease::check_held) {
            Some(Err(ClientError::Stale { lost, .. })) => Some(lost.to_string()),
            _ => None,
        })
    }

    /// Raises where it is lost.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = self.lock()?.as_ref().map_or(Ok(()), gpupool_client::HeldLease::check_held);
        checked.map_err(|error| exception(py, &error))
    }

    /// Gives it back. Twice is harmless.
    fn release<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        answered(py, given_back(self.take()?), |py, ()| Ok(py.None()))
    }

    /// The same for a thread that blocks.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, given_back(self.take()?))
    }
}

async fn given_back(lease: Option<gpupool_client::HeldLease>) -> Result<(), ClientError> {
    match lease {
        Some(lease) => lease.release().await,
        None => Ok(()),
    }
}

// What happens to a client, told to a Python function by a task that ends with the client.

/// Calls `sink` with each update as a dict, in a thread of ours; with those that come often only while somebody wants them.
fn follow(client: &gpupool_client::Client, sink: Py<PyAny>) -> PyResult<()> {
    let mut updates = client.infrequent_updates();
    runtime::handle()?.spawn(async move {
        while let Some(update) = updates.next().await {
            // Who holds the interpreter may hold it for long; what else runs on this thread must not wait for it.
            if block_in_place(|| attached(|py| tell(py, &sink, &update))).is_none() {
                return;
            }
        }
    });
    Ok(())
}

fn tell(py: Python<'_>, sink: &Py<PyAny>, update: &StatusUpdate) {
    let told = to_python(py, update).and_then(|update| sink.call1(py, (update,)));
    if let Err(error) = told {
        error.write_unraisable(py, Some(sink.bind(py)));
    }
}

// Clients that nobody refers to any more: they give back what they hold in the background, and the end of the interpreter
// waits for it.

/// How many clients are ending.
static ENDING: ProcessCount = ProcessCount::new();

/// How often the end of the interpreter looks whether all have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Stops a client in the background.
fn stop_soon(client: gpupool_client::Client) {
    let Ok(handle) = runtime::handle() else { return };
    let ending = ENDING.enter();
    handle.spawn(async move {
        client.stop().await;
        drop(ending);
    });
}

/// Waits until what is given back in the background has been.
#[pyfunction]
pub(crate) fn wait_for_ending(py: Python<'_>) -> PyResult<()> {
    if ENDING.get() == 0 {
        return Ok(());
    }
    // Stopping has a limit of its own, so this ends.
    blocking(py, async {
        while ENDING.get() > 0 {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
}

// What went wrong, as the exceptions of `gpupool.errors`, with the words of the client.

/// The exception for an error.
fn exception(py: Python<'_>, error: &ClientError) -> PyErr {
    let raised = values::exception(py, "gpupool.errors", class_of(error), error.to_string());
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

/// The name of a class, by what a program can do about the error.
fn class_of(error: &ClientError) -> &'static str {
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
