//! Who keeps leases alive without renewing them: processes, watched by the kernel's word, whatever runs in a control
//! group, and open connections.
//!
//! One task for each watched process or group; it ends when they do, when its lease is over, or with the agent.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpupool_api::lease::IfTaken;
use gpupool_confine::process::{ProcessHandle, ProcessId};
use gpupool_core::lease::Holder;
use gpupool_core::{LeaseId, Millis};
use tokio::task::AbortHandle;

use crate::ending::Ending;
use crate::groups::Groups;
use crate::net::PeerProcess;
use crate::owner::{Owner, Refusal};

/// The holders of this agent's leases. Its clones share them.
#[derive(Clone)]
pub struct Holders {
    owner: Owner,
    shared: Arc<Mutex<Shared>>,
}

/// A lock rather than messages: it is held for one look into a map.
#[derive(Default)]
struct Shared {
    watches: HashMap<LeaseId, AbortHandle>,
    connections: HashMap<LeaseId, usize>,
}

/// How often it is looked whether anything still runs in a group.
const LOOK_AT_GROUPS: std::time::Duration = std::time::Duration::from_millis(500);
/// How long a fact waits before it is told again to an owner that is busy.
const TELL_AGAIN: std::time::Duration = std::time::Duration::from_millis(50);

impl Holders {
    /// Nobody yet.
    pub fn new(owner: Owner) -> Self {
        Self { owner, shared: Arc::default() }
    }

    /// A process of a connection, as a holder and as what runs under the lease.
    pub fn of(&self, process: &PeerProcess, if_taken: IfTaken) -> (Holder, ProcessId) {
        let (pid, started) = (process.pid, process.start_ticks);
        let holder = match if_taken {
            IfTaken::EndCaller => Holder::Process { pid, started },
            IfTaken::EndJobs => Holder::Supervisor { pid, started },
        };
        (holder, ProcessId { pid, started })
    }

    /// Watches a process that now holds a lease, in place of one that did.
    pub fn watch(&self, lease: LeaseId, holder: Holder, process: PeerProcess) {
        self.watch_fd(lease, holder, Ok(process.pidfd));
    }

    /// Watches the holders that rows tell of, after a restart of the agent. Those that are gone are told at once, those
    /// that were connections get `grace` to connect again.
    pub fn resume(&self, held: Vec<(LeaseId, Holder)>, groups: &Arc<Groups>, grace: Millis) {
        for (lease, holder) in held {
            match &holder {
                &(Holder::Process { pid, started } | Holder::Supervisor { pid, started }) => {
                    match ProcessHandle::open(ProcessId { pid, started }) {
                        Ok(Some(handle)) => self.watch_fd(lease, holder, handle.as_fd().try_clone_to_owned()),
                        Ok(None) => self.gone(lease, holder, Millis(0)),
                        Err(error) => {
                            tracing::error!(lease = lease.0, pid, %error, "cannot tell whether the holder of a lease lives");
                        }
                    }
                }
                Holder::Connection => self.gone(lease, holder, grace),
                Holder::Cgroup(_) => self.watch_group(lease, holder, groups.clone()),
            }
        }
    }

    fn watch_fd(&self, lease: LeaseId, holder: Holder, pidfd: io::Result<OwnedFd>) {
        let ending = match pidfd.and_then(Ending::of) {
            Ok(ending) => ending,
            Err(error) => {
                tracing::error!(lease = lease.0, %error, "cannot watch the holder of a lease");
                return;
            }
        };
        self.watch_until(lease, holder, async move { ending.wait().await });
    }

    /// Watches the control group that now holds a lease, in place of who did.
    pub fn watch_group(&self, lease: LeaseId, holder: Holder, groups: Arc<Groups>) {
        self.watch_until(lease, holder, async move {
            while groups.is_populated(lease) != Some(false) {
                tokio::time::sleep(LOOK_AT_GROUPS).await;
            }
        });
    }

    fn watch_until(&self, lease: LeaseId, holder: Holder, ended: impl Future<Output = ()> + Send + 'static) {
        let holders = self.clone();
        let task = tokio::spawn(async move {
            ended.await;
            holders.tell(lease, holder, Millis(0)).await;
            holders.lock().watches.remove(&lease);
        });
        if let Some(before) = self.lock().watches.insert(lease, task.abort_handle()) {
            before.abort();
        }
    }

    /// A holder is gone: told in the background, for as long as it takes.
    pub fn gone(&self, lease: LeaseId, holder: Holder, grace: Millis) {
        let holders = self.clone();
        tokio::spawn(async move { holders.tell(lease, holder, grace).await });
    }

    /// Tells the owner, again and again while it is busy: nobody else would.
    async fn tell(&self, lease: LeaseId, holder: Holder, grace: Millis) {
        while self.owner.holder_gone(lease, holder.clone(), grace) == Err(Refusal::Busy) {
            tokio::time::sleep(TELL_AGAIN).await;
        }
    }

    /// A lease is over: nobody holds it any more.
    pub fn forget(&self, lease: LeaseId) {
        if let Some(task) = self.lock().watches.remove(&lease) {
            task.abort();
        }
    }

    /// A connection now holds a lease.
    pub fn connection_opened(&self, lease: LeaseId) {
        *self.lock().connections.entry(lease).or_default() += 1;
    }

    /// One of its connections closed; says whether it was the last.
    pub fn connection_closed(&self, lease: LeaseId) -> bool {
        let mut shared = self.lock();
        let Some(count) = shared.connections.get_mut(&lease) else { return false };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        shared.connections.remove(&lease);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
