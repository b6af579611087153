//! Resource pools for Python: workers that are handed out one by one, each held to limits while somebody has it.

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
    AcquireError, GpuLeaseConfig, HeldWorker as Held, HeldWorkerError, MAX_DURATION, ResourcePool as Pool,
    ResourcePoolConfig, ResourcePoolError, WorkerDevice,
};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::task::spawn_blocking;

use crate::awaiting::{Mailbox, awaitable, blocking};
use crate::carry::{Carrier, Main, Packed, Pickle};
use crate::client::local_agent;
use crate::memory::Lent;
use crate::runtime::Owned;
use crate::values::{exception, to_python};
use crate::{memory, runtime};

// The pool. Its processes end when it is closed, or when nobody has it any more.

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
        let mut config = ResourcePoolConfig { memory, ..wish.config()? };
        config.gpus = if leases_gpus { Some(leased(py)?) } else { None };
        // From a thread of ours: the pool's own threads take no signals then, either.
        let started = blocking(py, async move { spawn_blocking(move || Pool::start(config)).await })?;
        let started = started.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let pool = started.map_err(|error| of_config(&error))?;
        Ok(Self {
            pool: Owned::new("resource pool", pool),
            carrying: Arc::new(Carrying { carrier, processes: Mutex::default() }),
        })
    }

    /// A future of the running loop that ends with a worker. The place in line is taken at the call.
    fn acquire<'py>(&self, py: Python<'py>, task_id: &str) -> PyResult<Bound<'py, PyAny>> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let carrying = Arc::clone(&self.carrying);
        awaitable(py, acquiring, |py, got| {
            let worker = HeldWorker::new(got.map_err(|error| of_acquire(py, &error))?, carrying);
            Ok(Py::new(py, worker)?.into_any())
        })
    }

    /// The same, for a thread that waits.
    fn acquire_blocking(&self, py: Python<'_>, task_id: &str) -> PyResult<HeldWorker> {
        let acquiring = self.pool.get()?.acquire(task_id);
        let held = blocking(py, acquiring)?.map_err(|error| of_acquire(py, &error))?;
        Ok(HeldWorker::new(held, Arc::clone(&self.carrying)))
    }

    /// A future that ends when the least number of workers are set up, or says why none can be.
    fn ready<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        awaitable(py, self.pool.get()?.wait_until_ready(), |py, ready| {
            ready.map(|()| py.None()).map_err(|error| of_acquire(py, &error))
        })
    }

    /// How it stands.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.pool.get()?.status())
    }

    /// The last holds, in the order they began.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.pool.get()?.audit_entries())
    }

    /// Ends it, begun at the call; the future ends when no process is left. A forked child ends nothing.
    fn shutdown<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let over = self.pool.get().ok().map(Pool::shutdown);
        awaitable(py, OptionFuture::from(over), |py, _| Ok(py.None()))
    }

    /// The same, for a thread that waits.
    fn shutdown_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, OptionFuture::from(self.pool.get().ok().map(Pool::shutdown))).map(drop)
    }

    /// Ends it for good, with little patience: nobody has it any more, or the program ends. Waits without the threads that
    /// carry futures: this may be called by one of them, when it is there that Python finds that nobody has it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.pool.get().ok().map(Pool::close));
    }
}

fn leased(py: Python<'_>) -> PyResult<GpuLeaseConfig> {
    let failed = |error| PyRuntimeError::new_err(format!("devices=\"auto\": {error}"));
    let agent = blocking(py, local_agent("a resource pool starts its workers"))?.map_err(failed)?;
    let body = RequestBody { worker_id: Some("resource_pool".into()), ..RequestBody::default() };
    Ok(GpuLeaseConfig { agent, body })
}

// A worker somebody has, until it is given back or nobody has it any more.

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
    fn new(held: Held, carrying: Arc<Carrying>) -> Self {
        let (id, device, pid) = (held.id().0, held.device().to_owned(), held.pid());
        let gpu_ids = held.gpu_ids().to_vec();
        carrying.meet(id, pid);
        Self { id, device, gpu_ids, pid, carrying, held: Owned::new("worker", Mutex::new(Some(held))) }
    }

    fn with<T>(&self, does: impl FnOnce(&Held) -> T) -> PyResult<T> {
        let held = lock(self.held.get()?);
        let given_back = || PyRuntimeError::new_err(format!("worker {} was given back", self.id));
        held.as_ref().map(does).ok_or_else(given_back)
    }

    /// Has it work; what was lent for that is the worker's until it is over, or nobody waits for it.
    fn begin(
        &self,
        work: &Bound<'_, PyAny>,
    ) -> PyResult<impl Future<Output = Result<Bytes, HeldWorkerError>> + Send + use<>> {
        let Packed { payload, lent } = self.carrying.carrier.pack(work)?;
        let lent = LentForWork { carrying: Arc::clone(&self.carrying), lent };
        let run = self.with(|held| held.run(payload))?;
        Ok(async move {
            let ran = run.await;
            drop(lent);
            ran
        })
    }

    fn take(&self) -> Option<Held> {
        lock(self.held.get().ok()?).take()
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
        self.carrying.carrier.unpack(py, answer)
    }

    /// Calls back, in the running loop, with the exception, when a limit is passed; not at all when the hold ends else.
    fn on_limit(&self, py: Python<'_>, call: Py<PyAny>) -> PyResult<()> {
        let over = self.with(Held::wait_until_ended)?;
        let mailbox = Mailbox::of_running_loop(py)?;
        // Ends with the hold.
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
        awaitable(py, OptionFuture::from(released), |py, _| Ok(py.None()))
    }

    /// The same, for a thread that waits.
    fn release_blocking(&self, py: Python<'_>) -> PyResult<()> {
        blocking(py, OptionFuture::from(self.take().map(Held::release))).map(drop)
    }
}

