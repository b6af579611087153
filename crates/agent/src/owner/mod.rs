//! The one thread that owns the pool and the store.
//!
//! Messages arrive on a channel and are applied in batches: the changed rows of a batch are committed in one transaction,
//! and only then answers, looks, events and waiters learn of it. If the commit fails the pool is built anew from the
//! store and the whole batch is refused, so nothing uncommitted is ever visible. The thread ends when it is told to stop
//! or when every handle is gone.

mod batch;
mod calls;
mod follow;
mod keep;
mod message;
mod publish;
mod sampled;
mod ties;
mod view;
mod waiters;

pub use message::{Owner, Refusal, Reply};
pub use publish::Watcher;
pub use ties::Tie;
pub use view::{device_body, lease_body};

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpupool_core::device::{DeviceIdentity, NodeFacts};
use gpupool_core::policy::Policies;
use gpupool_core::{DeviceId, GpuId, LeaseId, NodeId, Pool, Settings, Time};
use gpupool_store::{Clock, LeaseStore, LoadedRows};

use crate::clock;
use crate::limits::{BATCH, MESSAGES, NOTES_WAIT, STORE_RETRY};
use crate::sampler::Sample;

use message::{Fact, Message};
use ties::Ties;
use waiters::Waiters;

/// What an owner thread starts with.
pub struct OwnerSpec {
    /// The store.
    pub store: Box<dyn LeaseStore>,
    /// The rows it had.
    pub loaded: LoadedRows,
    /// How the pool works.
    pub settings: Settings,
    /// The rules in force.
    pub policies: Policies,
    /// The node it is for.
    pub node: NodeFacts,
    /// How many requests of one owner may wait.
    pub waiters_per_owner: usize,
    /// Whether readings show processes that exist.
    pub real_processes: bool,
    /// Who is told of what was committed.
    pub watcher: Box<dyn Watcher>,
}

/// How the store is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoreState {
    /// It keeps everything.
    #[default]
    Fine,
    /// There is no space: only what gives back is kept.
    Full(Arc<str>),
    /// It does not keep or give rows; every wish is refused until it does again.
    Broken(Arc<str>),
}

/// The owner's state, which only its thread touches; [`Owner::look`] shows it to others.
pub struct OwnerThread {
    pool: Pool,
    store: Box<dyn LeaseStore>,
    store_state: StoreState,
    settings: Settings,
    policies: Policies,
    node: NodeFacts,
    node_id: Option<NodeId>,
    devices: HashMap<DeviceIdentity, DeviceId>,
    sample: Option<Box<Sample>>,
    /// Whether the pool was built anew and has not heard of the last reading.
    sample_is_due: bool,
    /// What happened and could not be kept yet.
    postponed: Vec<Fact>,
    /// Leases whose askers hung up before they were answered.
    unwanted: Vec<LeaseId>,
    waiters: Waiters,
    ties: Ties,
    /// What each lease holds, until that is free again.
    held: HashMap<LeaseId, Arc<[GpuId]>>,
    waiters_per_owner: usize,
    real_processes: bool,
    watcher: Box<dyn Watcher>,
    /// When those whom somebody waits for were last kept in the queue.
    followed: Time,
    retried: Instant,
    /// The instant on both clocks at which the last batch was applied.
    at: Clock,
}

/// Starts the thread on the rows of a store, and says which rows made no sense.
pub fn start(spec: OwnerSpec) -> io::Result<(Owner, JoinHandle<()>, Vec<String>)> {
    let (messages, inbox) = sync_channel(MESSAGES);
    let (mut owner, complaints) = OwnerThread::new(spec, clock::both());
    let thread = thread::Builder::new().name("owner".into()).spawn(move || owner.run(&inbox))?;
    Ok((Owner { messages }, thread, complaints))
}

impl Owner {
    /// Lets the thread end after what was said before.
    pub fn stop(&self) {
        // A full channel empties, and a thread that is gone has ended.
        while self.send(Message::Stop) == Err(Refusal::Busy) {
            thread::yield_now();
        }
    }
}

impl OwnerThread {
    /// On the rows of a store, at an instant; and which rows made no sense.
    fn new(spec: OwnerSpec, at: Clock) -> (Self, Vec<String>) {
        let mut complaints = spec.loaded.complaints;
        let (pool, bad) = Pool::restore(spec.settings, spec.policies.clone(), at.pool, spec.loaded.rows);
        complaints.extend(bad.iter().map(ToString::to_string));
        let mut owner = Self {
            pool,
            store: spec.store,
            store_state: StoreState::Fine,
            settings: spec.settings,
            policies: spec.policies,
            node: spec.node,
            node_id: None,
            devices: HashMap::new(),
            sample: None,
            sample_is_due: false,
            postponed: Vec::new(),
            unwanted: Vec::new(),
            waiters: Waiters::default(),
            ties: Ties::default(),
            held: HashMap::new(),
            waiters_per_owner: spec.waiters_per_owner,
            real_processes: spec.real_processes,
            watcher: spec.watcher,
            followed: at.pool,
            retried: Instant::now(),
            at,
        };
        owner.take_stock();
        (owner, complaints)
    }

    fn run(&mut self, inbox: &Receiver<Message>) {
        loop {
            let first = match inbox.recv_timeout(self.patience()) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut stops = false;
            let messages = first.into_iter().chain(inbox.try_iter()).take(BATCH);
            let batch: Vec<Message> = messages.inspect(|message| stops |= matches!(message, Message::Stop)).collect();
            self.process(batch);
            if stops {
                self.hear_notes(true);
                return;
            }
        }
    }

    /// How long to wait for a message before the clock has to be heard.
    fn patience(&self) -> Duration {
        let mut patience = Duration::from_secs(60);
        if (self.sample_is_due || !self.unwanted.is_empty()) && !self.is_broken() {
            return Duration::ZERO;
        }
        if let Some(due) = self.pool.next_deadline().filter(|_| !self.is_broken()) {
            patience = patience.min(Duration::from_millis(due.since(clock::now()).0));
        }
        if !self.waiters.calls.is_empty() && !self.is_broken() {
            patience = patience.min(Duration::from_millis(self.follow_due().since(clock::now()).0));
        }
        if self.store_state == StoreState::Fine && self.store.unflushed() > 0 {
            patience = patience.min(NOTES_WAIT);
        }
        if self.store_state != StoreState::Fine {
            patience = patience.min(STORE_RETRY.saturating_sub(self.retried.elapsed()));
        }
        patience
    }

    fn is_broken(&self) -> bool {
        matches!(self.store_state, StoreState::Broken(_))
    }

    /// The pool, as it was last committed.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The store, to read from.
    pub fn store(&self) -> &dyn LeaseStore {
        &*self.store
    }

    /// How the store is.
    pub fn store_state(&self) -> &StoreState {
        &self.store_state
    }

    /// The last reading of all devices.
    pub fn sample(&self) -> Option<&Sample> {
        self.sample.as_deref()
    }

    /// The number of this node, once it was seen.
    pub fn node_id(&self) -> Option<NodeId> {
        self.node_id
    }

    /// What runs under a lease.
    pub fn tie(&self, lease: LeaseId) -> Option<&Tie> {
        self.ties.of(lease)
    }

    /// The devices a lease holds, or that drain of it.
    pub fn held(&self, lease: LeaseId) -> &[GpuId] {
        self.held.get(&lease).map_or(&[], |held| held)
    }

    /// The instant on both clocks by which times of the pool are told.
    pub fn at(&self) -> Clock {
        self.at
    }
}
