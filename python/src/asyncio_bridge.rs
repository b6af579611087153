//! Conversion of a Rust future into an `asyncio` future of the running loop, or a blocking call.
//!
//! There is no thread per call: the loop polls a future in its own thread, so that a request is sent at once. After a
//! second the runtime's thread takes the future over, because the loop may be closed or blocked. Cancelling the Python
//! future drops the Rust future at once. A late result, or one for a closed loop, is dropped too, and releases
//! its resources.
//!
//! Our threads notify a loop without waiting for the interpreter, which a program may hold for long: they put a
//! callback into the loop's mailbox and signal an eventfd that the loop watches; the loop empties the mailbox in its
//! own thread. A loop that cannot watch descriptors is notified by `call_soon_threadsafe`, and the runtime drives its
//! futures.

use std::future::Future;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::future::{AbortHandle, Aborted, abortable};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use gpupool_confine::lock;
use pyo3::exceptions::{PyAttributeError, PyNotImplementedError, PyRuntimeError};
use pyo3::intern;
use pyo3::panic::PanicException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::runtime::Handle;
use tokio::task::{JoinSet, block_in_place};

use crate::runtime::{self, with_interpreter};

/// Creates an `asyncio` future of the running loop for a Rust future; `finish` converts the result to Python.
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = T> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let running = running_loop(py)?;
    let mailbox = LoopMailbox::of(&running)?;
    let python_future = running.call_method0(intern!(py, "create_future"))?;
    let target = python_future.clone().unbind();
    let (future, abort) = abortable(async move {
        // A panic ends this one future and not the others.
        let outcome = AssertUnwindSafe(future).catch_unwind().await;
        let panicked = |_| Err(PanicException::new_err("gpupool panicked; see standard error"));
        let callback: LoopCallback = Box::new(move |py| {
            complete_future(target.bind(py), outcome.map_or_else(panicked, |outcome| finish(py, outcome)))
        });
        callback
    });
    let cancel = FutureCancellation { abort, mailbox: mailbox.clone() };
    python_future.call_method1(intern!(py, "add_done_callback"), (cancel,))?;
    mailbox.drive_future(py, Box::pin(future));
    Ok(python_future)
}

/// Returns the loop that runs in this thread.
fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    GET.import(py, "asyncio", "get_running_loop")?.call0()
}

/// Completes a Python future, in its loop, unless it is done.
fn complete_future(future: &Bound<'_, PyAny>, result: PyResult<Py<PyAny>>) {
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

/// Drops the Rust future when the Python future is done for any reason.
#[pyclass(frozen)]
struct FutureCancellation {
    abort: AbortHandle,
    mailbox: LoopMailbox,
}

#[pymethods]
impl FutureCancellation {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = future.py();
        // A forked child has no thread that drives it, and the parent continues.
        if self.mailbox.is_ours() {
            self.abort.abort();
            if future.call_method0(intern!(py, "cancelled"))?.is_truthy()? {
                // At once, because the loop may be about to close.
                self.mailbox.process_contents(py);
            }
        }
        Ok(())
    }
}

/// Interval of maintenance: for callbacks of closed loops, and the time after which the runtime takes over futures from
/// a loop.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);

