//! The teardown of an ended lease: the node ends all processes under the lease, then reports it drained.
//!
//! The control group of the lease is killed as a whole. If the lease was taken from its holder, the holder gets
//! SIGTERM, and is killed with its descendants after a grace. A holder of several leases is not signalled; its jobs
//! under this lease are killed unless they exit in time.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::RevocationAction;
use gpupool_confine::process::{ProcFs, ProcessHandle, ProcessId};
use gpupool_core::LeaseId;
use rustix::process::Signal;
use tokio::time::{Instant, timeout_at};

use super::attachments::{Attachment, ProcessExit};
use super::job_cgroups::JobCgroups;

/// The time that a holder may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);
/// The time between two checks of whether a group is populated.
const CHECK_CGROUP: Duration = Duration::from_millis(250);
/// The time after which a group that could not be killed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Ends all processes under a lease, however long that takes.
pub(super) async fn tear_down(lease: LeaseId, attachment: Attachment, taken_back: bool, cgroups: &Arc<JobCgroups>) {
    if taken_back && let Some(process) = attachment.process {
        match attachment.on_revocation {
            RevocationAction::EndCaller => end_holder(lease, process).await,
            RevocationAction::EndJobs => {
                let until = Instant::now() + GRACE;
                end_jobs(lease, attachment.jobs, until).await;
                // Jobs from before a restart are known by their control group only.
                while Instant::now() < until && cgroups.is_populated(lease) == Some(true) {
                    tokio::time::sleep(CHECK_CGROUP).await;
                }
            }
        }
    }
    if attachment.cgroup.is_some() {
        remove_cgroup(lease, cgroups).await;
    }
}

/// Kills everything in the control group of a lease and removes the group, however long that takes.
pub(super) async fn remove_cgroup(lease: LeaseId, cgroups: &Arc<JobCgroups>) {
    loop {
        let (cgroups, span) = (cgroups.clone(), tracing::Span::current());
        let removed = tokio::task::spawn_blocking(move || span.in_scope(|| cgroups.remove(lease)));
        if removed.await.unwrap_or(false) {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Sends SIGTERM to the holder, and kills it with its descendants after a grace.
async fn end_holder(lease: LeaseId, process: ProcessId) {
    let Ok(Some(holder)) = ProcessHandle::open(process) else { return };
    tracing::info!(lease = lease.0, pid = process.pid, "asking the holder of a revoked lease to end");
    if let Err(error) = holder.signal(Signal::TERM) {
        tracing::warn!(lease = lease.0, pid = process.pid, %error, "cannot end the holder of a lease");
        return;
    }
    let Ok(exit) = holder.as_fd().try_clone_to_owned().and_then(ProcessExit::watch) else { return };
    if tokio::time::timeout(GRACE, exit.wait()).await.is_ok() {
        return;
    }
    tracing::warn!(lease = lease.0, pid = process.pid, "killing the holder of a revoked lease");
    kill_tree(process);
    let _ended = tokio::time::timeout(GRACE, exit.wait()).await;
}

/// Waits until the jobs of a lease have ended, then kills the others with their descendants.
async fn end_jobs(lease: LeaseId, jobs: Vec<ProcessId>, until: Instant) {
    let watched: Vec<(ProcessId, ProcessExit)> =
        jobs.into_iter().filter_map(|job| Some((job, exit_of(job)?))).collect();
    let mut left = Vec::new();
    for (job, exit) in &watched {
        if timeout_at(until, exit.wait()).await.is_err() {
            left.push(*job);
        }
    }
    if left.is_empty() {
        return;
    }
    tracing::warn!(lease = lease.0, jobs = left.len(), "killing the jobs of a revoked lease");
    for job in left {
        kill_tree(job);
    }
    for (_, exit) in &watched {
        let _ended = timeout_at(until + GRACE, exit.wait()).await;
    }
}

fn exit_of(process: ProcessId) -> Option<ProcessExit> {
    let handle = ProcessHandle::open(process).ok().flatten()?;
    handle.as_fd().try_clone_to_owned().and_then(ProcessExit::watch).ok()
}

/// Kills a process with its descendants.
fn kill_tree(process: ProcessId) {
    let descendants = ProcFs::system().descendants(process.pid).unwrap_or_default();
    for id in std::iter::once(process).chain(descendants) {
        if let Ok(Some(handle)) = ProcessHandle::open(id) {
            // A process that has exited meanwhile needs no signal.
            let _ = handle.signal(Signal::KILL);
        }
    }
}
