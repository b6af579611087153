//! The engine: one loop around the ledger that touches the world. Starts workers, sends, hears, buries.
//!
//! Whoever drives it calls [`Engine::turn`] again and again, one thread at a time. What takes long (starting a
//! process, ending one) is done by short-lived threads that leave a message.

mod queues;
mod slot;
mod workers;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_confine::Signal;
use gpupool_confine::bounds::BoundsWatcher;
use gpupool_confine::cgroup::CgroupManager;
use rustix::event::{Timespec, epoll};

use queues::Delivery;
pub(crate) use queues::{Feed, Message, Post};
use slot::{ByTask, Clock, Phase, Slot, Stage};

use crate::command::CommandOutput;
use crate::event::{DispatchError, RunEvent, TaskEnd};
use crate::ledger::{Effect, Ledger};
use crate::limits::{CANCEL_GRACE, SLEEP_MOST, UNUSED_PATIENCE};
use crate::plan::RunPlan;
use crate::{RunStats, WorkerExitCause, WorkerId, WorkerSlot, WorkerStats};

/// Which of a slot's file descriptors something happened to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Bell,
    Socket(usize),
    Job(usize),
    Writes(usize),
}

impl Source {
    fn to_data(self) -> epoll::EventData {
        let number = match self {
            Self::Bell => 0,
            Self::Socket(slot) => slot << 2 | 1,
            Self::Job(slot) => slot << 2 | 2,
            Self::Writes(slot) => slot << 2 | 3,
        };
        epoll::EventData::new_u64(number as u64)
    }

    fn of_data(data: epoll::EventData) -> Self {
        // It was a slot's number before.
        let number = usize::try_from(data.u64()).unwrap_or(0);
        match number & 3 {
            1 => Self::Socket(number >> 2),
            2 => Self::Job(number >> 2),
            3 => Self::Writes(number >> 2),
            _ => Self::Bell,
        }
    }
}

/// Who drives, and what that one waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    /// Events.
    Listener,
    /// Events, until this time.
    Watcher(Instant),
    /// Events, and room for more tasks.
    Feeder,
    /// Nothing: it has other things to do.
    Passer,
    /// Nothing: it keeps things going.
    Relief,
    /// Nothing but the end, and that not for ever.
    Leaver(Instant),
}

/// How far the run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Open,
    /// All tasks are over; the workers are told to end.
    Ending,
    Over,
}

#[derive(Debug)]
pub(crate) struct Engine {
    plan: Arc<RunPlan>,
    ledger: Ledger,
    payloads: ByTask<Bytes>,
    /// What commands wrote whose tasks are not over yet.
    outputs: ByTask<CommandOutput>,
    slots: Vec<Slot>,
    epoll: OwnedFd,
    feed: Arc<Feed>,
    post: Arc<Post>,
    effects: Vec<Effect>,
    taken: Vec<Bytes>,
    delivery: Delivery,
    progress: Progress,
    failure: Option<DispatchError>,
    /// A signal came while it slept.
    was_interrupted: bool,
    clock: Clock,
    /// Shared with the threads that start workers.
    watcher: Arc<BoundsWatcher>,
}

