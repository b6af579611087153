//! Resource pools for Python: callers acquire workers one by one, each with limits while it is held.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use gpupool_client::RequestBody;
use gpupool_confine::lock;
use gpupool_dispatch::WorkerProgram;
use gpupool_dispatch::resource_pool::{
    AcquireError, GpuLeaseConfig, HeldWorker, HeldWorkerError, MAX_DURATION, ResourcePool, ResourcePoolConfig,
    ResourcePoolError, WorkerDevice,
};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::task::spawn_blocking;

use crate::asyncio_bridge::{LoopMailbox, awaitable, blocking};
use crate::client::local_agent;
use crate::conversion::{exception, to_python};
use crate::runtime::ProcessOwned;
use crate::shared_memory::LentSlot;
use crate::value_codec::{MainModuleMode, PackedValue, Pickler, ValueCodec};
use crate::{runtime, shared_memory};

// The pool. Its processes end when it is closed or no longer referenced.

/// Pool of workers that callers acquire one by one.
#[pyclass(frozen, module = "gpupool._native", name = "ResourcePool")]
pub(crate) struct PyResourcePool {
    pool: ProcessOwned<ResourcePool>,
    worker_codec: Arc<WorkerCodec>,
}

#[pymethods]
impl PyResourcePool {
    /// Starts the workers.
    #[new]
    fn new(py: Python<'_>, wish: ResourcePoolSettings) -> PyResult<Self> {
        // Without shared memory, large values are sent like others.
        let memory = shared_memory::create().ok();
        let main = if wish.by_value { MainModuleMode::ByValue } else { MainModuleMode::Known };
        let codec = ValueCodec::new(Pickler::new(py, main)?.or_by_value(), memory.clone())?;
        let leases_gpus = wish.leases_gpus;
        let mut config = ResourcePoolConfig { memory, ..wish.config()? };
        config.gpus = if leases_gpus { Some(gpu_lease_config(py)?) } else { None };
        // From one of our threads, so that the pool's own threads block signals too.
        let started = blocking(py, async move { spawn_blocking(move || ResourcePool::start(config)).await })?;
        let started = started.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let pool = started.map_err(|error| config_exception(&error))?;
        Ok(Self {
            pool: ProcessOwned::new("resource pool", pool),
            worker_codec: Arc::new(WorkerCodec { codec, processes: Mutex::default() }),
        })
    }

    /// Returns a future of the running loop for a worker. The queue position is taken at the call.
    fn acquire<'py>(&self, py: Python<'py>, task_id: &str) -> PyResult<Bound<'py, PyAny>> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let worker_codec = Arc::clone(&self.worker_codec);
        awaitable(py, acquiring, |py, got| {
            let worker = PyHeldWorker::new(got.map_err(|error| acquire_exception(py, &error))?, worker_codec);
            Ok(Py::new(py, worker)?.into_any())
        })
    }

    /// Acquires a worker and blocks until then.
    fn acquire_blocking(&self, py: Python<'_>, task_id: &str) -> PyResult<PyHeldWorker> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let held = blocking(py, acquiring)?.map_err(|error| acquire_exception(py, &error))?;
        Ok(PyHeldWorker::new(held, Arc::clone(&self.worker_codec)))
    }

    /// Returns a future that ends when the minimum number of workers is set up, or fails with the reason.
    fn ready<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        awaitable(py, self.pool.get()?.wait_until_ready(), |py, ready| {
            ready.map(|()| py.None()).map_err(|error| acquire_exception(py, &error))
        })
    }

    /// Returns the pool's status.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.pool.get()?.status())
    }

    /// Returns the latest audit entries, in the order of their start.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.pool.get()?.audit_entries())
    }

    /// Starts the shutdown; the future ends when no process is left. Does nothing in a forked child.
    fn shutdown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let over = self.pool.get().ok().map(ResourcePool::shutdown);
        awaitable(py, OptionFuture::from(over), |py, _| Ok(py.None()))
    }

    /// Shuts the pool down and blocks until then.
    fn shutdown_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, OptionFuture::from(self.pool.get().ok().map(ResourcePool::shutdown))).map(drop)
    }

    /// Closes the pool with short timeouts, when it is no longer referenced or the program ends. Waits without the
    /// runtime's threads, because one of them may make this call when it drops the last reference.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.pool.get().ok().map(ResourcePool::close));
    }
}

