//! A run of the dispatcher, for `gpu_dispatch`.
//!
//! The thread of the run takes events ([`Run::events`]); another one feeds ([`Run::put`]). Both hold the interpreter only while
//! they deal with Python values.

mod events;
mod gpus;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use gpupool_confine::lock;
use gpupool_dispatch::job_log::JobLogError;
use gpupool_dispatch::{
    DispatchError, DispatchRules, Dispatcher, RunHandle, RunPlan, SubmitError, TaskId, WorkerId, WorkerOutputPolicy,
    WorkerProgram, WorkerSlot,
};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::carry::{Carrier, Main, Packed, Pickle};
use crate::memory::{self, Lent};
use crate::values::to_python;
use crate::worker::told;
use events::{Clock, Log};
use gpus::{Board, Gpus};

/// How long a run may last whose end is waited for without its events being wanted.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A run. What is not over when it goes is cancelled, and no process is left.
#[pyclass(frozen, name = "Run")]
pub(crate) struct Run {
    /// Until it is finished. The GPUs are given back after the workers are gone.
    running: Mutex<Option<(Dispatcher, Option<Gpus>)>>,
    remote: RunHandle,
    carrier: Carrier,
    loans: Loans,
    /// How many of the source were read, those that were done in an earlier run included.
    read: AtomicU64,
    /// How many tasks were put.
    put: AtomicU64,
    log: Option<Log>,
    board: Arc<Board>,
    clock: Clock,
    process: u32,
}

#[pymethods]
impl Run {
    /// Starts the workers.
    #[new]
    fn start(py: Python<'_>, wish: Wish) -> PyResult<Self> {
        let memory = if wish.shares_memory { memory::create().ok() } else { None };
        let main = if wish.by_value { Main::ByValue } else { Main::IsKnown };
        let carrier = Carrier::new(Pickle::new(py, main)?, memory.clone())?;
        let mut plan = wish.plan()?;
        plan.memory = memory;
        let log = wish.log()?;
        let dispatcher = py.detach(|| Dispatcher::start(plan)).map_err(of_plan)?;
        let (remote, board) = (dispatcher.handle(), Arc::new(Board::default()));
        let start = |(count, each)| Gpus::start(py, count, each, remote.clone(), Arc::clone(&board));
        let gpus = wish.gpus.map(start).transpose()?;
        Ok(Self {
            remote,
            running: Mutex::new(Some((dispatcher, gpus))),
            carrier,
            loans: Loans::default(),
            read: AtomicU64::new(0),
            put: AtomicU64::new(0),
            log,
            board,
            clock: Clock::now(),
            process: std::process::id(),
        })
    }

    /// Puts the next of the source, waiting for room; for one thread. `False` where nobody wants more.
    ///
    /// The source is read in Python: a thread that the interpreter ends while it does must have nothing of ours below it.
    fn put(&self, item: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = item.py();
        let place = self.read.fetch_add(1, Ordering::Relaxed);
        if let Some(log) = &self.log
            && log.has(place).map_err(of_log)?
        {
            return Ok(true);
        }
        let Packed { payload, lent } = self.packed(item);
        // No other thread puts tasks, so this is the number the next one gets.
        let task = TaskId(self.put.fetch_add(1, Ordering::Relaxed));
        if let Some(log) = &self.log {
            log.put(task, place);
        }
        if !lent.is_empty() {
            // Told of before it is put: it may be over before this thread goes on.
            py.detach(|| self.loans.add(task, lent));
        }
        let outcome = match self.remote.submit(payload.clone()) {
            Err(SubmitError::Full) => py.detach(|| self.remote.submit_blocking(payload)),
            outcome => outcome,
        };
        match outcome {
            Ok(same) => debug_assert_eq!(same, task),
            Err(SubmitError::Closed) => return Ok(false),
            Err(refused) => return Err(PyValueError::new_err(format!("task {place}: {refused}"))),
        }
        Ok(true)
    }

    /// No more tasks come.
    fn close(&self) {
        self.remote.close();
    }

