//! The thread that carries what is asynchronous: started when first needed, and anew in a child that was forked.
//!
//! It lives as long as the process. A forked child has none of its parent's threads: what belongs to them is left as it is,
//! and touched no more.

use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};

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
