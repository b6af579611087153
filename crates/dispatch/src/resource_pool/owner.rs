//! The owner of a pool: one loop on a thread of its own, around the roster that decides.
//!
//! Everything comes in as a message: wishes of those who want or have workers, and news of the processes. It ends when the pool
//! is shut down and every process gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpupool_client::local::LocalAgent;
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::lock;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::audit::{AuditTrail, WorkerHoldEndReason};
use super::config::worker_id;
use super::roster::{Effect, Fitness, Refusal, Roster, Ticket};
use super::worker::{Ending, Live, News, Run, Tending};
use super::{AcquireError, HeldWorker, HeldWorkerError, ResourcePoolConfig, ResourcePoolStatus};
use crate::WorkerExitCause;
use crate::gpu_leases::{GpuError, GpuEvent, GpuEventReceiver, GpuLeaseManager, GpuRequest, GrantedLease};
use crate::limits::{DEPTH, MAX_WAITING, SLEEP_MOST};
use crate::plan::{RunPlan, WorkerSlot};

pub(super) type Answer = oneshot::Sender<Result<HeldWorker, AcquireError>>;

/// A wish of those who want or have workers, or news of a process. The first four are each sent at most once for a ticket.
#[derive(Debug)]
pub(super) enum Message {
    Ask {
        ticket: Ticket,
        task_id: Arc<str>,
        answer: Answer,
        admission: Admission,
    },
    Leave(Ticket, Admission),
    GiveBack {
        ticket: Ticket,
        is_at_work: bool,
        seen: Option<oneshot::Sender<()>>,
        admission: Admission,
    },
    Kill(Ticket),
    Worker(usize, News),
    /// How long workers may take to clean up is said in [`ToOwner`].
    ShutDown,
}

/// Messages with a ticket: `Ask`, `Leave`, `Kill` and `GiveBack`.
const MESSAGES_OF_A_TICKET: usize = 4;
/// News of a process; the next one in its slot is started after the last of them was taken.
const MESSAGES_OF_A_WORKER: usize = 5;

/// Keeps room for the messages with one ticket; given back when all of them were taken that will ever be sent.
pub(super) type Admission = Arc<OwnedSemaphorePermit>;

/// The way to the owner of a pool, for any thread.
///
/// Its channel has room for every message there can be, so dropping a worker never waits, and nothing is lost: as many
/// tickets as may wait or hold workers are admitted, and each kind of message is sent only once.
#[derive(Debug, Clone)]
pub(super) struct ToOwner {
    messages: mpsc::Sender<Message>,
    tickets: Arc<Semaphore>,
    /// How long workers may take to clean up; there from the sending of [`Message::ShutDown`] until that is taken.
    shut_down: Arc<Mutex<Option<Duration>>>,
}

impl ToOwner {
    /// The way to the owner of so many workers, and where their messages arrive.
    pub(super) fn new(workers: usize) -> (Self, mpsc::Receiver<Message>) {
        let tickets = MAX_WAITING + workers;
        let most = MESSAGES_OF_A_TICKET * tickets + MESSAGES_OF_A_WORKER * workers + 1;
        let (messages, inbox) = mpsc::channel(most);
        (Self { messages, tickets: Arc::new(Semaphore::new(tickets)), shut_down: Arc::default() }, inbox)
    }

    /// Admits one more ticket; `None` where too many wait.
    pub(super) fn admit(&self) -> Option<Admission> {
        Arc::clone(&self.tickets).try_acquire_owned().ok().map(Arc::new)
    }

    /// Sends a message, which an owner that has ended drops.
    pub(super) fn tell(&self, message: Message) {
        let sent = self.messages.try_send(message);
        debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "the inbox has room for all there can be");
    }

    /// Ends the pool. Said several times, the last patience counts.
    pub(super) fn shut_down(&self, patience: Duration) {
        if lock(&self.shut_down).replace(patience).is_none() {
            self.tell(Message::ShutDown);
        }
    }
}

pub(super) struct Owner {
    config: ResourcePoolConfig,
    plan: Arc<RunPlan>,
    devices: Vec<Arc<str>>,
    leases: Option<Leases>,
    watcher: Arc<BoundsWatcher>,
    roster: Roster,
    effects: Vec<Effect>,
    processes: Vec<Option<Process>>,
    waiting: HashMap<Ticket, (Arc<str>, Answer, Admission)>,
    /// In the order they began: tickets are numbered so.
    holds: BTreeMap<Ticket, Hold>,
    status: watch::Sender<ResourcePoolStatus>,
    audit: Arc<AuditTrail>,
    stop_patience: Duration,
    clean_up_failure: Option<Arc<str>>,
    to_us: ToOwner,
    /// Told when the status shows what happened.
    answers: Vec<(Answer, Result<HeldWorker, AcquireError>)>,
    seen: Vec<oneshot::Sender<()>>,
}

