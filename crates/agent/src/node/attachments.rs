//! The processes and control groups that leases are attached to, and the watches over their holders.
//!
//! An attachment takes one message: the node arms the watch and creates the control group, the authority commits the
//! holder or refuses, and after a refusal the node undoes its part. A lease therefore always has a watch or a ttl. A
//! lock per lease delays a teardown while the lease is being attached. Each watch is one task; it ends with its holder,
//! with its lease, or with the agent.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpupool_api::lease::{AttachBody, AttachResponse, AttachUntil, LeaseBody, RevocationAction};
use gpupool_confine::process::{ProcessHandle, ProcessId};
use gpupool_core::{LeaseHolder, LeaseId, Token};
use tokio::io::unix::AsyncFd;
use tracing::Instrument;

use crate::authority::{Authority, Refusal};
use crate::identity::Caller;
use crate::limits::JOBS_OF_A_LEASE;
use crate::messages::{FencedLease, LeaseAttachment, NodeReport};
use crate::net::PeerProcess;

use super::job_cgroups::{JobCgroups, PreparedJob};
use super::tasks::OwnedTask;
use super::teardown::tear_down;

/// The time between two checks of whether a control group is populated.
const CHECK_CGROUP: Duration = Duration::from_millis(500);
/// The time after which a report that found the authority busy is sent again.
const REPORT_RETRY: Duration = Duration::from_millis(50);
/// The time after which a process that could not be opened is tried again.
const OPEN_RETRY: Duration = Duration::from_secs(5);

/// The processes and the control group of one lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Attachment {
    /// The process that holds the lease.
    pub process: Option<ProcessId>,
    /// The processes that end if the lease is taken back.
    pub on_revocation: RevocationAction,
    /// The jobs of the lease. A restarted agent does not know them.
    pub jobs: Vec<ProcessId>,
    /// The control group of the jobs.
    pub cgroup: Option<String>,
    /// The user of the holder, from the kernel.
    pub uid: Option<u32>,
}

impl Attachment {
    /// Adds a job. Of too many jobs the oldest, which has most likely ended, is forgotten.
    fn add_job(&mut self, job: ProcessId) {
        if self.jobs.contains(&job) {
            return;
        }
        if self.jobs.len() >= JOBS_OF_A_LEASE {
            self.jobs.remove(0);
        }
        self.jobs.push(job);
    }
}

/// A reason why a lease was not attached, or not as requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// The authority refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The lease cannot live until its job ends without a job.
    #[error("until is job; it must be caller, or job with a job_pid")]
    NoJob,
    /// The lease can only live until its job ends in a control group, and there is none.
    #[error("the lease stays tied to the caller: it can only be tied to a control group, and {0}")]
    NoCgroup(String),
    /// The process cannot be watched.
    #[error("the calling process cannot be watched: {0}")]
    Unwatchable(io::Error),
}

/// A process whose exit is awaited by its pidfd.
pub(super) struct ProcessExit(AsyncFd<OwnedFd>);

impl ProcessExit {
    /// Watches the process behind this pidfd.
    #[allow(
        unsafe_code,
        reason = "registering asks for a descriptor that stays open, which only its owner can promise"
    )]
    pub(super) fn watch(pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is owned by what is registered, and closed with it.
        unsafe { AsyncFd::register(pidfd) }.map(Self).map_err(io::Error::from)
    }

    /// Returns when the process has ended.
    pub(super) async fn wait(&self) {
        // The kernel reports no error for a running process.
        let _ended = self.0.readable().await;
    }
}

/// The attachments of the leases of this node. Clones share them.
#[derive(Clone)]
pub(super) struct Attachments {
    node: Arc<str>,
    authority: Authority,
    cgroups: Arc<JobCgroups>,
    table: Arc<AttachmentTable>,
}

/// The attachments by lease. A lock rather than messages: it is held for one access to a map.
#[derive(Default)]
pub(super) struct AttachmentTable(Mutex<HashMap<LeaseId, AttachmentEntry>>);

