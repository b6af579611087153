//! The handle of the authority: the messages that it accepts, and the methods that send them.
//!
//! One message carries one intention. The channel is bounded; a message that finds no room is refused as busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use gpupool_api::lease::{FollowResponse, LeaseBody};
use gpupool_core::{CommandDenied, LeaseId, Millis, PoolCommand, PoolTime};
use gpupool_store::LeaseStore;
use tokio::sync::oneshot;

use crate::clock;
use crate::identity::Caller;
use crate::limits::QUERY_PATIENCE;
use crate::messages::{LeaseAttachment, NodeReport};

use super::snapshot::{Snapshot, SnapshotCell};
use super::{AuthorityThread, TrailHandle};

/// A reason why the authority refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The pool denied the command.
    #[error(transparent)]
    Denied(#[from] CommandDenied),
    /// The caller lacks the right.
    #[error("{0}")]
    Forbidden(Arc<str>),
    /// The owner has too many requests in the queue.
    #[error("{owner} has {limit} requests waiting, which is the limit; wait for them, or cancel some")]
    TooManyWaiting {
        /// The owner of the requests.
        owner: Arc<str>,
        /// The largest number allowed.
        limit: usize,
    },
    /// The store cannot commit now. Nothing was changed.
    #[error("nothing was changed: {0}")]
    NotDurable(Arc<str>),
    /// The disk has no space for a commit now. Nothing was changed.
    #[error("nothing was changed: {0}")]
    DiskFull(Arc<str>),
    /// The authority has too much to do, or waits for its disk.
    #[error("the agent is overloaded and nothing was changed; retry in a moment")]
    Busy,
    /// The agent is stopping.
    #[error("the agent is stopping and nothing was changed")]
    Stopping,
}

/// The reply to a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    /// A lease as it is now.
    Lease(Box<LeaseBody>),
    /// Several leases that were followed together.
    Followed(FollowResponse),
    /// Done, without a result.
    Done,
}

pub(super) type ReplySender = oneshot::Sender<Result<Reply, Refusal>>;

impl Refusal {
    /// Returns the name of the outcome under which metrics count a refused request for GPUs.
    pub(super) fn outcome_name(&self) -> &'static str {
        match self {
            Self::Denied(CommandDenied::NoCapacity) => "no_capacity",
            Self::Denied(CommandDenied::Unsatisfiable(_)) => "unsatisfiable",
            Self::Denied(CommandDenied::Invalid(_)) => "invalid",
            Self::Denied(CommandDenied::Policy { .. }) => "policy",
            Self::Denied(CommandDenied::QueueFull { .. }) => "queue_full",
            Self::TooManyWaiting { .. } => "too_many_waiting",
            Self::Forbidden(_) => "forbidden",
            Self::NotDurable(_) | Self::DiskFull(_) => "not_kept",
            Self::Denied(_) | Self::Busy | Self::Stopping => "other",
        }
    }
}

/// The number of a call that may wait for its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CallId(pub u64);

/// A command on behalf of a caller.
pub(super) struct CallerCommand {
    pub command: PoolCommand,
    pub caller: Caller,
    /// The time until which the reply may wait for a queued request to be granted.
    pub wait_until: Option<(CallId, PoolTime)>,
    pub reply: ReplySender,
}

/// A call that follows leases.
pub(super) struct FollowCall {
    pub id: CallId,
    pub caller: Caller,
    /// The followed leases, each once.
    pub leases: Arc<[LeaseId]>,
    /// The time at which the reply is due even without a change.
    pub until: PoolTime,
    /// Whether the reply is the one lease itself rather than a list of changes.
    pub is_single: bool,
    /// Whether the call keeps its leases in the queue.
    pub is_poll: bool,
    /// Whether the leases end when the caller hangs up, because it has no other way to find them.
    pub releases: bool,
    pub reply: ReplySender,
}

pub(super) type PoolQuery = Box<dyn FnOnce(&AuthorityThread) + Send>;
/// A task on the store. It returns the reply to its caller, to be sent once changed tokens are published.
pub(super) type StoreTask = Box<dyn FnOnce(&mut dyn LeaseStore) -> Box<dyn FnOnce() + Send> + Send>;