struct Process {
    runs: mpsc::Sender<Run>,
    endings: watch::Sender<Option<Ending>>,
    /// Once it is set up.
    live: Option<Live>,
}

struct Hold {
    task_id: Arc<str>,
    tell: watch::Sender<Option<HeldWorkerError>>,
}

impl Owner {
    /// Asks for GPUs, where workers have some; workers are started by [`Owner::own`].
    pub(super) fn new(
        config: ResourcePoolConfig,
        watcher: BoundsWatcher,
        audit: Arc<AuditTrail>,
        status: watch::Sender<ResourcePoolStatus>,
        to_us: ToOwner,
    ) -> Result<Self, GpuError> {
        let lease = |wish| Leases::start(wish, config.max_workers);
        let leases = config.gpus.clone().map(lease).transpose()?;
        Ok(Self {
            plan: Arc::new(config.plan()),
            devices: match leases {
                Some(_) => vec![DEVICE.into()],
                None => config.devices.iter().map(|device| device.name.as_str().into()).collect(),
            },
            leases,
            watcher: Arc::new(watcher),
            roster: Roster::new(config.rules()),
            effects: Vec::new(),
            processes: (0..config.max_workers).map(|_| None).collect(),
            waiting: HashMap::new(),
            holds: BTreeMap::new(),
            status,
            audit,
            stop_patience: config.clean_up_timeout,
            clean_up_failure: None,
            to_us,
            answers: Vec::new(),
            seen: Vec::new(),
            config,
        })
    }

    /// Owns a pool until it is shut down.
    pub(super) async fn own(mut self, mut inbox: mpsc::Receiver<Message>) {
        self.settle();
        while !self.roster.is_over() {
            let until = self.roster.next_deadline().unwrap_or_else(|| Instant::now() + SLEEP_MOST);
            tokio::select! {
                Some(message) = inbox.recv() => self.take(message),
                Some(news) = gpu_news(&mut self.leases) => self.hear_of_gpu(news, Instant::now()),
                () = tokio::time::sleep_until(until.into()) => {}
            }
            self.settle();
        }
        // Given back before the end of the pool is told.
        drop(self.leases.take());
        self.audit.close();
    }

    fn take(&mut self, message: Message) {
        let now = Instant::now();
        match message {
            Message::Ask { ticket, task_id, answer, admission } => {
                self.waiting.insert(ticket, (task_id, answer, admission));
                self.roster.ask(ticket, now, &mut self.effects);
            }
            Message::Leave(ticket, _admission) => {
                self.waiting.remove(&ticket);
                self.roster.leave(ticket);
            }
            Message::GiveBack { ticket, is_at_work, seen, admission: _admission } => {
                if is_at_work {
                    self.end_unfit(ticket, HeldWorkerError::GivenBack);
                } else if self.roster.give_back(ticket, Fitness::Fit, now, &mut self.effects) {
                    self.holds.remove(&ticket);
                    self.audit.end(ticket.0, WorkerHoldEndReason::Released, None);
                }
                self.seen.extend(seen);
            }
            Message::Kill(ticket) => self.end_unfit(ticket, HeldWorkerError::Killed),
            Message::Worker(slot, news) => self.hear(slot, news, now),
            Message::ShutDown => {
                if let Some(patience) = lock(&self.to_us.shut_down).take() {
                    self.stop_patience = patience;
                }
                self.roster.close(&mut self.effects);
            }
        }
    }

    fn hear(&mut self, slot: usize, news: News, now: Instant) {
        match news {
            News::Ready(live) => {
                if let Some(process) = &mut self.processes[slot] {
                    process.live = Some(live);
                }
                self.roster.ready(slot, now, &mut self.effects);
            }
            News::Exceeded(excess) => {
                if let Some(ticket) = self.roster.holder(slot) {
                    self.end_unfit(ticket, HeldWorkerError::of_excess(excess));
                }
            }
            News::Dying => self.roster.dying(slot),
            News::CleanUpFailed(why) => self.clean_up_failure = Some(why),
            News::Gone { cause, why, was_ordered } => {
                self.processes[slot] = None;
                let failure = (!was_ordered).then_some(why);
                if let Some(ticket) = self.roster.gone(slot, failure, now, &mut self.effects) {
                    self.end_hold(
                        ticket,
                        match cause {
                            WorkerExitCause::BoundExceeded(excess) => HeldWorkerError::of_excess(excess),
                            _ if was_ordered => HeldWorkerError::Closed,
                            other => HeldWorkerError::Lost(other),
                        },
                    );
                }
            }
        }
    }