#[derive(Default)]
struct AttachmentEntry {
    attachment: Attachment,
    watch: Option<OwnedTask>,
    /// Held while the lease is being attached or torn down.
    change: Arc<tokio::sync::Mutex<()>>,
}

impl AttachmentTable {
    /// Whether anything is attached to the lease, or about to be.
    pub(super) fn contains(&self, lease: LeaseId) -> bool {
        self.lock().contains_key(&lease)
    }

    /// Returns the attachment of a lease.
    pub(super) fn get(&self, lease: LeaseId) -> Option<Attachment> {
        self.lock().get(&lease).map(|entry| entry.attachment.clone())
    }

    /// Forgets a lease without attachments. The caller holds its lock. If another caller waits for the lock, the entry
    /// stays, because that caller may attach the lease.
    fn forget_unused(&self, lease: LeaseId) {
        let mut table = self.lock();
        let is_unused = |entry: &AttachmentEntry| {
            // One reference is the table's, one the caller's.
            let is_awaited = Arc::strong_count(&entry.change) > 2;
            !is_awaited && entry.watch.is_none() && entry.attachment == Attachment::default()
        };
        if table.get(&lease).is_some_and(is_unused) {
            table.remove(&lease);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<LeaseId, AttachmentEntry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attachments {
    /// Returns the empty attachments of a node.
    pub(super) fn new(
        node: Arc<str>,
        authority: Authority,
        cgroups: Arc<JobCgroups>,
        table: Arc<AttachmentTable>,
    ) -> Self {
        Self { node, authority, cgroups, table }
    }

    /// Returns the name of the node.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Returns the control groups of jobs.
    pub(super) fn cgroups(&self) -> &Arc<JobCgroups> {
        &self.cgroups
    }

    /// Returns the numbers of the devices that a lease holds, for the log.
    pub(super) fn devices_of(&self, lease: LeaseId) -> String {
        let snapshot = self.authority.snapshot();
        let held = snapshot.devices_of(&self.node).filter(|state| state.view.leases.contains(&lease));
        held.map(|state| state.view.gpu_id.to_string()).collect::<Vec<_>>().join(",")
    }

    /// Attaches a lease to the calling process, and puts its job into a control group.
    pub(super) async fn attach(
        &self,
        caller: Caller,
        process: PeerProcess,
        lease: LeaseId,
        body: AttachBody,
    ) -> Result<AttachResponse, AttachError> {
        if body.until == AttachUntil::Job && body.job_pid.is_none() {
            return Err(AttachError::NoJob);
        }
        let change = self.table.lock().entry(lease).or_default().change.clone();
        let _changing = change.lock().await;
        let attached = self.attach_locked(caller, process, lease, body).await;
        if !matches!(attached, Ok(_) | Err(AttachError::NoCgroup(_))) {
            self.table.forget_unused(lease);
        }
        attached
    }

    async fn attach_locked(
        &self,
        caller: Caller,
        process: PeerProcess,
        lease: LeaseId,
        body: AttachBody,
    ) -> Result<AttachResponse, AttachError> {
        let (pid, started) = (process.pid, process.start_ticks);
        let holding = ProcessId { pid, started };
        let exit = ProcessExit::watch(process.pidfd).map_err(AttachError::Unwatchable)?;
        let token = Token(body.token);
        let prepared = match body.job_pid {
            Some(job) if self.may_attach(&caller, lease, token) => {
                self.cgroups.prepare(lease, job, holding, body.host_memory_mib)
            }
            _ => PreparedJob::default(),
        };
        let mut holder = match (self.group_that_holds(lease), body.on_revocation) {
            // Another job joins the jobs that hold the lease already.
            (Some(group), _) if body.until == AttachUntil::Job => group,
            (_, RevocationAction::EndCaller) => LeaseHolder::Process { pid, started },
            (_, RevocationAction::EndJobs) => LeaseHolder::Supervisor { pid, started },
        };
        let attachment = LeaseAttachment {
            lease,
            token,
            holder: holder.clone(),
            has_process: true,
            has_cgroup: prepared.cgroup.is_some(),
        };
        let uid = caller.uid;
        let mut attached = match self.authority.attach(caller.clone(), attachment.clone()).await {
            Ok(attached) => attached,
            Err(refusal) => {
                self.cgroups.discard(lease, &prepared);
                return Err(refusal.into());
            }
        };
        // The lease is attached. From here on it needs its watch, also if a later step fails.
        let added = self.cgroups.add(lease, &prepared);
        let mut refused = None;
        if body.until == AttachUntil::Job
            && added.is_ok()
            && let Some(path) = prepared.cgroup.as_deref()
        {
            // Only now, because a lease that is tied to an empty group would end at once.
            let by_cgroup = LeaseHolder::Cgroup(path.into());
            match self.attach_with_retry(caller, LeaseAttachment { holder: by_cgroup.clone(), ..attachment }).await {
                Ok(tied) => (attached, holder) = (tied, by_cgroup),
                Err(refusal) => refused = Some(refusal),
            }
        }
        if let Some(entry) = self.table.lock().get_mut(&lease) {
            let known = &mut entry.attachment;
            (known.process, known.on_revocation, known.uid) = (Some(holding), body.on_revocation, uid);
            known.cgroup = prepared.cgroup.clone().or(known.cgroup.take());
            prepared.job.into_iter().for_each(|job| known.add_job(job));
        }
        match &holder {
            LeaseHolder::Cgroup(_) => self.watch_cgroup(lease, holder),
            _ => self.watch(lease, holder, async move { exit.wait().await }),
        }
        match refused {
            Some(Refusal::NotDurable(why) | Refusal::DiskFull(why)) => {
                return Err(AttachError::NoCgroup(why.to_string()));
            }
            Some(refusal) => return Err(refusal.into()),
            None => {}
        }
        let caveat = prepared.caveat.or_else(|| added.as_ref().err().map(ToString::to_string));
        if body.until == AttachUntil::Job && (prepared.cgroup.is_none() || added.is_err()) {
            let why = caveat.unwrap_or_else(|| "no control group can be created here".into());
            return Err(AttachError::NoCgroup(why));
        }
        let cgroup = prepared.cgroup.filter(|_| added.is_ok());
        Ok(AttachResponse { lease: attached, cgroup, memory_limited: prepared.memory_limited && added.is_ok(), caveat })
    }

    /// Attaches a lease to another holder, with retries while the authority is busy.
    async fn attach_with_retry(&self, caller: Caller, attachment: LeaseAttachment) -> Result<LeaseBody, Refusal> {
        loop {
            match self.authority.attach(caller.clone(), attachment.clone()).await {
                Err(Refusal::Busy) => tokio::time::sleep(REPORT_RETRY).await,
                attached => return attached,
            }
        }
    }

    /// Whether the authority will let the caller attach this lease, by its latest snapshot. A stranger's request must
    /// not create a control group for a lease; the authority then refuses with the reason.
    fn may_attach(&self, caller: &Caller, lease: LeaseId, token: Token) -> bool {
        let snapshot = self.authority.snapshot();
        snapshot.lease(lease).is_some_and(|known| {
            known.state.is_granted() && known.token == Some(token) && caller.may_act_for(&known.request.owner)
        })
    }

    /// Returns the control group that holds a lease, by the latest snapshot.
    fn group_that_holds(&self, lease: LeaseId) -> Option<LeaseHolder> {
        let holder = self.authority.snapshot().lease(lease)?.holder.clone();
        holder.filter(|holder| matches!(holder, LeaseHolder::Cgroup(_)))
    }

    /// Takes over the leases of an earlier run of the agent, and watches their holders. Returns the other leases that
    /// have control groups: they have ended, and the processes in their groups must be ended.
    pub(super) fn fence(&self, leases: Vec<FencedLease>) -> Vec<LeaseId> {
        let mut with_cgroup = self.cgroups.leases();
        for FencedLease { lease, holder } in leases {
            let cgroup = self.cgroups.path(lease);
            let process = match holder {
                Some(LeaseHolder::Process { pid, started } | LeaseHolder::Supervisor { pid, started }) => {
                    Some(ProcessId { pid, started })
                }
                _ => None,
            };
            let on_revocation = match holder {
                Some(LeaseHolder::Supervisor { .. }) => RevocationAction::EndJobs,
                _ => RevocationAction::EndCaller,
            };
            let attachment = Attachment { process, on_revocation, cgroup, ..Attachment::default() };
            self.table.lock().insert(lease, AttachmentEntry { attachment, ..AttachmentEntry::default() });
            match (process, holder) {
                (Some(process), Some(holder)) => self.watch(lease, holder, exit_of(lease, process)),
                (None, Some(holder @ LeaseHolder::Cgroup(_))) => self.watch_cgroup(lease, holder),
                _ => {}
            }
            with_cgroup.retain(|with| *with != lease);
        }
        for lease in &with_cgroup {
            tracing::info!(lease = lease.0, "ending the processes of a lease that has ended");
        }
        with_cgroup
    }

    /// Ends all processes under a lease, and reports that if the authority waits for it.
    pub(super) async fn end(&self, lease: LeaseId, taken_back: bool, awaited: bool) {
        let change = self.table.lock().entry(lease).or_default().change.clone();
        let _changing = change.lock().await;
        let attachment = self.table.lock().remove(&lease).map(|entry| entry.attachment).unwrap_or_default();
        if awaited {
            tear_down(lease, attachment, taken_back, &self.cgroups).await;
            self.report(NodeReport::Drained { lease }).await;
        }
    }

    fn watch_cgroup(&self, lease: LeaseId, holder: LeaseHolder) {
        let cgroups = self.cgroups.clone();
        self.watch(lease, holder, async move {
            while cgroups.is_populated(lease) != Some(false) {
                tokio::time::sleep(CHECK_CGROUP).await;
            }
        });
    }

    /// Watches a holder in place of the previous one, and reports when it has ended.
    fn watch(&self, lease: LeaseId, holder: LeaseHolder, ended: impl Future<Output = ()> + Send + 'static) {
        let node = self.clone();
        let watch = async move {
            ended.await;
            node.report(NodeReport::HolderGone { lease, holder }).await;
        };
        let (name, devices) = (self.node(), self.devices_of(lease));
        let span = tracing::info_span!("holder", lease = lease.0, node = name, devices);
        let task = OwnedTask::spawn(watch.instrument(span));
        if let Some(entry) = self.table.lock().get_mut(&lease) {
            entry.watch = Some(task);
        }
    }

    /// Reports a fact, with retries while the authority is busy, because nothing else would report it.
    async fn report(&self, report: NodeReport) {
        while self.authority.report(report.clone()) == Err(Refusal::Busy) {
            tokio::time::sleep(REPORT_RETRY).await;
        }
    }
}

/// Returns when the process has ended, also if it cannot be opened for a while.
async fn exit_of(lease: LeaseId, process: ProcessId) {
    loop {
        let opened = ProcessHandle::open(process).and_then(|handle| {
            handle.map(|handle| handle.as_fd().try_clone_to_owned().and_then(ProcessExit::watch)).transpose()
        });
        match opened {
            Ok(Some(exit)) => return exit.wait().await,
            Ok(None) => return,
            Err(error) => {
                tracing::error!(lease = lease.0, pid = process.pid, %error, "cannot watch the holder of a lease yet");
                tokio::time::sleep(OPEN_RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use gpupool_confine::cgroup::CgroupManager;
    use gpupool_core::{DeviceReading, LeaseState};
    use gpupool_store::MemoryDisk;

    use super::*;
    use crate::authority::Reply;
    use crate::authority::tests::{request_command, sampled, start_in_memory, user};
    use crate::clock;

    /// Attachments of a node on whose control groups every action fails, and the authority that it reports to.
    fn on_unusable_cgroups() -> (Attachments, tempfile::TempDir) {
        let root = tempfile::tempdir().unwrap();
        let freezer = root.path().join("freezer");
        std::fs::create_dir(&freezer).unwrap();
        std::fs::write(freezer.join("cgroup.procs"), "").unwrap();
        let mount = format!("33 30 0:32 / {} rw - cgroup cgroup rw,freezer\n", freezer.display());
        std::fs::write(root.path().join("mountinfo"), mount).unwrap();
        std::fs::write(root.path().join("cgroup"), "2:freezer:/\n").unwrap();
        let cgroups = JobCgroups::new(CgroupManager::detect_in(root.path(), true), root.path());
        let (authority, _thread) = start_in_memory(&MemoryDisk::default());
        (Attachments::new("node".into(), authority, Arc::new(cgroups), Arc::default()), root)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lease_whose_job_cannot_be_put_into_its_group_stays_tied_to_the_caller() {
        let (attachments, _root) = on_unusable_cgroups();
        let authority = &attachments.authority;
        authority.report(sampled(Some(DeviceReading::idle(clock::now())))).unwrap();
        let Ok(Reply::Lease(lease)) = authority.ask(user("alice"), request_command("alice", None)).await else {
            panic!("it was refused")
        };
        // `cat` ends with its standard input, however this test ends.
        let mut job = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let (pid, token) = (std::process::id(), lease.token.unwrap());
        let handle = ProcessHandle::open(ProcessId::of_pid(pid).unwrap().unwrap()).unwrap().unwrap();
        let pidfd = handle.as_fd().try_clone_to_owned().unwrap();
        let process = PeerProcess { pid, start_ticks: handle.id().started, pidfd };
        let body = AttachBody { token, job_pid: Some(job.id()), until: AttachUntil::Job, ..AttachBody::default() };
        let attached = attachments.attach(user("alice"), process, LeaseId(lease.id), body).await;
        assert!(matches!(attached, Err(AttachError::NoCgroup(_))), "{attached:?}");
        // Longer than the first check of an empty group takes.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let id = LeaseId(lease.id);
        let known = authority.query(move |authority| authority.pool().lease(id).unwrap().row().clone()).await.unwrap();
        assert_eq!(known.state, LeaseState::Active);
        assert!(matches!(known.holder, Some(LeaseHolder::Process { pid: holder, .. }) if holder == pid));
        job.kill().unwrap();
        job.wait().unwrap();
    }

    #[tokio::test]
    async fn a_fence_does_not_wait_for_the_end_of_what_it_ends() {
        let (attachments, root) = on_unusable_cgroups();
        let group = format!("{}7", attachments.cgroups.prefix());
        std::fs::create_dir_all(root.path().join("freezer/gpupool").join(group)).unwrap();
        assert_eq!(attachments.fence(Vec::new()), [LeaseId(7)]);
        // The group of a live lease is not touched.
        let fenced = FencedLease { lease: LeaseId(7), holder: None };
        assert_eq!(attachments.fence(vec![fenced]), []);
    }

    #[test]
    fn a_refused_attachment_leaves_the_entry_to_the_next_caller_that_waits_for_it() {
        let table = AttachmentTable::default();
        let caller = || table.lock().entry(LeaseId(1)).or_default().change.clone();
        let (refused, waiting) = (caller(), caller());
        table.forget_unused(LeaseId(1));
        assert!(table.contains(LeaseId(1)), "the caller that waits would attach a lease without a watch");
        drop(refused);
        table.forget_unused(LeaseId(1));
        assert!(!table.contains(LeaseId(1)));
        drop(waiting);
    }

    #[test]
    fn of_too_many_jobs_the_oldest_is_forgotten() {
        let mut attachment = Attachment::default();
        let job = |pid| ProcessId { pid, started: 1 };
        for pid in 0..=1_024 {
            attachment.add_job(job(pid));
            attachment.add_job(job(pid));
        }
        let jobs = &attachment.jobs;
        assert_eq!((jobs.len(), jobs.first(), jobs.last()), (1_024, Some(&job(1)), Some(&job(1_024))));
    }
}