impl Engine {
    pub(crate) fn new(plan: RunPlan, feed: Arc<Feed>, post: Arc<Post>) -> Result<Self, DispatchError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        epoll::add(&epoll, post.as_fd(), Source::Bell.to_data(), epoll::EventFlags::IN).map_err(io::Error::from)?;
        let now = Instant::now();
        let mut rules = plan.rules.clone();
        // What one task uses can only be told apart where no other is behind it.
        rules.prefetch &= !plan.counts_cpu_time_per_task();
        Ok(Self {
            ledger: Ledger::new(rules),
            payloads: ByTask::default(),
            outputs: ByTask::default(),
            slots: plan.places.iter().map(|place| Slot::new(place.clone(), now)).collect(),
            epoll,
            feed,
            post,
            effects: Vec::new(),
            taken: Vec::new(),
            delivery: Delivery::new(plan.order),
            progress: Progress::Open,
            failure: None,
            was_interrupted: false,
            clock: Clock::new(),
            watcher: Arc::new(BoundsWatcher::start(CgroupManager::detect())?),
            plan: Arc::new(plan),
        })
    }

    /// Does what there is to do, and sleeps until there is, unless whoever drives has something to do.
    pub(crate) fn turn(&mut self, driver: Driver) {
        if let Err(error) = self.try_turn(driver) {
            // It cannot hear its workers any more: they are ended, and their tasks with them.
            self.give_up(error);
            self.obey_effects(Instant::now());
            self.slots.clear();
            self.progress = Progress::Over;
        }
    }

    fn try_turn(&mut self, driver: Driver) -> Result<(), DispatchError> {
        let now = Instant::now();
        self.take_messages(now);
        self.take_tasks();
        self.ledger.feed(now, &mut self.effects);
        self.obey_effects(now);
        self.by_the_clock(now);
        // What was taken back by the clock goes to others at once.
        self.ledger.feed(now, &mut self.effects);
        self.obey_effects(now);
        self.send_all();
        self.end_if_done(now);
        if self.progress == Progress::Over {
            return Ok(());
        }
        self.wait_and_hear(driver)
    }

    /// How long to sleep. Who falls asleep says so first and looks for work then: what comes between rings.
    fn sleep(&self, driver: Driver) -> Duration {
        let is_wanted = match driver {
            Driver::Listener | Driver::Watcher(_) => self.delivery.ready() > 0,
            Driver::Feeder => self.delivery.ready() > 0 || self.feed.room() > 0,
            Driver::Passer => true,
            Driver::Relief | Driver::Leaver(_) => false,
        };
        if is_wanted {
            return Duration::ZERO;
        }
        self.post.falls_asleep();
        let (waiting, undelivered) = (self.ledger.waiting(), self.delivery.undelivered());
        if !self.post.is_empty() || self.feed.has_news(waiting, undelivered, self.ledger.is_open()) {
            return Duration::ZERO;
        }
        let leaves = match driver {
            Driver::Leaver(until) | Driver::Watcher(until) => Some(until),
            _ => None,
        };
        let due = self.slots.iter().filter_map(Slot::deadline).chain(leaves).min();
        due.map_or(SLEEP_MOST, |due| due.saturating_duration_since(Instant::now()).min(SLEEP_MOST))
    }

    fn wait_and_hear(&mut self, driver: Driver) -> Result<(), DispatchError> {
        let timeout = self.sleep(driver);
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let timeout = Timespec { tv_sec: timeout.as_secs().cast_signed(), tv_nsec: timeout.subsec_nanos().into() };
        let woken = epoll::wait(&self.epoll, &mut events, Some(&timeout));
        self.post.is_awake();
        let ready: Vec<(Source, epoll::EventFlags)> = match woken {
            Ok((ready, _)) => ready.iter().map(|event| (Source::of_data(event.data), event.flags)).collect(),
            Err(rustix::io::Errno::INTR) => {
                self.was_interrupted = true;
                return Ok(());
            }
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let now = Instant::now();
        for (source, flags) in ready {
            match source {
                Source::Bell => self.post.silence(),
                Source::Socket(slot) => self.socket_is_ready(slot, flags, now),
                Source::Job(slot) => self.job_is_ready(slot),
                Source::Writes(slot) => self.read_words(slot),
            }
        }
        self.obey_effects(now);
        Ok(())
    }

    /// Moves what is to be told.
    pub(crate) fn take_events(&mut self, into: &mut VecDeque<RunEvent>) {
        self.delivery.take(into);
        self.listen_again();
    }

    /// Whether every task is over and every worker gone.
    pub(crate) fn is_over(&self) -> bool {
        self.progress == Progress::Over
    }

    /// Whether a signal came while it slept, since this was last asked.
    pub(crate) fn take_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.was_interrupted)
    }

    /// Why it could not go on.
    pub(crate) fn failure(&self) -> Option<&DispatchError> {
        self.failure.as_ref()
    }

    /// How things stand.
    pub(crate) fn stats(&self) -> RunStats {
        let (pending, running, _) = self.ledger.counts();
        let worker = |slot: &Slot| {
            let (task, since) = self.ledger.at(slot.place.id);
            WorkerStats {
                id: slot.place.id,
                gpu_ids: slot.place.gpu_ids.clone(),
                state: slot.state(task.is_some()),
                pid: match &slot.stage {
                    Stage::Alive(process, _) => Some(process.job.id().pid),
                    _ => None,
                },
                task,
                task_since: since,
                completed: slot.tally.completed,
                failed: slot.tally.failed,
                timeouts: slot.tally.timeouts,
                replaced: slot.replaced,
            }
        };
        let workers = self.slots.iter().map(worker).collect();
        RunStats { pending: pending as u64, running: running as u64, workers, ..self.delivery.tally.clone() }
    }

    fn take_tasks(&mut self) {
        if self.progress != Progress::Open {
            return;
        }
        let (waiting, undelivered) = (self.ledger.waiting(), self.delivery.undelivered());
        let is_last = self.feed.take(&mut self.taken, waiting, undelivered);
        self.take_in();
        if is_last {
            self.ledger.close();
        }
    }

    fn take_all_tasks(&mut self) {
        self.feed.take_all(&mut self.taken);
        self.take_in();
    }

    fn take_in(&mut self) {
        for payload in self.taken.drain(..) {
            let task = self.ledger.take_in();
            self.payloads.insert(task, payload);
        }
    }

    fn slot_of(&self, worker: WorkerId) -> Option<usize> {
        self.slots.iter().position(|slot| slot.place.id == worker)
    }

    fn by_the_clock(&mut self, now: Instant) {
        for at in 0..self.slots.len() {
            if self.slots[at].deadline().is_none_or(|deadline| now < deadline) {
                continue;
            }
            match self.slots[at].stage {
                Stage::Waiting(until) if until <= now => self.start(at),
                Stage::Alive(_, Phase::SettingUp(Some(until))) if until <= now => {
                    let limit = self.plan.setup_timeout.filter(|_| self.progress == Progress::Open);
                    self.slots[at].setup_failure =
                        limit.map(|limit| format!("setup took longer than {limit:?}").into());
                    self.bury(at, Some(WorkerExitCause::Stopped), Duration::ZERO);
                }
                Stage::Alive(_, Phase::AtWork(Some(until))) if until <= now => self.life_is_over(at),
                Stage::Alive(_, Phase::GivingUp(until) | Phase::Stopping(until)) if until <= now => {
                    self.bury(at, Some(WorkerExitCause::IgnoredInterrupt), Duration::ZERO);
                }
                _ => {}
            }
            self.look_at_time(at, now);
        }
        self.obey_effects(now);
    }

    /// When all tasks are over the workers are told to end; when they are gone, all is over.
    fn end_if_done(&mut self, now: Instant) {
        if self.progress == Progress::Open && self.ledger.is_done() {
            self.progress = Progress::Ending;
            for at in 0..self.slots.len() {
                match &mut self.slots[at].stage {
                    Stage::Waiting(_) => self.slots[at].stage = Stage::Gone,
                    Stage::Alive(_, phase @ Phase::SettingUp(_)) => {
                        *phase = Phase::SettingUp(Some(now + UNUSED_PATIENCE));
                    }
                    Stage::Alive(process, phase) => {
                        process.wire.put_stop();
                        *phase = Phase::Stopping(now + self.plan.clean_up_timeout);
                    }
                    Stage::Starting | Stage::Dying(_) | Stage::Gone => {}
                }
            }
            self.send_all();
        }
        if self.progress == Progress::Ending && self.slots.iter().all(|slot| matches!(slot.stage, Stage::Gone)) {
            self.progress = Progress::Over;
        }
    }

    /// Nobody is left who could do the rest.
    fn give_up(&mut self, why: DispatchError) {
        self.failure.get_or_insert(why);
        self.take_all_tasks();
        self.ledger.cancel(&mut self.effects);
    }
}

