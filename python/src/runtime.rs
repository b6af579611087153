//! What belongs to one process: the thread that carries what is asynchronous, its way into the interpreter, and values that a
//! forked child must leave alone.
//!
//! The thread is started when first needed, and anew in a child that was forked. It lives as long as the process. A forked child has none of its parent's threads: what belongs to them is left as it is,
//! and touched no more.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that carry futures. They wait for sockets; nothing computes there, and nothing waits for the interpreter: a second
/// thread would only be woken for nothing.
const THREADS: usize = 1;

struct Started {
    process: u32,
    runtime: Runtime,
}

static STARTED: AtomicPtr<Started> = AtomicPtr::new(std::ptr::null_mut());

/// Carries futures of this process.
pub(crate) fn handle() -> PyResult<Handle> {
    started().map(|runtime| runtime.handle().clone()).map_err(|error| {
        PyRuntimeError::new_err(format!("the threads that talk to servers cannot be started: {error}"))
    })
}

#[allow(
    unsafe_code,
    reason = "a value that lives as long as the process, found without a lock that a fork could leave taken"
)]
fn started() -> io::Result<&'static Runtime> {
    let here = std::process::id();
    loop {
        let seen = STARTED.load(Ordering::Acquire);
        // SAFETY: only ever set to what was leaked, so it lives for ever.
        if let Some(started) = unsafe { seen.as_ref() }.filter(|started| started.process == here) {
            return Ok(&started.runtime);
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("gpupool")
            .on_thread_start(take_no_signals)
            .enable_all()
            .build()?;
        let ours = Box::into_raw(Box::new(Started { process: here, runtime }));
        if STARTED.compare_exchange(seen, ours, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(ours) });
        }
    }
}

/// Signals are Python's, whose main thread is interrupted by them.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
pub(crate) fn take_no_signals() {
    // SAFETY: the set is local, and filled before it is used.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

// How a thread of ours gets hold of the interpreter, and how that ends before the interpreter does.
//
// An interpreter that ends also ends, from within, every foreign thread that waits for it, which takes the whole process
// down. So the last thing before the end is that our threads are kept out and those inside are waited for.

static INSIDE: ProcessCount = ProcessCount::new();
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// How long the end waits for a function of the program that one of our threads still runs.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Runs something that needs the interpreter; `None` once it is about to end.
pub(crate) fn attached<T>(run: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _inside = INSIDE.enter();
    if IS_CLOSED.load(Ordering::SeqCst) {
        return None;
    }
    Python::try_attach(run)
}

/// Has Python keep our threads out before it ends: registered first, it is called last.
pub(crate) fn watch(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let keep_out = wrap_pyfunction!(keep_out, module)?;
    module.py().import("atexit")?.call_method1("register", (keep_out,)).map(drop)
}

/// Keeps our threads out of the interpreter from now on, and waits until none is inside.
#[pyfunction]
fn keep_out(py: Python<'_>) {
    IS_CLOSED.store(true, Ordering::SeqCst);
    let until = Instant::now() + PATIENCE;
    py.detach(|| {
        while INSIDE.get() > 0 && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    });
}

// What belongs to one process: a forked child has a copy of it, which it neither uses nor drops.
//
// The threads behind such a thing are the parent's. Dropping a copy of it could wait for a lock that one of them held at the
// fork, and could give back what the parent still uses; so the child leaves it where it is.

/// A value of the process that made it.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    process: u32,
    /// What it is called when a child wants to use it.
    name: &'static str,
}

impl<T> Owned<T> {
    /// Makes a value this process' own.
    pub fn new(name: &'static str, value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: std::process::id(), name }
    }

    /// The value; an error in any other process than the one that made it.
    pub fn get(&self) -> PyResult<&T> {
        if self.is_ours() {
            return Ok(&self.value);
        }
        let (name, process) = (self.name, self.process);
        Err(PyRuntimeError::new_err(format!(
            "this {name} was started in another process (pid {process}) and stays there; make a new one after a fork"
        )))
    }

    /// Whether this process made it.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for Owned<T> {
    #[allow(unsafe_code, reason = "dropped by hand, because a forked child must not")]
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // What is dropped may leave tasks behind that give something back.
        let handle = handle();
        let _entered = handle.as_ref().ok().map(|handle| handle.enter());
        // SAFETY: nobody uses it after this, and it is dropped only here.
        unsafe { ManuallyDrop::drop(&mut self.value) };
    }
}

// A count that is one process' own: a forked child begins at nothing, and no lock can be taken at the fork.

/// The process in the upper half, the count in the lower one.
pub(crate) struct ProcessCount(AtomicU64);

impl ProcessCount {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// How many there are in this process.
    pub fn get(&self) -> u64 {
        counted(self.0.load(Ordering::SeqCst))
    }

    /// Counts one more until what this gives is dropped.
    pub fn enter(&'static self) -> Entered {
        self.change(1);
        Entered(self)
    }

    fn change(&self, by: i64) {
        let here = u64::from(std::process::id()) << 32;
        // Always changed, so there is nothing to fail.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |seen| {
            Some(here | counted(seen).saturating_add_signed(by))
        });
    }
}

/// One that a [`ProcessCount`] counts.
pub(crate) struct Entered(&'static ProcessCount);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.change(-1);
    }
}

fn counted(seen: u64) -> u64 {
    if seen >> 32 == u64::from(std::process::id()) { seen & u64::from(u32::MAX) } else { 0 }
}