    /// Ends everything now.
    fn cancel(&self) {
        self.remote.cancel();
        self.loans.end();
    }

    /// Gives up what is not done; the workers clean up and end.
    fn stop(&self) {
        self.remote.stop();
        self.loans.end();
    }

    /// What happened, waiting for it: a list of tuples, empty after a while or a signal; `None` when all is over.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.check_process()?;
        if let Some(log) = &self.log {
            log.write().map_err(of_log)?;
        }
        let waited = py.detach(|| {
            let mut running = lock(&self.running);
            let (dispatcher, _) = running.as_mut()?;
            let Some(first) = dispatcher.next_event_timeout(LOOK_AGAIN) else {
                return (!dispatcher.is_finished()).then(Vec::new);
            };
            let mut events = vec![first];
            while dispatcher.has_event() {
                events.extend(dispatcher.next_event());
            }
            Some(events)
        });
        py.check_signals()?;
        let Some(events) = waited else { return Ok(None) };
        let told = PyList::empty(py);
        for news in self.board.take() {
            told.append(news.tell(py)?)?;
        }
        for event in events {
            told.append(self.tell(py, event)?)?;
        }
        Ok(Some(told))
    }

    /// A callback did not come back: what it was told of is not logged.
    fn forget(&self) {
        if let Some(log) = &self.log {
            log.forget();
        }
    }

    /// How things stand.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.check_process()?;
        let stats = py.detach(|| self.remote.stats());
        let told = to_python(py, &stats)?;
        for (worker, known) in told.get_item("workers")?.try_iter()?.zip(&stats.workers) {
            worker?.set_item("task_since", known.task_since.map(|since| self.clock.time(since)))?;
        }
        Ok(told)
    }

    /// All is over: `None`, or why the run could not go on, as (kind, text).
    fn finish(&self, py: Python<'_>) -> PyResult<Option<(&'static str, String)>> {
        self.check_process()?;
        let Some((dispatcher, gpus)) = lock(&self.running).take() else { return Ok(None) };
        let finished = py.detach(|| {
            let finished = dispatcher.finish();
            drop(gpus);
            finished
        });
        if let Some(log) = &self.log {
            py.detach(|| log.finish()).map_err(of_log)?;
        }
        Ok(match finished {
            Ok(_) => self.board.failure().map(|why| ("gpus", why)),
            Err(error @ DispatchError::AllFailedSetup { .. }) => Some(("setup", error.to_string())),
            Err(error) => Some(("other", error.to_string())),
        })
    }
}

impl Run {
    /// A value that cannot be packed is a task that fails: its worker says why.
    fn packed(&self, item: &Bound<'_, PyAny>) -> Packed {
        self.carrier.pack(item).unwrap_or_else(|error| Packed {
            payload: Carrier::excuse(&format!("the task cannot be pickled:\n{}", told(item.py(), &error))),
            lent: Vec::new(),
        })
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err("this run was started by another process, of which this one is a copy"))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process != std::process::id() {
            // A forked child has none of its threads, and its workers are the parent's.
            std::mem::forget(running);
            return;
        }
        self.loans.end();
        // It waits for processes to end, and needs nothing of Python for that.
        Python::try_attach(|py| py.detach(|| drop(running)));
    }
}

fn of_log(error: JobLogError) -> PyErr {
    match error {
        JobLogError::File { .. } => PyOSError::new_err(error.to_string()),
        other => PyValueError::new_err(other.to_string()),
    }
}

fn of_plan(error: DispatchError) -> PyErr {
    match error {
        DispatchError::Plan { .. } => PyValueError::new_err(error.to_string()),
        other => PyRuntimeError::new_err(other.to_string()),
    }
}

// A plan as Python asks for it.

