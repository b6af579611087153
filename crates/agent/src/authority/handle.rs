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
use super::{AuthorityThread, Trail};

/// A reason why the authority did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The pool denied it.
    #[error(transparent)]
    Denied(#[from] CommandDenied),
    /// The caller lacks the right.
    #[error("{0}")]
    Forbidden(Arc<str>),
    /// The owner has too many requests in the queue.
    #[error("{owner} has {limit} requests waiting, which is the most; wait for them, or cancel some")]
    TooManyWaiting {
        /// The owner of the requests.
        owner: Arc<str>,
        /// The largest number allowed.
        limit: usize,
    },
    /// The store cannot commit now. Nothing was done.
    #[error("nothing was done: {0}")]
    NotDurable(Arc<str>),
    /// The disk has no space for a commit now. Nothing was done.
    #[error("nothing was done: {0}")]
    DiskFull(Arc<str>),
    /// The authority has too much to do, or waits for its disk.
    #[error("nothing was done: too much is asked at once; ask again in a moment")]
    Busy,
    /// The agent is stopping.
    #[error("nothing was done: the agent is stopping")]
    Stopping,
}

/// The answer to a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A lease as it is now.
    Lease(Box<LeaseBody>),
    /// Several leases that were followed together.
    Followed(FollowResponse),
    /// Done, with nothing to tell.
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

/// The number of a call that may wait for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CallId(pub u64);

/// A command on behalf of a caller.
pub(super) struct Asked {
    pub command: PoolCommand,
    pub caller: Caller,
    /// The time until which the answer may wait for a queued request to be granted.
    pub wait_until: Option<(CallId, PoolTime)>,
    pub reply: ReplySender,
}

/// A call that follows leases.
pub(super) struct FollowCall {
    pub id: CallId,
    pub caller: Caller,
    /// The followed leases, each once.
    pub leases: Arc<[LeaseId]>,
    /// The time at which the answer is due even if nothing changed.
    pub until: PoolTime,
    /// Whether the answer is the one lease itself rather than a list of changes.
    pub is_single: bool,
    /// Whether the leases end when the caller hangs up, because it has no other way to find them.
    pub releases: bool,
    pub reply: ReplySender,
}

pub(super) type Query = Box<dyn FnOnce(&AuthorityThread) + Send>;
/// Work on the store. It returns how its caller is answered, once changed tokens are published.
pub(super) type StoreWork = Box<dyn FnOnce(&mut dyn LeaseStore) -> Box<dyn FnOnce() + Send> + Send>;

pub(super) enum Message {
    /// A command of a caller.
    Asked(Asked),
    /// A call that follows leases.
    Follow(FollowCall),
    /// The caller of this call hung up.
    HungUp(CallId),
    /// A node ties a lease to a holder.
    Attach(LeaseAttachment, Caller, ReplySender),
    /// A node reports a fact.
    Report(NodeReport),
    /// The caller waits for the end of a lease.
    WaitForEnd(LeaseId, oneshot::Sender<()>),
    /// A look at what is committed.
    Query(Query),
    /// Work on the store besides rows.
    StoreWork(StoreWork),
    /// Every call that waits is answered now, and so is every later one at once: the agent is stopping.
    AnswerCalls,
    /// The thread ends after the messages before this one.
    Stop,
}

/// A handle of the authority. Clones speak to the same thread.
#[derive(Clone)]
pub struct Authority {
    messages: SyncSender<Message>,
    cell: Arc<SnapshotCell>,
    trail: Trail,
    next_call: Arc<AtomicU64>,
}

impl Authority {
    pub(super) fn new(messages: SyncSender<Message>, cell: Arc<SnapshotCell>, trail: Trail) -> Self {
        Self { messages, cell, trail, next_call: Arc::default() }
    }