// What other threads want, and what they have done for the engine.

impl Engine {
    pub(super) fn take_messages(&mut self, now: Instant) {
        for message in self.post.take() {
            match message {
                Message::Started { slot, generation, outcome } => self.started(slot, generation, outcome, now),
                Message::Buried { slot, generation, cause } => self.buried(slot, generation, cause, now),
                Message::Excess { slot, generation, excess } => {
                    if self.slots.get(slot).is_some_and(|slot| slot.generation == generation) {
                        self.bury(slot, Some(WorkerExitCause::BoundExceeded(excess)), Duration::ZERO);
                    }
                }
                Message::ReportedExcess { worker, pid, excess } => {
                    let is_it = |slot: &Slot| matches!(&slot.stage, Stage::Alive(it, _) if it.job.id().pid == pid);
                    if let Some(at) = self.slot_of(worker).filter(|at| is_it(&self.slots[*at])) {
                        self.bury(at, Some(WorkerExitCause::BoundExceeded(excess)), Duration::ZERO);
                    }
                }
                Message::Add(place) => self.add(place, now),
                Message::Withdraw { worker, why } => self.withdraw(worker, &why),
                Message::Cancel => self.cancel(),
                Message::Stop => self.stop(now),
                Message::FinishSoon => {
                    self.take_all_tasks();
                    self.ledger.finish_soon(&mut self.effects);
                }
                Message::Stats(to) => {
                    // Whoever asked may have gone.
                    let _ = to.try_send(self.stats());
                }
            }
        }
    }