fn gpu_lease_config(py: Python<'_>) -> PyResult<GpuLeaseConfig> {
    let failed = |error| PyRuntimeError::new_err(format!("devices=\"auto\": {error}"));
    let agent = blocking(py, local_agent("a resource pool starts its workers"))?.map_err(failed)?;
    let body = RequestBody { worker_id: Some("resource_pool".into()), ..RequestBody::default() };
    Ok(GpuLeaseConfig { agent, body })
}

// A worker held until it is released or no longer referenced.

/// A held worker.
#[pyclass(frozen, module = "gpupool._native", name = "HeldWorker")]
pub(crate) struct PyHeldWorker {
    #[pyo3(get)]
    id: u32,
    #[pyo3(get)]
    device: String,
    #[pyo3(get)]
    gpu_ids: Vec<u32>,
    #[pyo3(get)]
    pid: u32,
    /// Empty once released. Locked only because Python shares it between threads, and never for long.
    held: ProcessOwned<Mutex<Option<HeldWorker>>>,
    worker_codec: Arc<WorkerCodec>,
}

impl PyHeldWorker {
    fn new(held: HeldWorker, worker_codec: Arc<WorkerCodec>) -> Self {
        let (id, device, pid) = (held.id().0, held.device().to_owned(), held.pid());
        let gpu_ids = held.gpu_ids().to_vec();
        worker_codec.register_process(id, pid);
        Self { id, device, gpu_ids, pid, worker_codec, held: ProcessOwned::new("worker", Mutex::new(Some(held))) }
    }

    fn with_worker<T>(&self, does: impl FnOnce(&HeldWorker) -> T) -> PyResult<T> {
        let held = lock(self.held.get()?);
        let released = || PyRuntimeError::new_err(format!("worker {} was released", self.id));
        held.as_ref().map(does).ok_or_else(released)
    }

    /// Starts a call of the worker; its lent memory belongs to the worker until the call ends or is abandoned.
    fn start_run(
        &self,
        work: &Bound<'_, PyAny>,
    ) -> PyResult<impl Future<Output = Result<Bytes, HeldWorkerError>> + Send + use<>> {
        let PackedValue { payload, lent } = self.worker_codec.codec.pack(work)?;
        let lent = CallLoan { worker_codec: Arc::clone(&self.worker_codec), lent };
        let run = self.with_worker(|held| held.run(payload))?;
        Ok(async move {
            let ran = run.await;
            drop(lent);
            ran
        })
    }

    fn take(&self) -> Option<HeldWorker> {
        lock(self.held.get().ok()?).take()
    }
}

#[pymethods]
impl PyHeldWorker {
    /// Returns the bytes of host memory that the worker and its descendants use; `None` after its end.
    fn memory_usage(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        py.detach(|| self.with_worker(HeldWorker::memory_usage))
    }

    /// Kills the worker and its descendants.
    fn kill(&self) -> PyResult<()> {
        self.with_worker(HeldWorker::kill)
    }

    /// Returns the end of the worker as an exception, if it has ended.
    fn ended(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        Ok(self.with_worker(HeldWorker::ended)?.map(|error| worker_exception(py, &error)))
    }