    fn hear_of_gpu(&mut self, news: GpuEvent, now: Instant) {
        let Some(leases) = &mut self.leases else { return };
        match news {
            GpuEvent::Granted(granted) => {
                let slot = granted.place;
                (leases.granted[slot], leases.waiting[slot]) = (Some(granted), None);
                self.roster.equip(slot, now, &mut self.effects);
            }
            GpuEvent::Lost { place, why } => {
                leases.granted[place] = None;
                if let Some(ticket) = self.roster.strip(place, now, &mut self.effects) {
                    self.end_hold(ticket, HeldWorkerError::Lost(WorkerExitCause::GpuWithdrawn(why.into())));
                }
            }
            GpuEvent::Refused { place, why } => {
                leases.waiting[place] = None;
                self.roster.deny(place, why.into(), &mut self.effects);
            }
            GpuEvent::Waiting { place, text } => leases.waiting[place] = Some(text.into()),
            GpuEvent::Note(_) => {}
        }
    }

    /// Does what there is to do, and then tells of it.
    fn settle(&mut self) {
        self.roster.tick(Instant::now(), &mut self.effects);
        for effect in std::mem::take(&mut self.effects) {
            self.obey(effect);
        }
        self.publish();
        for (to, answer) in self.answers.drain(..) {
            // Whoever left meanwhile gives a worker back by dropping it.
            let _ = to.send(answer);
        }
        for seen in self.seen.drain(..) {
            let _ = seen.send(());
        }
    }

    fn obey(&mut self, effect: Effect) {
        match effect {
            Effect::Start(slot) => self.start(slot),
            Effect::Grant { ticket, slot } => self.grant(ticket, slot),
            Effect::Refuse { ticket, why } => {
                let Some((_, answer, _admission)) = self.waiting.remove(&ticket) else { return };
                let why = match why {
                    Refusal::Closed => AcquireError::Closed,
                    Refusal::NoWorker(why) => AcquireError::NoWorker(why),
                    Refusal::Patience => {
                        AcquireError::Timeout { patience: self.config.acquire_patience, why: self.why_none_lives() }
                    }
                };
                self.answers.push((answer, Err(why)));
            }
            Effect::TimeUp { ticket, slot } => {
                self.end(slot, Ending::Kill);
                self.end_hold(ticket, HeldWorkerError::Timeout(self.config.worker_timeout));
            }
            Effect::Stop(slot) => self.end(slot, Ending::Stop(tokio::time::Instant::now() + self.stop_patience)),
            Effect::Kill(slot) => self.end(slot, Ending::Kill),
        }
    }

    fn start(&mut self, slot: usize) {
        // Of one holder after the other, the last of whom has had its work done before the next one comes.
        let (runs, taken) = mpsc::channel(DEPTH);
        let (endings, _) = watch::channel(None);
        let tending = Tending {
            slot,
            plan: Arc::clone(&self.plan),
            place: self.leases.as_ref().map_or_else(|| self.config.place(slot), |leases| leases.place(slot)),
            watcher: Arc::clone(&self.watcher),
            setup_timeout: self.config.setup_timeout,
            owner: self.to_us.clone(),
            runs: taken,
            endings: endings.clone(),
        };
        // Ends when the process is gone, which `own` waits for, on the runtime of this thread.
        tokio::spawn(tending.tend());
        self.processes[slot] = Some(Process { runs, endings, live: None });
    }

    fn grant(&mut self, ticket: Ticket, slot: usize) {
        let Some((task_id, answer, admission)) = self.waiting.remove(&ticket) else { return };
        let Some(Process { runs, live: Some(live), .. }) = &self.processes[slot] else { return };
        if let Some(held) = live.held.as_ref().filter(|_| self.config.worker_cpu_time.is_some()) {
            held.restart_cpu_time();
        }
        let device = Arc::clone(&self.devices[slot % self.devices.len()]);
        let id = worker_id(slot);
        self.audit.begin(ticket.0, Arc::clone(&task_id), id.0, Arc::clone(&device), live.pid);
        let (tell, ended) = watch::channel(None);
        self.holds.insert(ticket, Hold { task_id, tell });
        let worker = HeldWorker {
            ticket,
            id,
            device,
            gpu_ids: self.gpu_ids(slot),
            speaks: self.plan.program.speaks,
            live: live.clone(),
            runs: runs.clone(),
            ended,
            at_work: Arc::new(AtomicUsize::new(0)),
            owner: self.to_us.clone(),
            is_killed: AtomicBool::new(false),
            admission: Some(admission),
        };
        self.answers.push((answer, Ok(worker)));
    }

    fn end(&self, slot: usize, ending: Ending) {
        if let Some(process) = &self.processes[slot] {
            ending.order(&process.endings);
        }
    }

    /// Ends a hold and the worker with it.
    fn end_unfit(&mut self, ticket: Ticket, error: HeldWorkerError) {
        if self.roster.give_back(ticket, Fitness::Unfit, Instant::now(), &mut self.effects) {
            self.end_hold(ticket, error);
        }
    }