/// A callback that the loop runs in its thread.
type LoopCallback = Box<dyn FnOnce(Python<'_>) + Send>;

/// A future that yields a callback, unless aborted.
type CarriedFuture = Pin<Box<dyn Future<Output = Result<LoopCallback, Aborted>> + Send>>;

/// Callbacks and futures for an event loop. Clones share the same mailbox.
#[pyclass(frozen)]
#[derive(Clone)]
pub(crate) struct LoopMailbox {
    shared: Arc<LoopMailboxState>,
}

struct LoopMailboxState {
    contents: Mutex<MailboxContents>,
    /// [`LOOP_IDLE`], [`LOOP_BUSY`] or [`LOOP_WOKEN`].
    loop_state: AtomicU8,
    /// Eventfd that the loop watches, if it can.
    wakeup_fd: Option<OwnedFd>,
    loop_ref: Py<PyWeakrefReference>,
    runtime: Handle,
    process: u32,
}

const LOOP_IDLE: u8 = 0;
/// The loop processes the mailbox.
const LOOP_BUSY: u8 = 1;
/// The loop will process the mailbox (again).
const LOOP_WOKEN: u8 = 2;

#[derive(Default)]
struct MailboxContents {
    callbacks: Vec<LoopCallback>,
    /// Futures that the loop polls, and the time of the first.
    carried: Option<(FuturesUnordered<CarriedFuture>, Instant)>,
    /// Whether a maintenance task runs.
    is_maintained: bool,
}

impl LoopMailbox {
    /// Returns the mailbox of the loop that runs in this thread.
    pub fn of_running_loop(py: Python<'_>) -> PyResult<Self> {
        Self::of(&running_loop(py)?)
    }

    fn of(running: &Bound<'_, PyAny>) -> PyResult<Self> {
        static MAILBOXES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = running.py();
        let make = || py.import("weakref")?.call_method0("WeakKeyDictionary").map(Bound::unbind);
        let mailboxes = MAILBOXES.get_or_try_init(py, make)?.bind(py);
        let known = mailboxes.call_method1(intern!(py, "get"), (running,))?;
        // A forked child does not use the parent's mailbox.
        match known.cast::<Self>().ok().filter(|known| known.get().is_ours()) {
            Some(known) => Ok(known.get().clone()),
            None => {
                let made = Self::new(running)?;
                mailboxes.set_item(running, made.clone())?;
                Ok(made)
            }
        }
    }

    fn new(running: &Bound<'_, PyAny>) -> PyResult<Self> {
        let with = |wakeup_fd| -> PyResult<Self> {
            let (contents, loop_state, process) = (Mutex::default(), AtomicU8::new(LOOP_IDLE), std::process::id());
            let (loop_ref, runtime) = (PyWeakrefReference::new(running)?.unbind(), runtime::handle()?);
            Ok(Self {
                shared: Arc::new(LoopMailboxState { contents, loop_state, wakeup_fd, loop_ref, runtime, process }),
            })
        };
        let wakeup_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        let number = wakeup_fd.as_raw_fd();
        let made = with(Some(wakeup_fd))?;
        match running.call_method1("add_reader", (number, made.clone())) {
            Ok(_) => Ok(made),
            Err(error) if is_watch_unsupported(running.py(), &error) => with(None),
            Err(error) => Err(error),
        }
    }

    /// Whether this process created the mailbox.
    fn is_ours(&self) -> bool {
        self.shared.process == std::process::id()
    }

    /// Makes the loop run a callback, without waiting for the interpreter.
    pub fn post(&self, callback: impl FnOnce(Python<'_>) + Send + 'static) {
        self.update_contents(|contents| contents.callbacks.push(Box::new(callback)));
        self.wake_loop();
    }

    /// Drives a future in the thread of the loop, which is the caller's.
    fn drive_future(&self, py: Python<'_>, future: CarriedFuture) {
        if self.shared.wakeup_fd.is_none() {
            let mailbox = self.clone();
            self.shared.runtime.spawn(async move { future.await.map(|callback| mailbox.post(callback)) });
            return;
        }
        self.update_contents(|contents| {
            contents.carried.get_or_insert_with(|| (FuturesUnordered::new(), Instant::now())).0.push(future);
        });
        self.process_contents(py);
    }

    fn update_contents(&self, update: impl FnOnce(&mut MailboxContents)) {
        let mut contents = lock(&self.shared.contents);
        update(&mut contents);
        if !std::mem::replace(&mut contents.is_maintained, true) {
            drop(contents);
            self.shared.runtime.spawn(self.clone().maintain());
        }
    }

    /// Processes the mailbox in the loop: polls woken futures and runs callbacks.
    fn process_contents(&self, py: Python<'_>) {
        let loop_state = &self.shared.loop_state;
        loop {
            loop_state.store(LOOP_BUSY, Ordering::SeqCst);
            let mut contents = lock(&self.shared.contents);
            let (mut callbacks, carried) = (std::mem::take(&mut contents.callbacks), contents.carried.take());
            drop(contents);
            if let Some((carried, since)) = carried {
                callbacks.extend(self.poll_futures(carried, since));
            }
            callbacks.into_iter().for_each(|callback| callback(py));
            // Woken meanwhile, often by this loop itself: repeat without another notification.
            if loop_state.compare_exchange(LOOP_BUSY, LOOP_IDLE, Ordering::SeqCst, Ordering::SeqCst) != Err(LOOP_WOKEN)
            {
                return;
            }
        }
    }

    fn poll_futures(&self, mut carried: FuturesUnordered<CarriedFuture>, since: Instant) -> Vec<LoopCallback> {
        let waker = Waker::from(self.shared.clone());
        // Polled or dropped futures may spawn tasks that release something.
        let _entered = self.shared.runtime.enter();
        let mut callbacks = Vec::new();
        while let Poll::Ready(Some(ready)) = carried.poll_next_unpin(&mut Context::from_waker(&waker)) {
            callbacks.extend(ready);
        }
        if !carried.is_empty() {
            self.update_contents(|contents| {
                // More futures may have arrived during the poll.
                let later = contents.carried.take().map(|(later, _)| later);
                carried.extend(later.into_iter().flatten());
                contents.carried = Some((carried, since));
            });
        }
        callbacks
    }

    fn wake_loop(&self) {
        if self.shared.loop_state.swap(LOOP_WOKEN, Ordering::SeqCst) != LOOP_IDLE {
            return;
        }
        match &self.shared.wakeup_fd {
            Some(wakeup_fd) => signal_wakeup(wakeup_fd),
            None => drop(block_in_place(|| {
                // A missing or closed loop is not notified.
                with_interpreter(|py| {
                    self.upgrade_loop(py)?.call_method1("call_soon_threadsafe", (self.clone(),)).ok().map(drop)
                })
            })),
        }
    }

    /// Hands long-running futures to the runtime, and drops the callbacks of a closed loop with all they hold.
    async fn maintain(self) {
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL).await;
            let mut contents = lock(&self.shared.contents);
            if let Some((mut carried, _)) =
                contents.carried.take_if(|(_, since)| since.elapsed() >= MAINTENANCE_INTERVAL)
            {
                let mailbox = self.clone();
                self.shared.runtime.spawn(async move {
                    while let Some(ready) = carried.next().await {
                        ready.into_iter().for_each(|callback| mailbox.post(callback));
                    }
                });
            }
            contents.is_maintained = !contents.callbacks.is_empty() || contents.carried.is_some();
            if !contents.is_maintained {
                return;
            }
            let has_callbacks = !contents.callbacks.is_empty();
            drop(contents);
            if has_callbacks && block_in_place(|| with_interpreter(|py| self.is_loop_closed(py))).unwrap_or(true) {
                let callbacks = std::mem::take(&mut lock(&self.shared.contents).callbacks);
                drop(callbacks);
            }
        }
    }

    fn is_loop_closed(&self, py: Python<'_>) -> bool {
        let is_closed = |running: Bound<'_, PyAny>| running.call_method0("is_closed")?.is_truthy();
        self.upgrade_loop(py).is_none_or(|running| is_closed(running).unwrap_or(false))
    }

    fn upgrade_loop<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.shared.loop_ref.bind(py).upgrade()
    }
}

