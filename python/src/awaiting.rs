//! From a Rust future to what Python waits for: an `asyncio` future of whatever loop runs, or a thread that blocks.
//!
//! No thread per call: a future is polled by the loop itself, in its own thread, so that a question goes out at once. What takes
//! longer than a second is handed to the thread of the runtime: the loop may be closed, or held up. Cancelling the Python future
//! drops the Rust future at once; a result that comes too late, or for a loop that is closed, is dropped as well, which gives
//! back whatever it holds.
//!
//! Threads of ours tell a loop something without waiting for the interpreter, which a program may hold for long: it is put into
//! the loop's mailbox and a bell is rung, a descriptor the loop watches; the loop empties the mailbox in its own thread. A loop
//! that cannot watch descriptors is told by `call_soon_threadsafe`, and its futures are carried by the runtime.

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

use crate::runtime::{self, attached};

/// An `asyncio` future of the running loop that ends as the Rust future does; `finish` makes its result a Python value.
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    future: impl Future<Output = T> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let running = running_loop(py)?;
    let mailbox = Mailbox::of(&running)?;
    let waited = running.call_method0(intern!(py, "create_future"))?;
    let told = waited.clone().unbind();
    let (coming, abort) = abortable(async move {
        // A panic ends this one future, not all that the loop carries.
        let outcome = AssertUnwindSafe(future).catch_unwind().await;
        let panicked = |_| Err(PanicException::new_err("gpupool panicked; standard error says where"));
        let letter: Letter =
            Box::new(move |py| tell(told.bind(py), outcome.map_or_else(panicked, |outcome| finish(py, outcome))));
        letter
    });
    let cancel = Cancel { abort, mailbox: mailbox.clone() };
    waited.call_method1(intern!(py, "add_done_callback"), (cancel,))?;
    mailbox.carry(py, Box::pin(coming));
    Ok(waited)
}

/// The loop that runs in this thread.
fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static GET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    GET.import(py, "asyncio", "get_running_loop")?.call0()
}

/// Ends a Python future, in its loop, unless it has ended.
fn tell(future: &Bound<'_, PyAny>, result: PyResult<Py<PyAny>>) {
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

/// Drops the Rust future when the Python future is done, whatever it was done by.
#[pyclass(frozen)]
struct Cancel {
    abort: AbortHandle,
    mailbox: Mailbox,
}

#[pymethods]
impl Cancel {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = future.py();
        // A forked child has no thread that carries it, and the parent goes on with it.
        if self.mailbox.is_ours() {
            self.abort.abort();
            if future.call_method0(intern!(py, "cancelled"))?.is_truthy()? {
                // Not later: the loop may be about to close.
                self.mailbox.go_on(py);
            }
        }
        Ok(())
    }
}