    fn add(&mut self, place: WorkerSlot, now: Instant) {
        let Some(at) = self.slot_of(place.id) else { return self.slots.push(Slot::new(place, now)) };
        let slot = &mut self.slots[at];
        slot.place = place;
        (slot.withdrawn, slot.deaths) = (None, 0);
        // One that still dies comes back when it has.
        if matches!(slot.stage, Stage::Gone) {
            slot.stage = Stage::Waiting(now);
        }
    }

    fn withdraw(&mut self, worker: WorkerId, why: &Arc<str>) {
        let Some(at) = self.slot_of(worker) else { return };
        self.slots[at].withdrawn = Some(Arc::clone(why));
        match &mut self.slots[at].stage {
            waiting @ Stage::Waiting(_) => *waiting = Stage::Gone,
            Stage::Starting => self.slots[at].is_outdated = true,
            Stage::Alive(..) | Stage::Dying(_) | Stage::Gone => {}
        }
        self.bury(at, Some(WorkerExitCause::GpuWithdrawn(Arc::clone(why))), Duration::ZERO);
    }

    fn cancel(&mut self) {
        self.take_all_tasks();
        self.ledger.cancel(&mut self.effects);
        for at in 0..self.slots.len() {
            self.interrupt(at);
            self.bury(at, Some(WorkerExitCause::Stopped), CANCEL_GRACE);
        }
    }

    /// What workers are at is given up within the grace. Whoever did so, or had nothing, is told to end when all have.
    fn stop(&mut self, now: Instant) {
        self.take_all_tasks();
        self.ledger.cancel(&mut self.effects);
        let until = now + self.plan.rules.grace;
        for at in 0..self.slots.len() {
            if self.ledger.at(self.slots[at].place.id).0.is_none() {
                continue;
            }
            if let Stage::Alive(_, phase @ Phase::AtWork(_)) = &mut self.slots[at].stage {
                *phase = Phase::GivingUp(until);
                self.interrupt(at);
            }
        }
    }

    /// Has a worker give up what it is at, and begin nothing else.
    fn interrupt(&mut self, at: usize) {
        let Stage::Alive(process, _) = &self.slots[at].stage else { return };
        process.counters.interrupt_any();
        let claimed = process.counters.recall();
        // One that is gone already needs no interrupt.
        let _ = process.job.signal(Signal::INT);
        let worker = self.slots[at].place.id;
        if self.ledger.can_recall(worker) {
            self.ledger.recalled(worker, claimed, &mut self.effects);
        }
    }
}

// Doing what the ledger decided.

impl Engine {
    pub(super) fn obey_effects(&mut self, now: Instant) {
        while !self.effects.is_empty() {
            for effect in std::mem::take(&mut self.effects) {
                match effect {
                    Effect::Send { worker, tasks } => self.put_tasks(worker, &tasks, now),
                    Effect::Over { task, worker, outcome, begun: started, tries } => {
                        self.payloads.remove(&task);
                        let output = self.outputs.remove(&task);
                        if let Some(at) = worker.and_then(|worker| self.slot_of(worker)) {
                            self.slots[at].tally.count(&outcome);
                        }
                        self.delivery.over(TaskEnd { task, worker, outcome, started, finished: now, tries, output });
                    }
                    Effect::Retried { task, worker, outcome } => {
                        self.outputs.remove(&task);
                        if let Some(at) = self.slot_of(worker) {
                            // Begun once more by the same worker, it is told once more.
                            self.slots[at].told = None;
                        }
                        self.delivery.tally.retried += 1;
                        self.delivery.tell(RunEvent::TaskRetried { task, worker, outcome });
                    }
                    Effect::Interrupt { worker, begun } => {
                        if let Some(Stage::Alive(process, _)) = self.slot_of(worker).map(|at| &self.slots[at].stage) {
                            process.counters.interrupt(begun);
                            // One that is gone already needs no interrupt.
                            let _ = process.job.signal(Signal::INT);
                        }
                    }
                    Effect::Recall { worker } => self.recall(worker),
                    Effect::Kill { worker } => {
                        if let Some(at) = self.slot_of(worker) {
                            self.bury(at, Some(WorkerExitCause::IgnoredInterrupt), Duration::ZERO);
                        }
                    }
                }
            }
        }
    }
}
