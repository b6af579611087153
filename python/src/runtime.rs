//! State of one process: the thread that drives futures, its access to the interpreter, and values that a forked child
//! must not touch.
//!
//! The thread starts at its first use, and again in a forked child. It lives as long as the process. A forked child has
//! none of its parent's threads, so it does not use their values.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that drive futures. They only wait for sockets and never for the interpreter, so a second thread would not
/// help.
const WORKER_THREADS: usize = 1;

struct ProcessRuntime {
    process: u32,
    runtime: Runtime,
}

static RUNTIME: AtomicPtr<ProcessRuntime> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the runtime of this process.
pub(crate) fn handle() -> PyResult<Handle> {
    process_runtime()
        .map(|runtime| runtime.handle().clone())
        .map_err(|error| PyRuntimeError::new_err(format!("cannot start the client threads: {error}")))
}

#[allow(
    unsafe_code,
    reason = "a value that lives as long as the process, found without a lock that a fork could leave taken"
)]
fn process_runtime() -> io::Result<&'static Runtime> {
    let here = std::process::id();
    loop {
        let current = RUNTIME.load(Ordering::Acquire);
        // SAFETY: only ever set to a leaked value, so it lives forever.
        if let Some(started) = unsafe { current.as_ref() }.filter(|started| started.process == here) {
            return Ok(&started.runtime);
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKER_THREADS)
            .thread_name("gpupool")
            .on_thread_start(block_signals)
            .enable_all()
            .build()?;
        let ours = Box::into_raw(Box::new(ProcessRuntime { process: here, runtime }));
        if RUNTIME.compare_exchange(current, ours, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: created above and not shared.
            drop(unsafe { Box::from_raw(ours) });
        }
    }
}

/// Blocks all signals in this thread: Python handles them in its main thread.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
pub(crate) fn block_signals() {
    // SAFETY: the set is local and filled before use.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

// Access of our threads to the interpreter, and its end.
//
// An interpreter that exits also terminates every foreign thread that waits for it, and thereby the whole process.
// Before that, our threads are therefore locked out, and the end waits for those inside.

static THREADS_INSIDE: ProcessCount = ProcessCount::new();
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Maximum time that the exit waits for a Python function that one of our threads still runs.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
const SHUTDOWN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Runs a closure with the interpreter; `None` once the interpreter is about to exit.
pub(crate) fn with_interpreter<T>(run: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _inside = THREADS_INSIDE.enter();
    if IS_CLOSED.load(Ordering::SeqCst) {
        return None;
    }
    Python::try_attach(run)
}

/// Registers the lock-out of our threads with `atexit`: registered first, it is called last.
pub(crate) fn register_shutdown(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_interpreter_access = wrap_pyfunction!(close_interpreter_access, module)?;
    module.py().import("atexit")?.call_method1("register", (close_interpreter_access,)).map(drop)
}

/// Locks our threads out of the interpreter and waits until none is inside.
#[pyfunction]
fn close_interpreter_access(py: Python<'_>) {
    IS_CLOSED.store(true, Ordering::SeqCst);
    let until = Instant::now() + SHUTDOWN_TIMEOUT;
    py.detach(|| {
        while THREADS_INSIDE.get() > 0 && Instant::now() < until {
            std::thread::sleep(SHUTDOWN_POLL_INTERVAL);
        }
    });
}

// Values that belong to one process: a forked child has a copy, which it neither uses nor drops.
//
// The threads behind such a value belong to the parent. Dropping a copy could wait for a lock that one of them held at
// the fork, and could release what the parent still uses.

/// A value of the process that created it.
pub(crate) struct ProcessOwned<T> {
    value: ManuallyDrop<T>,
    process: u32,
    /// Name of the value in errors.
    name: &'static str,
}

impl<T> ProcessOwned<T> {
    /// Creates a value that belongs to this process.
    pub fn new(name: &'static str, value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: std::process::id(), name }
    }

    /// Returns the value; an error in any other process than its own.
    pub fn get(&self) -> PyResult<&T> {
        if self.is_ours() {
            return Ok(&self.value);
        }
        let (name, process) = (self.name, self.process);
        Err(PyRuntimeError::new_err(format!(
            "this {name} was started in another process (pid {process}) and cannot be used here; create a new one after a fork"
        )))
    }

    /// Whether the value belongs to this process.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for ProcessOwned<T> {
    #[allow(unsafe_code, reason = "dropped by hand, because a forked child must not")]
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // The drop may spawn tasks that release something.
        let handle = handle();
        let _entered = handle.as_ref().ok().map(|handle| handle.enter());
        // SAFETY: not used after this, and dropped only here.
        unsafe { ManuallyDrop::drop(&mut self.value) };
    }
}

// A count of one process: a forked child starts at zero, and no lock can be held at the fork.

/// Process id in the upper half, count in the lower half.
pub(crate) struct ProcessCount(AtomicU64);

impl ProcessCount {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns the count of this process.
    pub fn get(&self) -> u64 {
        count_of_process(self.0.load(Ordering::SeqCst))
    }

    /// Increments the count until the guard is dropped.
    pub fn enter(&'static self) -> CountGuard {
        self.change(1);
        CountGuard(self)
    }

    fn change(&self, by: i64) {
        let here = u64::from(std::process::id()) << 32;
        // The closure always returns a value, so this cannot fail.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |current| {
            Some(here | count_of_process(current).saturating_add_signed(by))
        });
    }
}

/// Decrements a [`ProcessCount`] on drop.
pub(crate) struct CountGuard(&'static ProcessCount);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.change(-1);
    }
}

fn count_of_process(current: u64) -> u64 {
    if current >> 32 == u64::from(std::process::id()) { current & u64::from(u32::MAX) } else { 0 }
}