/// What `gpu_dispatch` asks for; the attributes of an object.
#[derive(FromPyObject)]
struct Wish {
    program: Vec<String>,
    environment: HashMap<String, String>,
    settings: String,
    helper: PathBuf,
    pub by_value: bool,
    pub shares_memory: bool,
    /// Workers: the number of each, its GPUs, and what is set in its environment.
    places: Vec<(u32, Vec<u32>, HashMap<String, String>)>,
    queue_size: usize,
    task_timeout: Option<f64>,
    grace: f64,
    retries: u32,
    output: String,
    tell_started: bool,
    joblog: Option<PathBuf>,
    /// What stands for the command in the job log.
    name: String,
    /// GPUs of the pool: how many, and how many workers each has.
    pub gpus: Option<(Option<usize>, u32)>,
}

impl Wish {
    pub fn log(&self) -> PyResult<Option<Log>> {
        self.joblog.as_deref().map(|path| Log::open(path, self.name.clone()).map_err(of_log)).transpose()
    }

    pub fn plan(&self) -> PyResult<RunPlan> {
        let (program, arguments) =
            self.program.split_first().ok_or_else(|| PyValueError::new_err("program: it is empty"))?;
        let mut program = WorkerProgram::native(program).args(arguments);
        for (name, value) in &self.environment {
            program = program.env(name, value);
        }
        let settings = serde_json::from_str(&self.settings);
        let output = match self.output.as_str() {
            "inherited" => WorkerOutputPolicy::Inherited,
            "dropped" => WorkerOutputPolicy::Discarded,
            "told" => WorkerOutputPolicy::Reported,
            other => return Err(PyValueError::new_err(format!("output: {other:?} is not inherited, dropped or told"))),
        };
        let rules = DispatchRules {
            queue_size: self.queue_size,
            task_timeout: self.task_timeout.map(|limit| seconds("task_timeout", limit)).transpose()?,
            grace: seconds("grace", self.grace)?,
            retries: self.retries,
            ..DispatchRules::default()
        };
        let places = self.places.iter().map(|(id, gpu_ids, environment)| WorkerSlot {
            gpu_ids: gpu_ids.clone(),
            environment: environment.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect(),
            ..WorkerSlot::new(WorkerId(*id))
        });
        Ok(RunPlan {
            slots: places.collect(),
            rules,
            settings: settings.map_err(|error| PyValueError::new_err(format!("settings: {error}")))?,
            output,
            report_started: self.tell_started,
            helper: Some(self.helper.clone()),
            ..RunPlan::new(program)
        })
    }
}

fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| PyValueError::new_err(format!("{what} must be a positive number of seconds, got {seconds}")))
}

// Shared memory of tasks that are not over.

/// Bytes of shared memory for tasks that are not over. One that is larger goes alone.
const LENT_BYTES: u64 = 256 << 20;

/// What is lent for tasks that are not over.
#[derive(Debug, Default)]
struct Loans {
    books: Mutex<LoanBooks>,
    has_room: Condvar,
}

#[derive(Debug, Default)]
struct LoanBooks {
    tasks: HashMap<TaskId, Vec<Lent>>,
    bytes: u64,
    is_over: bool,
}

impl Loans {
    /// Waits until there is room for what is lent for a task.
    fn add(&self, task: TaskId, lent: Vec<Lent>) {
        let bytes = bytes_of(&lent);
        let is_full = |books: &mut LoanBooks| books.bytes > 0 && books.bytes + bytes > LENT_BYTES && !books.is_over;
        let waited = self.has_room.wait_while(lock(&self.books), is_full);
        let mut books = waited.unwrap_or_else(PoisonError::into_inner);
        books.bytes += bytes;
        books.tasks.insert(task, lent);
    }

    /// A task is over: what was lent for it.
    pub fn remove(&self, task: TaskId) -> Vec<Lent> {
        let mut books = lock(&self.books);
        let lent = books.tasks.remove(&task).unwrap_or_default();
        if !lent.is_empty() {
            books.bytes -= bytes_of(&lent);
            self.has_room.notify_all();
        }
        lent
    }

    /// Nobody waits any more.
    fn end(&self) {
        lock(&self.books).is_over = true;
        self.has_room.notify_all();
    }
}

fn bytes_of(lent: &[Lent]) -> u64 {
    lent.iter().map(|lent| lent.slot.capacity).sum()
}