    /// Returns a future of the running loop for the packed result; the call is sent at once.
    fn run<'py>(&self, work: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let run = self.start_run(work)?;
        awaitable(work.py(), run, |py, ran| Ok(result_bytes(py, ran)?.into_any()))
    }

    /// Runs a call and blocks until its result arrives.
    fn run_blocking(&self, work: &Bound<'_, PyAny>) -> PyResult<Py<PyBytes>> {
        let run = self.start_run(work)?;
        result_bytes(work.py(), blocking(work.py(), run)?)
    }

    /// Unpacks a result.
    fn unpack<'py>(&self, py: Python<'py>, answer: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        self.worker_codec.codec.unpack(py, answer)
    }

    /// Calls back in the running loop with the exception when a limit is exceeded; not for any other end.
    fn on_limit(&self, py: Python<'_>, call: Py<PyAny>) -> PyResult<()> {
        let over = self.with_worker(HeldWorker::wait_until_ended)?;
        let mailbox = LoopMailbox::of_running_loop(py)?;
        // Ends when the worker is no longer held.
        runtime::handle()?.spawn(async move {
            let how = over.await;
            if how.is_limit() {
                mailbox.post(move |py| {
                    if let Err(error) = call.call1(py, (worker_exception(py, &how).into_value(py),)) {
                        error.write_unraisable(py, Some(call.bind(py)));
                    }
                });
            }
        });
        Ok(())
    }

    /// Releases the worker without waiting.
    fn give_back(&self) {
        drop(self.take());
    }

    /// Releases the worker; the future ends when other callers can see that. A second call does nothing.
    fn release<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let released = self.take().map(HeldWorker::release);
        awaitable(py, OptionFuture::from(released), |py, _| Ok(py.None()))
    }

    /// Releases the worker and blocks until done.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, OptionFuture::from(self.take().map(HeldWorker::release))).map(drop)
    }
}

fn result_bytes(py: Python<'_>, ran: Result<Bytes, HeldWorkerError>) -> PyResult<Py<PyBytes>> {
    match ran {
        Ok(result) => Ok(PyBytes::new(py, &result).unbind()),
        Err(error) => Err(worker_exception(py, &error)),
    }
}

// Calls and results of workers: Python values, the large ones in shared memory.

/// Codec for all workers of a pool.
#[derive(Debug)]
struct WorkerCodec {
    codec: ValueCodec,
    /// Latest known process of each worker.
    processes: Mutex<HashMap<u32, u32>>,
}

/// Memory lent for a call; cancelled, if not borrowed, when the call ends or is abandoned.
#[derive(Debug)]
struct CallLoan {
    worker_codec: Arc<WorkerCodec>,
    lent: Vec<LentSlot>,
}

impl WorkerCodec {
    /// Records the process of an acquired worker. If the worker had another process before, that one is gone, and its
    /// borrowed slots are reclaimed.
    pub fn register_process(&self, worker: u32, process: u32) {
        let before = lock(&self.processes).insert(worker, process);
        if before.is_some_and(|before| before != process) {
            // Its own values stay: a result may not be unpacked yet.
            self.codec.reclaim();
        }
    }
}

impl Drop for CallLoan {
    fn drop(&mut self) {
        self.worker_codec.codec.release_untaken(&self.lent);
    }
}

// Settings of a pool from Python.

/// Fields of a dict. The Python package validates them; here they are only bounded.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ResourcePoolSettings {
    program: Vec<String>,
    /// JSON text.
    settings: String,
    helper: PathBuf,
    /// Whether definitions in `__main__` are pickled by value.
    pub by_value: bool,
    max_workers: u32,
    min_workers: u32,
    worker_timeout_secs: f64,
    worker_memory_bytes: Option<u64>,
    worker_processes: Option<u64>,
    worker_cpu_secs: Option<f64>,
    devices: Vec<String>,
    /// Whether each worker leases a GPU instead.
    pub leases_gpus: bool,
    acquire_timeout_secs: f64,
    idle_secs: f64,
    setup_timeout_secs: f64,
    clean_up_timeout_secs: f64,
    audit_file: Option<PathBuf>,
}