fn answer(py: Python<'_>, ran: Result<Bytes, HeldWorkerError>) -> PyResult<Py<PyBytes>> {
    match ran {
        Ok(result) => Ok(PyBytes::new(py, &result).unbind()),
        Err(error) => Err(of_worker(py, &error)),
    }
}

// What goes to workers and comes back: Python values, the large ones in memory that is shared with them.

/// Packs for all workers of a pool, and unpacks what they say.
#[derive(Debug)]
struct Carrying {
    carrier: Carrier,
    /// The last process known of each worker.
    processes: Mutex<HashMap<u32, u32>>,
}

/// What was lent for work; taken back, where nobody took it, when the work is over or not waited for any more.
#[derive(Debug)]
struct LentForWork {
    carrying: Arc<Carrying>,
    lent: Vec<Lent>,
}

impl Carrying {
    /// A worker was got. Where another process had its number before, that one is gone, and what it had comes back.
    pub fn meet(&self, worker: u32, process: u32) {
        let before = lock(&self.processes).insert(worker, process);
        if before.is_some_and(|before| before != process) {
            // Not all it left: an answer of it may not have been unpacked yet.
            self.carrier.take_back();
        }
    }
}

impl Drop for LentForWork {
    fn drop(&mut self) {
        self.carrying.carrier.is_over(&self.lent);
    }
}

// What Python says a pool is to be.

/// The fields of a dict. The package has looked at them; here they are only bounded.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Wish {
    program: Vec<String>,
    /// JSON.
    settings: String,
    helper: PathBuf,
    /// What is defined in `__main__` travels by value.
    pub by_value: bool,
    max_workers: u32,
    min_workers: u32,
    worker_timeout_secs: f64,
    worker_memory_bytes: Option<u64>,
    worker_processes: Option<u64>,
    worker_cpu_secs: Option<f64>,
    devices: Vec<String>,
    /// In place of these, each worker leases a GPU.
    pub leases_gpus: bool,
    acquire_timeout_secs: f64,
    idle_secs: f64,
    setup_timeout_secs: f64,
    clean_up_timeout_secs: f64,
    audit_file: Option<PathBuf>,
}

impl Wish {
    pub fn config(self) -> PyResult<ResourcePoolConfig> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program: it is empty"))?;
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

// What went wrong, as the exceptions of `gpupool.resource_pool.errors`.

/// Why there is no pool.
fn of_config(error: &ResourcePoolError) -> PyErr {
    match error {
        ResourcePoolError::Config { .. } => PyValueError::new_err(error.to_string()),
        ResourcePoolError::Gpus(_) => PyRuntimeError::new_err(error.to_string()),
        ResourcePoolError::Audit { .. } | ResourcePoolError::System(_) => PyOSError::new_err(error.to_string()),
    }
}

/// Why somebody got no worker.
fn of_acquire(py: Python<'_>, error: &AcquireError) -> PyErr {
    let text = error.to_string();
    match error {
        AcquireError::Timeout { .. } => exception(py, "asyncio", "TimeoutError", text),
        AcquireError::NoWorker(_) => ours(py, "WorkerStartError", text),
        AcquireError::Closed => ours(py, "PoolClosedError", text),
        AcquireError::TooManyWaiting => PyRuntimeError::new_err(text),
        AcquireError::TaskId(_) => PyValueError::new_err(text),
    }
}

/// Why a worker did not do what was wanted. What functions raise is not here: that is an answer.
fn of_worker(py: Python<'_>, error: &HeldWorkerError) -> PyErr {
    let text = error.to_string();
    match error {
        HeldWorkerError::Failed(_) => ours(py, "WorkerError", text),
        HeldWorkerError::Timeout(_) => ours(py, "WorkerTimeoutError", text),
        HeldWorkerError::Memory(_) => ours(py, "WorkerMemoryError", text),
        HeldWorkerError::BoundExceeded(_) => ours(py, "WorkerLimitError", text),
        HeldWorkerError::Killed | HeldWorkerError::Lost(_) | HeldWorkerError::GivenBack => {
            ours(py, "WorkerLostError", text)
        }
        HeldWorkerError::Closed => ours(py, "PoolClosedError", text),
        HeldWorkerError::Refused(_) => PyValueError::new_err(text),
    }
}

fn ours<'py>(py: Python<'py>, name: &str, about: impl IntoPyObject<'py>) -> PyErr {
    exception(py, "gpupool.resource_pool.errors", name, about)
}