    /// Returns the latest published state. Never waits for the authority.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.cell.latest()
    }

    /// Returns the time since the authority last confirmed its snapshot. It grows while the disk hangs.
    pub fn snapshot_age(&self) -> Millis {
        self.cell.age()
    }

    /// Whether the authority works, or waits for its disk. The watchdog of the service manager asks this.
    pub fn is_alive(&self) -> bool {
        self.cell.is_alive()
    }

    /// Returns the reader of the audit trail.
    pub fn trail(&self) -> &Trail {
        &self.trail
    }

    /// Carries out a command for a caller. The answer comes when the result is durable.
    pub async fn ask(&self, caller: Caller, command: PoolCommand) -> Result<Reply, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Asked(Asked { command, caller, wait_until: None, reply }))?;
        answer.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// As [`Authority::ask`]; if the lease is queued afterwards, the answer waits for its grant for up to `wait`.
    pub async fn ask_and_wait(&self, caller: Caller, command: PoolCommand, wait: Duration) -> Result<Reply, Refusal> {
        if wait.is_zero() {
            return self.ask(caller, command).await;
        }
        let (reply, answer) = oneshot::channel();
        let mut call = OpenCall::new(self);
        let wait_until = Some((call.id, time_in(wait)));
        self.send(Message::Asked(Asked { command, caller, wait_until, reply }))?;
        call.answered(answer).await
    }

    /// Follows one lease: keeps it in the queue, and returns it when it leaves the queue or after `wait`.
    pub async fn follow_lease(&self, caller: Caller, lease: LeaseId, wait: Duration) -> Result<LeaseBody, Refusal> {
        match self.follow(caller, [lease].into(), wait, true).await? {
            Reply::Lease(lease) => Ok(*lease),
            Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping),
        }
    }

    /// Follows several leases: keeps them in the queue, and returns those that left it, as soon as there is one or after
    /// `wait`.
    pub async fn follow_leases(
        &self,
        caller: Caller,
        leases: Arc<[LeaseId]>,
        wait: Duration,
    ) -> Result<FollowResponse, Refusal> {
        match self.follow(caller, leases, wait, false).await? {
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
    ) -> Result<Reply, Refusal> {
        let (reply, answer) = oneshot::channel();
        let mut call = OpenCall::new(self);
        let until = time_in(wait);
        let (id, releases) = (call.id, false);
        self.send(Message::Follow(FollowCall { id, caller, leases, until, is_single, releases, reply }))?;
        call.answered(answer).await
    }

    /// Ties a lease to a holder that the node has ready to watch. The answer comes when the holder is durable.
    pub async fn attach(&self, caller: Caller, attachment: LeaseAttachment) -> Result<LeaseBody, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Attach(attachment, caller, reply))?;
        match answer.await.unwrap_or(Err(Refusal::Stopping))? {
            Reply::Lease(lease) => Ok(*lease),
            Reply::Followed(_) | Reply::Done => Err(Refusal::Stopping),
        }
    }

    /// Returns when the lease has ended.
    pub async fn wait_for_end(&self, lease: LeaseId) -> Result<(), Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::WaitForEnd(lease, reply))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    /// Reports a fact without waiting for its effect.
    pub fn report(&self, report: NodeReport) -> Result<(), Refusal> {
        self.send(Message::Report(report))
    }

    /// Looks at what is committed. Waits for the authority for a short time at most, then refuses as busy.
    pub async fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&AuthorityThread) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Query(Box::new(move |authority| drop(reply.send(query(authority))))))?;
        match tokio::time::timeout(QUERY_PATIENCE, answer).await {
            Ok(answer) => answer.map_err(|_| Refusal::Stopping),
            Err(_) => Err(Refusal::Busy),
        }
    }

    /// Works on the store besides rows, between two commits.
    pub async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn LeaseStore) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::StoreWork(Box::new(move |store| {
            let done = work(store);
            Box::new(move || drop(reply.send(done)))
        })))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    /// Answers every call that waits, and every later one at once: the agent is stopping.
    pub async fn answer_calls(&self) {
        while self.send(Message::AnswerCalls) == Err(Refusal::Busy) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Lets the thread end after the messages sent before.
    pub fn stop(&self) {
        // A full channel empties, and a thread that is gone has ended.
        while self.send(Message::Stop) == Err(Refusal::Busy) {
            std::thread::yield_now();
        }
    }

    fn send(&self, message: Message) -> Result<(), Refusal> {
        self.messages.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::Busy,
            TrySendError::Disconnected(_) => Refusal::Stopping,
        })
    }
}

fn time_in(wait: Duration) -> PoolTime {
    clock::now().after(Millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
}

/// A call that waits for its answer. When it is dropped before, because the client hung up, the authority is told.
struct OpenCall<'a> {
    authority: &'a Authority,
    id: CallId,
    is_open: bool,
}

impl<'a> OpenCall<'a> {
    fn new(authority: &'a Authority) -> Self {
        let id = CallId(authority.next_call.fetch_add(1, Ordering::Relaxed));
        Self { authority, id, is_open: true }
    }

    async fn answered(&mut self, answer: oneshot::Receiver<Result<Reply, Refusal>>) -> Result<Reply, Refusal> {
        let answer = answer.await.unwrap_or(Err(Refusal::Stopping));
        self.is_open = false;
        answer
    }
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // If the authority is busy, it finds the closed call when it next keeps waiting requests in the queue.
            let _ = self.authority.send(Message::HungUp(self.id));
        }
    }
}