#[pymethods]
impl LoopMailbox {
    /// Processes the mailbox. The loop calls this when the eventfd is readable.
    fn __call__(&self, py: Python<'_>) {
        // In a forked child the contents belong to the parent.
        if self.is_ours() {
            // Read first: later changes signal again.
            if let Some(wakeup_fd) = &self.shared.wakeup_fd {
                let _ = rustix::io::read(wakeup_fd, &mut [0; 8]);
            }
            self.process_contents(py);
        }
    }
}

impl Wake for LoopMailboxState {
    fn wake(self: Arc<Self>) {
        LoopMailbox { shared: self }.wake_loop();
    }
}

impl Drop for LoopMailboxState {
    fn drop(&mut self) {
        // In a forked child the contents belong to the parent, whose requests continue.
        if self.process != std::process::id() {
            std::mem::forget(std::mem::take(self.contents.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

fn is_watch_unsupported(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyNotImplementedError>(py) || error.is_instance_of::<PyAttributeError>(py)
}

fn signal_wakeup(wakeup_fd: &OwnedFd) {
    // A 64-bit counter cannot overflow here.
    let _ = rustix::io::write(wakeup_fd, &1_u64.to_ne_bytes());
}

/// Interval at which a blocked thread checks for signals.
const SIGNAL_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// Waits in this thread without holding the interpreter. Signal handlers run at once; an exception from a handler ends
/// the wait and drops the future.
pub(crate) fn blocking<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = T> + Send + 'static,
) -> PyResult<T> {
    let wakeup_fd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?);
    let (sender, receiver) = sync_channel(1);
    let wakeup = Arc::clone(&wakeup_fd);
    let carried = async move {
        // The receiver is gone if a signal ended the wait.
        let _ = sender.send(future.await);
        signal_wakeup(&wakeup);
    };
    // Dropping the set drops the future.
    let mut task = JoinSet::new();
    task.spawn_on(carried, &runtime::handle()?);
    loop {
        py.detach(|| {
            // A signal ends the poll early and is checked below; a signal just before the poll is checked after the
            // interval.
            let _ =
                poll(&mut [PollFd::from_borrowed_fd(wakeup_fd.as_fd(), PollFlags::IN)], Some(&SIGNAL_CHECK_INTERVAL));
        });
        match receiver.try_recv() {
            Ok(outcome) => return Ok(outcome),
            Err(TryRecvError::Empty) => py.check_signals()?,
            Err(TryRecvError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the awaited operation ended without a result"));
            }
        }
    }
}
