//! Starting processes that cannot escape: spawn, process tree, cgroups, limits, kill.
//!
//! - [`spawn`]: a job that never outlives the program that started it.
//! - [`keeper`]: the small processes between starter and job that see to that. A program that spawns jobs calls
//!   [`keeper::run_helper_if_requested`] first thing in its `main`.
//! - [`cgroup`]: one control group per lease, with limits the kernel enforces and a kill nothing dodges.
//! - [`bounds`]: what a job may use, kept by the kernel where it can, else by looking.
//! - [`process`]: a process known for sure (pid and start time), and its descendants.

pub mod bounds;
pub mod cgroup;
pub mod keeper;
pub mod limits;
pub mod process;
pub mod spawn;

use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub use rustix::process::Signal;

/// Waits until a file descriptor is ready or the patience is over; `false` for the latter. A signal ends the wait early.
pub(crate) fn wait_for(fd: impl AsFd, event: PollFlags, patience: Duration) -> rustix::io::Result<bool> {
    let tv_sec = i64::try_from(patience.as_secs()).unwrap_or(i64::MAX);
    let patience = Timespec { tv_sec, tv_nsec: i64::from(patience.subsec_nanos()) };
    match poll(&mut [PollFd::new(&fd, event)], Some(&patience)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Locks a mutex whose value is whole at all times, so that a panic of another thread changes nothing about it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something while these signals, or all where none are named, wait for this thread. Threads it starts take none of
/// them either.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
pub fn with_signals_blocked<T>(signals: &[Signal], action: impl FnOnce() -> T) -> T {
    struct Before(libc::sigset_t);
    impl Drop for Before {
        fn drop(&mut self) {
            // SAFETY: the set was filled by the system.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
        }
    }
    // SAFETY: both sets are local, and filled before they are used.
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
        Before(before)
    };
    action()
}