    fn end_hold(&mut self, ticket: Ticket, error: HeldWorkerError) {
        let Some(hold) = self.holds.remove(&ticket) else { return };
        let (how, why) = match &error {
            HeldWorkerError::Timeout(_) => (WorkerHoldEndReason::Timeout, None),
            HeldWorkerError::Memory(_) => (WorkerHoldEndReason::Memory, None),
            HeldWorkerError::BoundExceeded(excess) => {
                (WorkerHoldEndReason::BoundExceeded, Some(excess.to_string().into()))
            }
            HeldWorkerError::Killed => (WorkerHoldEndReason::Killed, None),
            HeldWorkerError::GivenBack => (WorkerHoldEndReason::Abandoned, None),
            HeldWorkerError::Lost(cause) => (WorkerHoldEndReason::Lost, Some(cause.to_string().into())),
            HeldWorkerError::Failed(_) | HeldWorkerError::Refused(_) | HeldWorkerError::Closed => {
                (WorkerHoldEndReason::Closed, None)
            }
        };
        self.audit.end(ticket.0, how, why);
        // Nobody may listen any more.
        let _ = hold.tell.send(Some(error));
    }

    fn gpu_ids(&self, slot: usize) -> Vec<u32> {
        match &self.leases {
            Some(leases) => leases.gpu_ids(slot),
            None => self.config.device(slot).gpu_ids.clone(),
        }
    }

    fn why_none_lives(&self) -> Option<Arc<str>> {
        if self.processes.iter().flatten().any(|process| process.live.is_some()) {
            return None;
        }
        if let Some(waiting) = self.leases.as_ref().and_then(Leases::waiting) {
            return Some(format!("a GPU is waited for: {waiting}").into());
        }
        self.roster.last_failure().map(|why| format!("the last one failed: {why}").into())
    }

    fn publish(&self) {
        let status = ResourcePoolStatus {
            worker_timeout: self.config.worker_timeout,
            worker_memory: self.config.worker_memory,
            active_task_ids: self.holds.values().map(|hold| Arc::clone(&hold.task_id)).collect(),
            clean_up_failure: self.clean_up_failure.clone(),
            audit_failure: self.audit.failure(),
            ..self.roster.status()
        };
        self.status.send_if_modified(|known| {
            let is_new = *known != status;
            *known = status;
            is_new
        });
    }
}

// Leased GPUs: each worker has one of its own, from the agent of this machine.
//
// They are asked for when the pool starts, for all workers it may have, and given back when this is dropped, which is when the
// last worker has gone.

/// What a worker calls its GPU: it sees no other, and frameworks call those of all vendors so.
const DEVICE: &str = "cuda:0";

/// What workers lease, and of whom.
#[derive(Debug, Clone)]
pub struct GpuLeaseConfig {
    /// The agent of this machine.
    pub agent: LocalAgent,
    /// What is asked for, for each worker.
    pub body: gpupool_api::RequestBody,
}

/// The GPUs of a pool's workers.
#[derive(Debug)]
struct Leases {
    keeper: Arc<GpuLeaseManager>,
    news: GpuEventReceiver,
    granted: Vec<Option<GrantedLease>>,
    /// How the wait for each goes.
    waiting: Vec<Option<Arc<str>>>,
}

impl Leases {
    /// Asks for a GPU for each worker.
    fn start(wish: GpuLeaseConfig, workers: u32) -> Result<Self, GpuError> {
        let places = workers as usize;
        let GpuLeaseConfig { agent, body } = wish;
        let wish = GpuRequest { body, leases: places, gpu_ids: Vec::new() };
        let (keeper, news) = GpuLeaseManager::start(agent, wish)?;
        Ok(Self { keeper: Arc::new(keeper), news, granted: vec![None; places], waiting: vec![None; places] })
    }

    /// How the wait for a GPU goes, if one is waited for.
    pub(crate) fn waiting(&self) -> Option<Arc<str>> {
        self.waiting.iter().flatten().next().cloned()
    }

    pub(crate) fn gpu_ids(&self, slot: usize) -> Vec<u32> {
        self.granted[slot].as_ref().map(GrantedLease::gpu_ids).unwrap_or_default()
    }

    /// Where the worker of a slot works.
    pub(crate) fn place(&self, slot: usize) -> WorkerSlot {
        let Some(granted) = &self.granted[slot] else { return WorkerSlot::new(worker_id(slot)) };
        self.keeper.worker_slot(worker_id(slot), granted)
    }
}

/// The next news of the GPUs; never, where workers have none.
async fn gpu_news(leases: &mut Option<Leases>) -> Option<GpuEvent> {
    match leases {
        Some(leases) => leases.news.next().await,
        None => std::future::pending().await,
    }
}
