//! Killing everything below this process. Orphans come to us, as we are a child subreaper: the job is gone exactly
//! when we have no child left.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, WaitOptions, WaitStatus, setpriority_process, wait};

use super::signals::ChildEvents;
use crate::limits::{CLEAN_UP_PATIENCE, KILL_ROUND_PAUSE, STUCK_ROUND_PAUSE};
use crate::process::kill_descendants;
use crate::timespec;

/// Kills all descendants, round after round, until none is left or the patience is over; how many are left then.
/// Every child that ended is told to `reaped`.
pub(super) fn sweep(events: &ChildEvents, patience: Option<Duration>, mut reaped: impl FnMut(Pid, WaitStatus)) -> u32 {
    let begun = Instant::now();
    // Among a thousand processes that fork without end our turn would come late; only root may have it sooner.
    let _ = setpriority_process(None, -20);
    loop {
        events.clear();
        if reap(&mut reaped) == Children::None {
            return 0;
        }
        let left = kill_descendants();
        if patience.is_some_and(|patience| begun.elapsed() >= patience) {
            return u32::try_from(left).unwrap_or(u32::MAX).max(1);
        }
        let pause = if begun.elapsed() < CLEAN_UP_PATIENCE { KILL_ROUND_PAUSE } else { STUCK_ROUND_PAUSE };
        let mut fds = [PollFd::new(events, PollFlags::IN)];
        // Woken by the next child that ends; the pause is for those that are not our children yet. An error means
        // an early next round, which does no harm.
        let _ = poll(&mut fds, Some(&timespec(pause)));
    }
}

/// Whether this process has children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Children {
    Some,
    None,
}

/// Takes note of all children that changed their state.
pub(super) fn reap(mut changed: impl FnMut(Pid, WaitStatus)) -> Children {
    loop {
        match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            Ok(Some((pid, status))) => changed(pid, status),
            Ok(None) => return Children::Some,
            Err(rustix::io::Errno::CHILD) => return Children::None,
            Err(_) => return Children::Some,
        }
    }
}
