//! What runs under a lease that is over has to go: groups are killed whole, a holder the lease was taken from is asked
//! to end and then made to. One that holds other leases too is left alone; what it runs under this one is ended, unless it
//! does so itself in time.
//!
//! One task for each such lease; it ends when all of it is gone, or with the agent (which takes it up again at its next
//! start).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::IfTaken;
use gpupool_confine::process::{ProcFs, ProcessHandle, ProcessId};
use gpupool_core::LeaseId;
use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::ending::Ending;
use crate::groups::Groups;
use crate::owner::{Owner, Refusal, Tie};

/// How long a holder may take to end after it was asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How often it is looked whether anything still runs in a group.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long a group that could not be killed is left before it is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How long an owner that is busy is left before it is told again.
pub const TELL_AGAIN: Duration = Duration::from_millis(50);

/// A lease that is over.
#[derive(Debug)]
pub struct Leave {
    /// Which.
    pub lease: LeaseId,
    /// What runs under it.
    pub tie: Tie,
    /// Whether its holder may not know that it is over.
    pub was_taken: bool,
}

/// Lets leases leave until the sender is gone.
pub async fn run(mut leaves: mpsc::UnboundedReceiver<Leave>, groups: Arc<Groups>, owner: Owner) {
    while let Some(leave) = leaves.recv().await {
        tokio::spawn(one(leave, groups.clone(), owner.clone()));
    }
}

async fn one(mut leave: Leave, groups: Arc<Groups>, owner: Owner) {
    if leave.was_taken
        && let Some(process) = leave.tie.process
    {
        match leave.tie.if_taken {
            IfTaken::EndCaller => end_holder(leave.lease, process).await,
            IfTaken::EndJobs => {
                let until = Instant::now() + GRACE;
                end_jobs(leave.lease, std::mem::take(&mut leave.tie.jobs), until).await;
                // Jobs of before a restart are known by their group only.
                while Instant::now() < until && groups.is_populated(leave.lease) == Some(true) {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
    }
    if leave.tie.group.is_some() {
        remove_group(leave.lease, &groups).await;
    }
    while owner.gone(leave.lease) == Err(Refusal::Busy) {
        tokio::time::sleep(TELL_AGAIN).await;
    }
}

/// Kills what runs in the group of a lease and removes it, however long that takes.
pub async fn remove_group(lease: LeaseId, groups: &Arc<Groups>) {
    loop {
        let groups = groups.clone();
        if tokio::task::spawn_blocking(move || groups.remove(lease)).await.unwrap_or(false) {
            return;
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// Asks the holder to end, and after a grace ends it with all that descends from it.
async fn end_holder(lease: LeaseId, process: ProcessId) {
    let Ok(Some(holder)) = ProcessHandle::open(process) else { return };
    tracing::info!(lease = lease.0, pid = process.pid, "asking the holder of a lease that was taken back to end");
    if let Err(error) = holder.signal(Signal::TERM) {
        tracing::warn!(lease = lease.0, pid = process.pid, %error, "cannot end the holder of a lease");
        return;
    }
    let Ok(watched) = holder.as_fd().try_clone_to_owned().and_then(Ending::of) else { return };
    if tokio::time::timeout(GRACE, watched.wait()).await.is_ok() {
        return;
    }
    tracing::warn!(lease = lease.0, pid = process.pid, "killing the holder of a lease that was taken back");
    kill_tree(process);
    let _ended = tokio::time::timeout(GRACE, watched.wait()).await;
}

/// Waits until the jobs of a lease have ended, and then ends those that have not with all that descends from them.
async fn end_jobs(lease: LeaseId, jobs: Vec<ProcessId>, until: Instant) {
    let watched: Vec<(ProcessId, Ending)> = jobs.into_iter().filter_map(|job| Some((job, ending_of(job)?))).collect();
    let mut left = Vec::new();
    for (job, ending) in &watched {
        if timeout_at(until, ending.wait()).await.is_err() {
            left.push(*job);
        }
    }
    if left.is_empty() {
        return;
    }
    tracing::warn!(lease = lease.0, jobs = left.len(), "killing the jobs of a lease that was taken back");
    for job in left {
        kill_tree(job);
    }
    for (_, ending) in &watched {
        let _ended = timeout_at(until + GRACE, ending.wait()).await;
    }
}

fn ending_of(process: ProcessId) -> Option<Ending> {
    let handle = ProcessHandle::open(process).ok().flatten()?;
    handle.as_fd().try_clone_to_owned().and_then(Ending::of).ok()
}

/// Kills a process with all that descends from it.
fn kill_tree(process: ProcessId) {
    let descendants = ProcFs::here().tree(process.pid).unwrap_or_default();
    for id in std::iter::once(process).chain(descendants) {
        if let Ok(Some(handle)) = ProcessHandle::open(id) {
            // One that is gone by now is what was wanted.
            let _ = handle.signal(Signal::KILL);
        }
    }
}