/// How long letters may lie before it is looked whether their loop is closed, and how long a loop polls futures before the
/// runtime goes on with them.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// Done by the loop, in its thread.
type Letter = Box<dyn FnOnce(Python<'_>) + Send>;

/// A future that comes to a letter, unless nobody wants it any more.
type Coming = Pin<Box<dyn Future<Output = Result<Letter, Aborted>> + Send>>;

/// Where an event loop finds what is for it. Clones are the same mailbox.
#[pyclass(frozen)]
#[derive(Clone)]
pub(crate) struct Mailbox {
    shared: Arc<MailboxState>,
}

struct MailboxState {
    contents: Mutex<Contents>,
    /// Whether the loop has been called: [`IDLE`], [`BUSY`] or [`CALLED`].
    calling: AtomicU8,
    /// What the loop watches, if it can.
    bell: Option<OwnedFd>,
    to_loop: Py<PyWeakrefReference>,
    runtime: Handle,
    process: u32,
}

const IDLE: u8 = 0;
/// The loop is at it.
const BUSY: u8 = 1;
/// The loop is to look (once more).
const CALLED: u8 = 2;

#[derive(Default)]
struct Contents {
    letters: Vec<Letter>,
    /// Futures that the loop polls, and since when there are any.
    carried: Option<(FuturesUnordered<Coming>, Instant)>,
    /// Whether a task looks after what the loop does not come to.
    is_looked_after: bool,
}

impl Mailbox {
    /// The mailbox of the loop that runs in this thread.
    pub fn of_running_loop(py: Python<'_>) -> PyResult<Self> {
        Self::of(&running_loop(py)?)
    }

    fn of(running: &Bound<'_, PyAny>) -> PyResult<Self> {
        static MAILBOXES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = running.py();
        let make = || py.import("weakref")?.call_method0("WeakKeyDictionary").map(Bound::unbind);
        let mailboxes = MAILBOXES.get_or_try_init(py, make)?.bind(py);
        let known = mailboxes.call_method1(intern!(py, "get"), (running,))?;
        // That of a forked child's parent is left to the parent.
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
        let with = |bell| -> PyResult<Self> {
            let (contents, calling, process) = (Mutex::default(), AtomicU8::new(IDLE), std::process::id());
            let (to_loop, runtime) = (PyWeakrefReference::new(running)?.unbind(), runtime::handle()?);
            Ok(Self { shared: Arc::new(MailboxState { contents, calling, bell, to_loop, runtime, process }) })
        };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        let number = bell.as_raw_fd();
        let made = with(Some(bell))?;
        match running.call_method1("add_reader", (number, made.clone())) {
            Ok(_) => Ok(made),
            Err(error) if cannot_watch(running.py(), &error) => with(None),
            Err(error) => Err(error),
        }
    }

    /// Whether this process made it, and is no forked child of that one.
    fn is_ours(&self) -> bool {
        self.shared.process == std::process::id()
    }

    /// Has the loop do something, whatever the interpreter does.
    pub fn post(&self, letter: impl FnOnce(Python<'_>) + Send + 'static) {
        self.put(|contents| contents.letters.push(Box::new(letter)));
        self.call();
    }

    /// Carries a future in the thread of the loop, in which this is called.
    fn carry(&self, py: Python<'_>, coming: Coming) {
        if self.shared.bell.is_none() {
            let mailbox = self.clone();
            self.shared.runtime.spawn(async move { coming.await.map(|letter| mailbox.post(letter)) });
            return;
        }
        self.put(|contents| {
            contents.carried.get_or_insert_with(|| (FuturesUnordered::new(), Instant::now())).0.push(coming);
        });
        self.go_on(py);
    }

    fn put(&self, put: impl FnOnce(&mut Contents)) {
        let mut contents = lock(&self.shared.contents);
        put(&mut contents);
        if !std::mem::replace(&mut contents.is_looked_after, true) {
            drop(contents);
            self.shared.runtime.spawn(self.clone().look_after());
        }
    }

    /// Does what is there, in the loop: polls what was woken, and tells Python what came of it.
    fn go_on(&self, py: Python<'_>) {
        let calling = &self.shared.calling;
        loop {
            calling.store(BUSY, Ordering::SeqCst);
            let mut contents = lock(&self.shared.contents);
            let (mut letters, carried) = (std::mem::take(&mut contents.letters), contents.carried.take());
            drop(contents);
            if let Some((carried, since)) = carried {
                letters.extend(self.polled(carried, since));
            }
            letters.into_iter().for_each(|letter| letter(py));
            // Woken meanwhile, often by itself: once more, and no bell is rung for it.
            if calling.compare_exchange(BUSY, IDLE, Ordering::SeqCst, Ordering::SeqCst) != Err(CALLED) {
                return;
            }
        }
    }

    fn polled(&self, mut carried: FuturesUnordered<Coming>, since: Instant) -> Vec<Letter> {
        let waker = Waker::from(self.shared.clone());
        // What is polled or dropped may leave tasks behind that give something back.
        let _entered = self.shared.runtime.enter();
        let mut letters = Vec::new();
        while let Poll::Ready(Some(came)) = carried.poll_next_unpin(&mut Context::from_waker(&waker)) {
            letters.extend(came);
        }
        if !carried.is_empty() {
            self.put(|contents| {
                // Others may have come while these were polled.
                let later = contents.carried.take().map(|(later, _)| later);
                carried.extend(later.into_iter().flatten());
                contents.carried = Some((carried, since));
            });
        }
        letters
    }

    fn call(&self) {
        if self.shared.calling.swap(CALLED, Ordering::SeqCst) != IDLE {
            return;
        }
        match &self.shared.bell {
            Some(bell) => ring(bell),
            None => drop(block_in_place(|| {
                // A loop that is gone or closed is told nothing any more.
                attached(|py| self.in_loop(py)?.call_method1("call_soon_threadsafe", (self.clone(),)).ok().map(drop))
            })),
        }
    }

    /// Has the runtime go on with futures that take long, and drops letters that lie there for a loop that is closed, with all
    /// they hold.
    async fn look_after(self) {
        loop {
            tokio::time::sleep(LOOK_AFTER).await;
            let mut contents = lock(&self.shared.contents);
            if let Some((mut carried, _)) = contents.carried.take_if(|(_, since)| since.elapsed() >= LOOK_AFTER) {
                let mailbox = self.clone();
                self.shared.runtime.spawn(async move {
                    while let Some(came) = carried.next().await {
                        came.into_iter().for_each(|letter| mailbox.post(letter));
                    }
                });
            }
            contents.is_looked_after = !contents.letters.is_empty() || contents.carried.is_some();
            if !contents.is_looked_after {
                return;
            }
            let has_letters = !contents.letters.is_empty();
            drop(contents);
            if has_letters && block_in_place(|| attached(|py| self.is_over(py))).unwrap_or(true) {
                let letters = std::mem::take(&mut lock(&self.shared.contents).letters);
                drop(letters);
            }
        }
    }

    fn is_over(&self, py: Python<'_>) -> bool {
        let is_closed = |running: Bound<'_, PyAny>| running.call_method0("is_closed")?.is_truthy();
        self.in_loop(py).is_none_or(|running| is_closed(running).unwrap_or(false))
    }

    fn in_loop<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.shared.to_loop.bind(py).upgrade()
    }
}

#[pymethods]
impl Mailbox {
    /// Called by the loop when the bell rings.
    fn __call__(&self, py: Python<'_>) {
        // In a forked child, what is there is for its parent.
        if self.is_ours() {
            // Before anything is looked at: what comes after that rings anew.
            if let Some(bell) = &self.shared.bell {
                let _ = rustix::io::read(bell, &mut [0; 8]);
            }
            self.go_on(py);
        }
    }
}

impl Wake for MailboxState {
    fn wake(self: Arc<Self>) {
        Mailbox { shared: self }.call();
    }
}

impl Drop for MailboxState {
    fn drop(&mut self) {
        // In a forked child they are the parent's, whose questions go on.
        if self.process != std::process::id() {
            std::mem::forget(std::mem::take(self.contents.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

fn cannot_watch(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyNotImplementedError>(py) || error.is_instance_of::<PyAttributeError>(py)
}

fn ring(bell: &OwnedFd) {
    // A counter of 64 bits is not full.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// How long a thread waits before it looks at signals again.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// Waits in this thread, without holding the interpreter; a signal's handler runs at once, and what it raises ends the wait
/// and drops the future.
pub(crate) fn blocking<T: Send + 'static>(
    py: Python<'_>,
    future: impl Future<Output = T> + Send + 'static,
) -> PyResult<T> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?);
    let (tell, told) = sync_channel(1);
    let rings = Arc::clone(&bell);
    let carried = async move {
        // Where a signal ended the wait, no receiver is left.
        let _ = tell.send(future.await);
        ring(&rings);
    };
    // Dropped, it drops the future.
    let mut task = JoinSet::new();
    task.spawn_on(carried, &runtime::handle()?);
    loop {
        py.detach(|| {
            // A signal ends the poll early, and is looked at below; one that came a moment before it, after a while.
            let _ = poll(&mut [PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)], Some(&LOOK_AGAIN));
        });
        match told.try_recv() {
            Ok(outcome) => return Ok(outcome),
            Err(TryRecvError::Empty) => py.check_signals()?,
            Err(TryRecvError::Disconnected) => {
                return Err(PyRuntimeError::new_err("what was waited for ended without a result"));
            }
        }
    }
}