pub(super) enum AuthorityMessage {
    /// A command of a caller.
    Command(CallerCommand),
    /// A call that follows leases.
    Follow(FollowCall),
    /// The caller of this call hung up.
    HungUp(CallId),
    /// A node ties a lease to a holder.
    Attach(LeaseAttachment, Caller, ReplySender),
    /// A node reports a fact.
    Report(NodeReport),
    /// There are samples to take.
    Sampled,
    /// The caller waits for the end of a lease.
    WaitForEnd(LeaseId, oneshot::Sender<()>),
    /// A query of the committed state.
    Query(PoolQuery),
    /// A task on the store besides rows.
    StoreTask(StoreTask),
    /// Every call that waits gets its reply now, and every later one at once: the agent is stopping.
    ReplyToCalls,
    /// Wakes the thread to end.
    Stop,
}

/// A handle of the authority. Clones refer to the same thread.
#[derive(Clone)]
pub(crate) struct Authority {
    messages: SyncSender<AuthorityMessage>,
    cell: Arc<SnapshotCell>,
    trail: TrailHandle,
    next_call: Arc<AtomicU64>,
}

impl Authority {
    pub(super) fn new(messages: SyncSender<AuthorityMessage>, cell: Arc<SnapshotCell>, trail: TrailHandle) -> Self {
        Self { messages, cell, trail, next_call: Arc::default() }
    }

    /// Returns the latest published state. Never waits for the authority.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.cell.latest()
    }

    /// Returns the time since the authority last confirmed its snapshot. It grows while the disk hangs.
    pub(crate) fn snapshot_age(&self) -> Millis {
        self.cell.age()
    }

    /// Whether the authority works, or waits for its disk. The watchdog of the service manager checks this.
    pub(crate) fn is_alive(&self) -> bool {
        self.cell.is_alive()
    }

    /// Returns the reader of the audit trail.
    pub(crate) fn trail(&self) -> &TrailHandle {
        &self.trail
    }

    /// Carries out a command for a caller. The reply comes when the result is durable.
    pub(crate) async fn ask(&self, caller: Caller, command: PoolCommand) -> Result<Reply, Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::Command(CallerCommand { command, caller, wait_until: None, reply }))?;
        receiver.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// Same as [`Authority::ask`]; if the lease is queued afterwards, the reply waits for its grant for up to `wait`.
    pub(crate) async fn ask_and_wait(
        &self,
        caller: Caller,
        command: PoolCommand,
        wait: Duration,
    ) -> Result<Reply, Refusal> {
        if wait.is_zero() {
            return self.ask(caller, command).await;
        }
        let (reply, receiver) = oneshot::channel();
        let mut call = HangUpGuard::new(self);
        let wait_until = Some((call.id, time_in(wait)));
        self.send(AuthorityMessage::Command(CallerCommand { command, caller, wait_until, reply }))?;
        call.reply(receiver).await
    }

    /// Follows one lease: extends its patience, and returns it when it leaves the queue or after `wait`.
    pub(crate) async fn follow_lease(
        &self,
        caller: Caller,
        lease: LeaseId,
        wait: Duration,
    ) -> Result<LeaseBody, Refusal> {
        self.single(caller, lease, wait, true).await
    }

    /// Returns one lease as it is, without extending its patience.
    pub(crate) async fn read_lease(&self, caller: Caller, lease: LeaseId) -> Result<LeaseBody, Refusal> {
        self.single(caller, lease, Duration::ZERO, false).await
    }

    async fn single(
        &self,
        caller: Caller,
        lease: LeaseId,
        wait: Duration,
        is_poll: bool,
    ) -> Result<LeaseBody, Refusal> {
        match self.follow(caller, [lease].into(), wait, true, is_poll).await? {
            Reply::Lease(lease) => Ok(*lease),
            Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping),
        }
    }

    /// Follows several leases: extends their patience, and returns those that left the queue, as soon as there is one or
    /// after `wait`.
    pub(crate) async fn follow_leases(
        &self,
        caller: Caller,
        leases: Arc<[LeaseId]>,
        wait: Duration,
    ) -> Result<FollowResponse, Refusal> {
        match self.follow(caller, leases, wait, false, true).await? {
            Reply::Followed(followed) => Ok(followed),
            Reply::Lease(_) | Reply::Done => Err(Refusal::Stopping),
        }
    }

    async fn follow(
        &self,
        caller: Caller,
        leases: Arc<[LeaseId]>,
        wait: Duration,
        is_single: bool,
        is_poll: bool,
    ) -> Result<Reply, Refusal> {
        let (reply, receiver) = oneshot::channel();
        let mut call = HangUpGuard::new(self);
        let until = time_in(wait);
        let (id, releases) = (call.id, false);
        self.send(AuthorityMessage::Follow(FollowCall {
            id,
            caller,
            leases,
            until,
            is_single,
            is_poll,
            releases,
            reply,
        }))?;
        // A disk that hangs must not hold the reply much longer than the caller was ready to wait.
        let bounded = tokio::time::timeout(wait + QUERY_PATIENCE, call.reply(receiver));
        bounded.await.unwrap_or(Err(Refusal::Busy))
    }

    /// Ties a lease to a holder that the node has ready to watch. The reply comes when the holder is durable.
    pub(crate) async fn attach(&self, caller: Caller, attachment: LeaseAttachment) -> Result<LeaseBody, Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::Attach(attachment, caller, reply))?;
        match receiver.await.unwrap_or(Err(Refusal::Stopping))? {
            Reply::Lease(lease) => Ok(*lease),
            Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping),
        }
    }

    /// Returns when the lease has ended.
    pub(crate) async fn wait_for_end(&self, lease: LeaseId) -> Result<(), Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::WaitForEnd(lease, reply))?;
        receiver.await.map_err(|_| Refusal::Stopping)
    }

    /// Reports a fact without waiting for its effect. A sample replaces an earlier one that was not applied yet.
    pub(crate) fn report(&self, report: NodeReport) -> Result<(), Refusal> {
        match report {
            NodeReport::Sampled(sample) => self.cell.samples.put(sample, || self.send(AuthorityMessage::Sampled)),
            NodeReport::HolderGone { .. } | NodeReport::Drained { .. } => self.send(AuthorityMessage::Report(report)),
        }
    }

    /// Queries the committed state. Waits for the authority for a short time at most, then refuses as busy.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&AuthorityThread) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::Query(Box::new(move |authority| {
            // A caller that gave up needs no reply.
            if !reply.is_closed() {
                drop(reply.send(query(authority)));
            }
        })))?;
        within(QUERY_PATIENCE, receiver).await
    }

    /// Reads the store besides rows. Waits for the authority for a short time at most, then refuses as busy.
    pub(crate) async fn read_store<T: Send + 'static>(
        &self,
        read: impl FnOnce(&dyn LeaseStore) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::StoreTask(Box::new(move |store| {
            if reply.is_closed() {
                return Box::new(|| ());
            }
            let done = read(store);
            Box::new(move || drop(reply.send(done)))
        })))?;
        within(QUERY_PATIENCE, receiver).await
    }

    /// Works on the store besides rows, between two commits.
    pub(crate) async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn LeaseStore) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, receiver) = oneshot::channel();
        self.send(AuthorityMessage::StoreTask(Box::new(move |store| {
            let done = work(store);
            Box::new(move || drop(reply.send(done)))
        })))?;
        receiver.await.map_err(|_| Refusal::Stopping)
    }

    /// Sends every call that waits its reply, and every later one at once: the agent is stopping.
    pub(crate) async fn reply_to_open_calls(&self) {
        while self.send(AuthorityMessage::ReplyToCalls) == Err(Refusal::Busy) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Lets the thread end after the messages sent before. Never waits.
    pub(crate) fn stop(&self) {
        self.cell.stop();
        // A full channel wakes the thread as well.
        let _ = self.send(AuthorityMessage::Stop);
    }

    fn send(&self, message: AuthorityMessage) -> Result<(), Refusal> {
        self.messages.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::Busy,
            TrySendError::Disconnected(_) => Refusal::Stopping,
        })
    }
}

