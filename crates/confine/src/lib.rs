//! Starts processes that cannot escape: spawn, process tree, cgroups, limits, kill.
//!
//! - [`spawn`]: a job that never outlives the program that started it.
//! - [`supervisor`]: the small helper processes between starter and job that guarantee this. A program that spawns jobs
//!   calls [`supervisor::run_helper_if_requested`] first in its `main`.
//! - [`cgroup`]: one control group per lease, with limits that the kernel enforces and a kill that no process escapes.
//! - [`bounds`]: bounds on a job's resources, enforced by the kernel if possible and by polling otherwise.
//! - [`process`]: a process identified by pid and start time, and its descendants.

pub mod bounds;
pub mod cgroup;
pub mod limits;
pub mod process;
pub mod spawn;
pub mod supervisor;

use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub use rustix::process::Signal;

/// Waits until a file descriptor is ready; `false` after the timeout. A signal ends the wait early.
pub(crate) fn wait_until_ready(fd: impl AsFd, event: PollFlags, patience: Duration) -> rustix::io::Result<bool> {
    let tv_sec = i64::try_from(patience.as_secs()).unwrap_or(i64::MAX);
    let patience = Timespec { tv_sec, tv_nsec: i64::from(patience.subsec_nanos()) };
    match poll(&mut [PollFd::new(&fd, event)], Some(&patience)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Locks a mutex whose value is always consistent, so that a panic of another thread does not matter.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs an action while these signals (all, if none are named) are blocked in this thread and in threads that it
/// starts.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
pub fn with_signals_blocked<T>(signals: &[Signal], action: impl FnOnce() -> T) -> T {
    struct SavedSignalMask(libc::sigset_t);
    impl Drop for SavedSignalMask {
        fn drop(&mut self) {
            // SAFETY: the system filled the set.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
        }
    }
    // SAFETY: both sets are local and are filled before use.
    let _before = unsafe {
        let (mut blocked, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut blocked);
        if signals.is_empty() {
            libc::sigfillset(&mut blocked);
        }
        for signal in signals {
            libc::sigaddset(&mut blocked, signal.as_raw());
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut before);
        SavedSignalMask(before)
    };
    action()
}