impl ResourcePoolSettings {
    pub fn config(self) -> PyResult<ResourcePoolConfig> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program is empty"))?;
        let program = WorkerProgram::native(program).args(arguments);
        let timeout = seconds("worker_timeout_secs", self.worker_timeout_secs)?;
        let cpu_time = self.worker_cpu_secs.map(|secs| seconds("worker_cpu_secs", secs)).transpose()?;
        let settings =
            serde_json::from_str(&self.settings).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(ResourcePoolConfig {
            min_workers: self.min_workers,
            worker_memory: self.worker_memory_bytes,
            worker_processes: self.worker_processes,
            worker_cpu_time: cpu_time,
            devices: self.devices.into_iter().map(WorkerDevice::new).collect(),
            acquire_patience: seconds("acquire_timeout_secs", self.acquire_timeout_secs)?,
            idle_time: seconds("idle_secs", self.idle_secs)?,
            setup_timeout: seconds("setup_timeout_secs", self.setup_timeout_secs)?,
            clean_up_timeout: seconds("clean_up_timeout_secs", self.clean_up_timeout_secs)?,
            settings,
            audit: self.audit_file,
            helper: Some(self.helper),
            ..ResourcePoolConfig::new(program, self.max_workers, timeout)
        })
    }
}

fn seconds(field: &str, value: f64) -> PyResult<Duration> {
    let most = MAX_DURATION.as_secs();
    let time = Duration::try_from_secs_f64(value).ok().filter(|time| *time <= MAX_DURATION);
    time.ok_or_else(|| PyValueError::new_err(format!("{field} must be at most {most}, got {value}")))
}

// Errors as exceptions of `gpupool.resource_pool.errors`.

/// Converts the error of a pool's creation.
fn config_exception(error: &ResourcePoolError) -> PyErr {
    match error {
        ResourcePoolError::Config { .. } => PyValueError::new_err(error.to_string()),
        ResourcePoolError::Gpus(_) => PyRuntimeError::new_err(error.to_string()),
        ResourcePoolError::Audit { .. } | ResourcePoolError::System(_) => PyOSError::new_err(error.to_string()),
    }
}

/// Converts the error of an acquisition.
fn acquire_exception(py: Python<'_>, error: &AcquireError) -> PyErr {
    let text = error.to_string();
    match error {
        AcquireError::Timeout { .. } => exception(py, "asyncio", "TimeoutError", text),
        AcquireError::NoWorker(_) => pool_exception(py, "WorkerStartError", text),
        AcquireError::Closed => pool_exception(py, "PoolClosedError", text),
        AcquireError::TooManyWaiting => PyRuntimeError::new_err(text),
        AcquireError::TaskId(_) => PyValueError::new_err(text),
    }
}

/// Converts the error of a worker's call. Exceptions of the called function are results and not errors here.
fn worker_exception(py: Python<'_>, error: &HeldWorkerError) -> PyErr {
    let text = error.to_string();
    match error {
        HeldWorkerError::Failed(_) => pool_exception(py, "WorkerError", text),
        HeldWorkerError::Timeout(_) => pool_exception(py, "WorkerTimeoutError", text),
        HeldWorkerError::Memory(_) => pool_exception(py, "WorkerMemoryError", text),
        HeldWorkerError::BoundExceeded(_) => pool_exception(py, "WorkerLimitError", text),
        HeldWorkerError::Killed | HeldWorkerError::Lost(_) | HeldWorkerError::GivenBack => {
            pool_exception(py, "WorkerLostError", text)
        }
        HeldWorkerError::Closed => pool_exception(py, "PoolClosedError", text),
        HeldWorkerError::Refused(_) => PyValueError::new_err(text),
    }
}

fn pool_exception<'py>(py: Python<'py>, name: &str, about: impl IntoPyObject<'py>) -> PyErr {
    exception(py, "gpupool.resource_pool.errors", name, about)
}
