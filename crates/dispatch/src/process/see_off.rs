//! The end of a process: waited for, or brought about, and what it died of.

use std::time::{Duration, Instant};

use gpupool_confine::bounds::{Excess, Held};
use gpupool_confine::spawn::{Job, JobEnd, JobEvent};
use rustix::event::{PollFd, PollFlags, poll};

use crate::Cause;

/// What a process died of that we did not kill.
pub(crate) fn cause_of_death(end: Option<JobEnd>, excess: Option<Excess>) -> Cause {
    match (excess, end) {
        (Some(excess), _) => Cause::Excess(excess),
        (None, Some(JobEnd::Exited(code))) => Cause::Exited(code),
        (None, Some(JobEnd::Signalled(signal))) => Cause::Signalled(signal),
        (None, None) => Cause::Stopped,
    }
}

/// Sees a process off: how it ended, and what it used too much of, as far as the kernel tells.
pub(crate) fn see_off(mut job: Job, held: Option<&Held>, grace: Duration) -> (Option<JobEnd>, Option<Excess>) {
    let ended = |job: &mut Job| match job.try_event() {
        Ok(Some(JobEvent::Ended(end))) => Some(end),
        _ => None,
    };
    let until = Instant::now() + grace;
    let end = loop {
        if let Some(end) = ended(&mut job) {
            break Some(end);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break None;
        }
        let left =
            rustix::event::Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&job, PollFlags::IN)], Some(&left));
    };
    // Where that fails, dropping it ends it.
    let end = end.or_else(|| job.end_now().ok());
    (end, held.and_then(|held| held.excess_at_end(&job)))
}
