//! What can be said to the owner thread, and the handle that says it.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};

use gpupool_api::lease::{self, Followed};
use gpupool_core::lease::Holder;
use gpupool_core::{Command, Denied, LeaseId, Millis};
use gpupool_store::LeaseStore;
use tokio::sync::oneshot;

use crate::identity::Caller;
use crate::sampler::Sample;

use super::calls::{Call, Patience};
use super::{OwnerThread, Tie};

/// Why nothing came of a wish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The pool denied it.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The caller may not do that.
    #[error("{0}")]
    Forbidden(Arc<str>),
    /// So many requests of one owner wait already.
    #[error("{owner} has {limit} requests waiting, which is the most; wait for them, or cancel some")]
    TooManyWaiting {
        /// Whose.
        owner: Arc<str>,
        /// How many.
        limit: usize,
    },
    /// It cannot be made durable now; nothing of it happened.
    #[error("nothing was done: {0}")]
    NotDurable(Arc<str>),
    /// There is no space to make it durable now; nothing of it happened.
    #[error("nothing was done: {0}")]
    DiskFull(Arc<str>),
    /// Too much is asked at once; nothing of it happened.
    #[error("nothing was done: too much is asked at once; ask again in a moment")]
    Busy,
    /// The agent is ending.
    #[error("nothing was done: the agent is stopping")]
    Stopping,
}

/// What comes of a wish.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A lease as it is now.
    Lease(Box<lease::Lease>),
    /// Done.
    Done,
}

/// A wish of somebody.
pub(super) struct Asked {
    pub command: Command,
    pub caller: Caller,
    pub reply: oneshot::Sender<Result<Reply, Refusal>>,
}

/// Something that happened, whoever asks for what.
#[derive(Clone)]
pub(super) struct Fact {
    pub command: Command,
    /// Means something only while this holds the lease: another one may have taken it over.
    pub held_by: Option<(LeaseId, Holder)>,
}

type Look = Box<dyn FnOnce(&OwnerThread) + Send>;
type Work = Box<dyn FnOnce(&mut dyn LeaseStore) + Send>;
type Change = Box<dyn FnOnce(&mut Tie) + Send>;

pub(super) enum Message {
    /// Somebody wants something.
    Asked(Asked),
    /// Somebody asks for leases that wait.
    Follow(Call),
    /// Tell when this lease is over.
    WaitForEnd(LeaseId, oneshot::Sender<()>),
    /// The agent itself says that something happened.
    Fact(Fact),
    /// Devices were read.
    Sample(Box<Sample>),
    /// Look at what is committed.
    Look(Look),
    /// Do something with the store besides rows.
    Work(Work),
    /// Something runs under a lease.
    Tie(LeaseId, Change),
    /// Something runs under a lease, if the lease is granted; tell whether it is.
    TieGranted(LeaseId, Change, oneshot::Sender<bool>),
    /// What ran under an ended lease, as far as it could be held to, is gone.
    Gone(LeaseId),
    /// End after what came before this.
    Stop,
}

/// Says things to the owner thread. Its clones speak to the same one.
#[derive(Clone)]
pub struct Owner {
    pub(super) messages: SyncSender<Message>,
}

impl Owner {
    /// Asks for something on behalf of somebody. The answer comes when it is durable.
    pub async fn ask(&self, caller: Caller, command: Command) -> Result<Reply, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Asked(Asked { command, caller, reply }))?;
        answer.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// Asks for leases, which keeps them in the queue, and comes back as soon as one of them waits no longer or is not the
    /// caller's to follow. Dropping it stops the asking, not the leases.
    pub async fn follow(&self, caller: Caller, leases: Arc<[LeaseId]>) -> Result<Followed, Refusal> {
        self.call(caller, leases, Patience::UntilChanged).await
    }

    /// As [`Owner::follow`], but comes back at once.
    pub async fn follow_now(&self, caller: Caller, leases: Arc<[LeaseId]>) -> Result<Followed, Refusal> {
        self.call(caller, leases, Patience::None).await
    }

    async fn call(&self, caller: Caller, leases: Arc<[LeaseId]>, patience: Patience) -> Result<Followed, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Follow(Call { caller, leases, patience, reply }))?;
        answer.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// Comes back when the lease is over.
    pub async fn wait_for_end(&self, lease: LeaseId) -> Result<(), Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::WaitForEnd(lease, reply))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    /// Tells what happened, without waiting for what comes of it.
    pub fn tell(&self, command: Command) -> Result<(), Refusal> {
        self.send(Message::Fact(Fact { command, held_by: None }))
    }

    /// Tells that who held a lease is gone. Means nothing where another one holds it by now.
    pub fn holder_gone(&self, lease: LeaseId, holder: Holder, grace: Millis) -> Result<(), Refusal> {
        let command = Command::HolderGone { lease, grace };
        self.send(Message::Fact(Fact { command, held_by: Some((lease, holder)) }))
    }

    /// Tells what was read. A sample that finds no room is dropped: the next one says the same and more.
    pub fn sampled(&self, sample: Sample) {
        let _full_or_stopping = self.send(Message::Sample(Box::new(sample)));
    }

    /// Notes what runs under a lease.
    pub fn tie(&self, lease: LeaseId, change: impl FnOnce(&mut Tie) + Send + 'static) -> Result<(), Refusal> {
        self.send(Message::Tie(lease, Box::new(change)))
    }

    /// As [`Owner::tie`], for a granted lease only; says whether it is one. What runs under it is then seen to when it
    /// ends.
    pub async fn tie_granted(
        &self,
        lease: LeaseId,
        change: impl FnOnce(&mut Tie) + Send + 'static,
    ) -> Result<bool, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::TieGranted(lease, Box::new(change), reply))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    /// What ran under an ended lease in its group and as its holder is gone. What was read on its devices besides is waited
    /// for by reading again.
    pub fn gone(&self, lease: LeaseId) -> Result<(), Refusal> {
        self.send(Message::Gone(lease))
    }

    /// Looks at what is committed.
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&OwnerThread) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Look(Box::new(move |owner| drop(reply.send(look(owner))))))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    /// As [`Owner::look`], from a thread that may block.
    pub fn look_blocking<T: Send + 'static>(
        &self,
        look: impl FnOnce(&OwnerThread) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Look(Box::new(move |owner| drop(reply.send(look(owner))))))?;
        answer.blocking_recv().map_err(|_| Refusal::Stopping)
    }

    /// Does something with the store besides rows, between commits.
    pub async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn LeaseStore) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Work(Box::new(move |store| drop(reply.send(work(store))))))?;
        answer.await.map_err(|_| Refusal::Stopping)
    }

    pub(super) fn send(&self, message: Message) -> Result<(), Refusal> {
        self.messages.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::Busy,
            TrySendError::Disconnected(_) => Refusal::Stopping,
        })
    }
}
