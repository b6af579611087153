//! Processes and signals of both helpers: forking, child events, killing all descendants. Most of these system calls
//! have no safe wrapper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::process::{Pid, WaitOptions, WaitStatus, setpriority_process, wait};

use crate::limits::{CLEAN_UP_TIMEOUT, KILL_ROUND_INTERVAL, STUCK_KILL_INTERVAL};
use crate::process::kill_descendants;
use crate::wait_until_ready;

/// File descriptor that becomes readable when a child of this process changes its state.
#[derive(Debug)]
pub(super) struct ChildSignalFd(OwnedFd);

impl ChildSignalFd {
    /// Blocks all signals of this thread, so that only SIGKILL and SIGSTOP can interfere, and listens for SIGCHLD.
    #[allow(unsafe_code, reason = "signal masks and signalfd have no safe wrapper")]
    pub(super) fn open() -> io::Result<Self> {
        // SAFETY: both sets are local and initialised by sigfillset/sigemptyset before any use; signalfd's result is
        // checked before it is owned.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            check_errno(libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut()))?;
            let mut children: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut children);
            libc::sigaddset(&mut children, libc::SIGCHLD);
            let fd = libc::signalfd(-1, &children, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Clears the pending events; the caller reaps after this, never before, so that none is missed.
    pub(super) fn clear(&self) {
        let mut buffer = [0_u8; size_of::<libc::signalfd_siginfo>() * 4];
        while rustix::io::read(&self.0, &mut buffer).is_ok_and(|length| length > 0) {}
    }
}

impl AsFd for ChildSignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Unblocks all signals and restores the default action of SIGPIPE (Rust programs ignore it), as a fresh program
/// expects. Other ignored signals stay ignored, as `nohup` needs.
#[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
pub(super) fn reset_signals() -> io::Result<()> {
    // SAFETY: the set is local and initialised before use; SIG_DFL is a valid disposition.
    unsafe {
        if libc::signal(libc::SIGPIPE, libc::SIG_DFL) == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        check_errno(libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()))
    }
}

/// Forks this process, which must have a single thread: `None` in the child, its pid in the parent.
#[allow(unsafe_code, reason = "fork has no safe wrapper")]
pub(super) fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: helpers are fresh processes with one thread (run_helper_if_requested runs before any other is made), so
    // the child finds no lock held by a thread it does not have.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Pid::from_raw(pid)),
    }
}

fn check_errno(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// Kills all descendants, round after round, until none is left or the timeout has passed; returns the number left.
/// Orphans become our children because we are a child subreaper: the job is gone exactly when no child is left.
/// `reaped` receives every child that exited.
pub(super) fn kill_all_descendants(
    events: &ChildSignalFd,
    patience: Option<Duration>,
    mut reaped: impl FnMut(Pid, WaitStatus),
) -> u32 {
    let begun = Instant::now();
    // Thousands of forking processes would starve this one; only root may raise its priority.
    let _ = setpriority_process(None, -20);
    loop {
        events.clear();
        if !reap_children(&mut reaped) {
            return 0;
        }
        let left = kill_descendants();
        if patience.is_some_and(|patience| begun.elapsed() >= patience) {
            return u32::try_from(left).unwrap_or(u32::MAX).max(1);
        }
        let pause = if begun.elapsed() < CLEAN_UP_TIMEOUT { KILL_ROUND_INTERVAL } else { STUCK_KILL_INTERVAL };
        // The next child that exits ends the wait; the timeout is for processes that are not our children yet. An error
        // only starts the next round early.
        let _ = wait_until_ready(events, PollFlags::IN, pause);
    }
}

/// Reaps all children that changed their state; returns whether this process has children.
pub(super) fn reap_children(mut changed: impl FnMut(Pid, WaitStatus)) -> bool {
    loop {
        match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            Ok(Some((pid, status))) => changed(pid, status),
            Ok(None) => return true,
            Err(error) => return error != rustix::io::Errno::CHILD,
        }
    }
}