/// Waits for a reply for a limited time.
async fn within<T>(patience: Duration, receiver: oneshot::Receiver<T>) -> Result<T, Refusal> {
    match tokio::time::timeout(patience, receiver).await {
        Ok(reply) => reply.map_err(|_| Refusal::Stopping),
        Err(_) => Err(Refusal::Busy),
    }
}

fn time_in(wait: Duration) -> PoolTime {
    clock::now().after(Millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
}

/// A call that waits for its reply. If it is dropped early, because the client hung up, it notifies the authority.
struct HangUpGuard<'a> {
    authority: &'a Authority,
    id: CallId,
    is_open: bool,
}

impl<'a> HangUpGuard<'a> {
    fn new(authority: &'a Authority) -> Self {
        let id = CallId(authority.next_call.fetch_add(1, Ordering::Relaxed));
        Self { authority, id, is_open: true }
    }

    async fn reply(&mut self, receiver: oneshot::Receiver<Result<Reply, Refusal>>) -> Result<Reply, Refusal> {
        let reply = receiver.await.unwrap_or(Err(Refusal::Stopping));
        self.is_open = false;
        reply
    }
}

impl Drop for HangUpGuard<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // A busy authority finds the closed call when it next extends the patience of waiting requests.
            let _ = self.authority.send(AuthorityMessage::HungUp(self.id));
        }
    }
}
