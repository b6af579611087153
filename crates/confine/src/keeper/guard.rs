//! The guard: the starter's child and the keeper's parent. It does nothing but wait for one of them to be killed.

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, set_child_subreaper, setpgid};

use super::message::{FromKeeper, Link};
use super::order::Order;
use super::signals::{ChildEvents, fork};
use super::sweep::{reap, sweep};
use super::{child, keep};

/// Who watches whom.
#[derive(Debug)]
pub(super) struct Watch {
    /// To the starter; hangs up when the starter's end is closed.
    pub(super) link: Link,
    /// The starter itself: a copy of its end of the link may live on in a process it forked.
    pub(super) starter: OwnedFd,
}

/// Runs as guard, and in a forked process as keeper; ends with nothing of the job left.
pub(super) fn run(order: Order) -> ! {
    let outcome = begin(order);
    // Errors before the job exists reach the starter as the end of the link; the reason goes where a person may see it.
    if let Err(error) = &outcome {
        eprintln!("gpupool: the keeper of a job could not be set up: {error}");
    }
    std::process::exit(i32::from(outcome.is_err()))
}

fn begin(order: Order) -> std::io::Result<()> {
    let link = adopt(order.link)?;
    let events = ChildEvents::block_and_listen()?;
    // Out of the terminal's foreground group: Ctrl-C and Ctrl-Z are for the job.
    setpgid(None, None)?;
    set_child_subreaper(Some(getpid()))?;
    let Some(parent) = getppid().filter(|parent| parent.as_raw_nonzero().get() == order.starter) else {
        return Ok(()); // The starter is gone already.
    };
    let starter = pidfd_open(parent, PidfdFlags::empty())?;
    let guard = pidfd_open(getpid(), PidfdFlags::empty())?;
    let watch = Watch { link, starter };
    match fork()? {
        None => {
            drop(events);
            keep::run(order, watch, guard)
        }
        Some(keeper) => {
            drop(guard);
            child::let_go_of_streams()?;
            guard_until_the_end(&watch, &events, keeper);
            Ok(())
        }
    }
}

fn guard_until_the_end(watch: &Watch, events: &ChildEvents, keeper: Pid) {
    loop {
        if starter_is_gone(watch, events) {
            sweep(events, None, |_, _| {});
            return;
        }
        events.clear();
        let mut end = None;
        reap(|pid, status| {
            if pid == keeper && (status.exited() || status.signaled()) {
                end = Some(status);
            }
        });
        let Some(status) = end else { continue };
        // Orderly or not, nothing is left after this.
        sweep(events, None, |_, _| {});
        if status.exit_status() != Some(0) {
            let signal = Signal::KILL.as_raw();
            let _ = watch.link.send(FromKeeper::Signalled { signal, stuck: 0 });
        }
        return;
    }
}

/// Waits for something to happen; whether it is the starter's end.
fn starter_is_gone(watch: &Watch, events: &ChildEvents) -> bool {
    let mut fds = [
        // No events asked for: messages are the keeper's to read. Hanging up is always told.
        PollFd::from_borrowed_fd(watch.link.as_fd(), PollFlags::empty()),
        PollFd::from_borrowed_fd(watch.starter.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => !fds[0].revents().is_empty() || !fds[1].revents().is_empty(),
        Err(Errno::INTR) => false,
        // Without a way to watch, the only safe assumption is the worst.
        Err(_) => true,
    }
}

#[allow(unsafe_code, reason = "takes over the file descriptor named on the command line")]
fn adopt(fd: RawFd) -> std::io::Result<Link> {
    // SAFETY: the starter left exactly this descriptor open for us and named it; nothing else in this fresh process
    // owns it. A number that is not open fails in the next call and is never used.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(error) = rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC) {
        std::mem::forget(socket);
        return Err(error.into());
    }
    Ok(Link::new(socket))
}
