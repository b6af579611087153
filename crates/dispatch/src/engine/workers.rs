//! A worker while its process runs: starting it, giving it tasks, hearing what it says.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::spawn::JobEvent;
use rustix::event::epoll::{self, EventFlags};

use super::slot::{Phase, Remains, Stage};
use super::{Engine, Message, Progress, Source};
use crate::command::CommandReport;
use crate::event::{DispatchError, RunEvent};
use crate::ledger::{Seen, Skill};
use crate::limits::{EXIT_PATIENCE, READ_BYTES, RECALL_AFTER, SETUP_TRIES, UNREAD_EVENTS};
use crate::plan::{AttachDenied, Speaks, WorkerOutputPolicy};
use crate::process::{Heard, NotStarted, Process, backoff, end, ready_of, start, untaken_by_threads_of};
use crate::protocol::{Kind, read_into};
use crate::{TaskId, TaskOutcome, WorkerExitCause, WorkerId, WorkerLoss};

impl Engine {
    pub(super) fn start(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.stage = Stage::Starting;
        slot.generation += 1;
        let (generation, place) = (slot.generation, slot.place.clone());
        let (plan, post, watcher) = (Arc::clone(&self.plan), Arc::clone(&self.post), Arc::clone(&self.watcher));
        let start_it = move || {
            let to = Arc::clone(&post);
            let on_excess = move |excess| to.send(Message::Excess { slot: at, generation, excess });
            let outcome = start(&plan, &place, &watcher, Box::new(on_excess)).map(Box::new);
            post.send(Message::Started { slot: at, generation, outcome });
        };
        // Ends when the process is started or cannot be; the run is not over before.
        let thread = std::thread::Builder::new().name("gpupool-start".into());
        if let Err(error) = untaken_by_threads_of(|| thread.spawn(start_it)) {
            let why = format!("no thread can be had to start it: {error}");
            let outcome = Err(AttachDenied::TryLater(why).into());
            self.post.send(Message::Started { slot: at, generation, outcome });
        }
    }

    pub(super) fn started(
        &mut self,
        at: usize,
        generation: u64,
        outcome: Result<Box<Process>, NotStarted>,
        now: Instant,
    ) {
        if self.slots.get(at).is_none_or(|slot| slot.generation != generation) {
            return;
        }
        let process = match outcome {
            Ok(process) => process,
            Err(reason) => return self.not_started(at, &reason, now),
        };
        let is_watched = self.watch(at, &process);
        let setup_until = self.plan.setup_timeout.map(|limit| now + limit);
        let slot = &mut self.slots[at];
        slot.stage = Stage::Alive(process, Phase::SettingUp(setup_until));
        (slot.told, slot.look_at) = (None, None);
        (slot.is_muted, slot.is_retiring) = (false, false);
        if let Err(error) = is_watched {
            return self.bury(at, Some(WorkerExitCause::StartFailed(error.to_string().into())), Duration::ZERO);
        }
        let slot = &mut self.slots[at];
        let is_outdated = std::mem::take(&mut slot.is_outdated);
        if slot.withdrawn.is_some() || is_outdated || self.progress != Progress::Open {
            return self.bury(at, Some(WorkerExitCause::Stopped), Duration::ZERO);
        }
        if self.plan.program.speaks == Speaks::Lines {
            // It says nothing of itself: it is ready when it runs.
            self.is_ready(at, Skill::None, now);
        }
    }

    fn not_started(&mut self, at: usize, reason: &NotStarted, now: Instant) {
        let why: Arc<str> = reason.to_string().into();
        let slot = &mut self.slots[at];
        let is_outdated = std::mem::take(&mut slot.is_outdated);
        match reason {
            // Of a place it has no more; the one it has now is another.
            NotStarted::NotAttached(AttachDenied::SlotRevoked(_)) if is_outdated && slot.withdrawn.is_none() => {
                slot.stage = Stage::Waiting(now);
            }
            NotStarted::NotAttached(AttachDenied::SlotRevoked(_)) => {
                slot.withdrawn.get_or_insert_with(|| Arc::clone(&why));
                self.ended(at, Phase::SettingUp(None), WorkerExitCause::GpuWithdrawn(why), now);
            }
            NotStarted::NotAttached(AttachDenied::TryLater(_))
                if slot.deaths < SETUP_TRIES && slot.withdrawn.is_none() =>
            {
                slot.deaths += 1;
                slot.stage = Stage::Waiting(now + backoff(slot.deaths + 1));
            }
            _ => {
                slot.setup_failure = Some(Arc::clone(&why));
                self.ended(at, Phase::SettingUp(None), WorkerExitCause::StartFailed(why), now);
            }
        }
    }

    fn watch(&self, at: usize, process: &Process) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, &process.wire, Source::Socket(at).to_data(), EventFlags::IN)?;
        epoll::add(&self.epoll, &process.job, Source::Job(at).to_data(), EventFlags::IN)?;
        match &process.writes {
            Some(writes) => epoll::add(&self.epoll, writes, Source::Writes(at).to_data(), EventFlags::IN),
            None => Ok(()),
        }
    }

    fn is_ready(&mut self, at: usize, skill: Skill, now: Instant) {
        let lifetime = self.plan.worker_lifetime.map(|lifetime| now + lifetime);
        let slot = &mut self.slots[at];
        if let Stage::Alive(_, phase) = &mut slot.stage {
            *phase = Phase::AtWork(lifetime);
        }
        slot.has_worked = true;
        let worker = slot.place.id;
        self.delivery.tell(RunEvent::WorkerReady { worker });
        if self.progress == Progress::Open {
            self.ledger.ready(worker, skill, now);
        } else if let Stage::Alive(process, phase) = &mut self.slots[at].stage {
            process.wire.put_stop();
            *phase = Phase::Stopping(now + self.plan.clean_up_timeout);
        }
    }

    pub(super) fn put_tasks(&mut self, worker: WorkerId, tasks: &[TaskId], now: Instant) {
        let Some(at) = self.slot_of(worker) else { return };
        if let Stage::Alive(process, _) = &mut self.slots[at].stage {
            if let Some(held) = process.held.as_ref().filter(|_| self.plan.counts_cpu_time_per_task()) {
                held.restart_cpu_time();
            }
            for task in tasks {
                if let Some(payload) = self.payloads.get(task) {
                    process.wire.put_task(*task, payload.clone());
                }
            }
        }
        self.report_started(at, now);
    }

    /// Takes back what a worker has not claimed.
    pub(super) fn recall(&mut self, worker: WorkerId) {
        let Some(at) = self.slot_of(worker) else { return };
        if let Stage::Alive(process, _) = &mut self.slots[at].stage {
            let claimed = process.counters.recall();
            process.wire.put_recalled();
            self.ledger.recalled(worker, claimed, &mut self.effects);
        }
    }

    /// Whatever a worker has first, it works on.
    fn report_started(&mut self, at: usize, now: Instant) {
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let (Some(task), _) = self.ledger.at(worker) else { return };
        let behind = self.ledger.has_behind(worker).then(|| now + RECALL_AFTER);
        if slot.told == Some(task) {
            slot.look_at = slot.look_at.or(behind);
            return;
        }
        slot.told = Some(task);
        slot.look_at = if self.ledger.has_timeout() { Some(now) } else { behind };
        if self.plan.report_started {
            self.delivery.tell(RunEvent::TaskStarted { task, worker, at: now });
        }
    }

    /// Sends what waits to be sent, and asks to be told when more can be.
    pub(super) fn send_all(&mut self) {
        for at in 0..self.slots.len() {
            let Stage::Alive(process, _) = &mut self.slots[at].stage else { continue };
            if !process.wire.is_full() {
                continue;
            }
            let sent = process.wire.send();
            if process.wire.is_full() {
                let flags = EventFlags::IN | EventFlags::OUT;
                let _ = epoll::modify(&self.epoll, &process.wire, Source::Socket(at).to_data(), flags);
            }
            if sent.is_err() {
                self.bury(at, None, EXIT_PATIENCE);
            }
        }
    }

    pub(super) fn socket_is_ready(&mut self, at: usize, flags: EventFlags, now: Instant) {
        if flags.contains(EventFlags::OUT)
            && let Some(Stage::Alive(process, _)) = self.slots.get(at).map(|slot| &slot.stage)
        {
            // The next turn sends; asked for again where that is not all.
            let _ = epoll::modify(&self.epoll, &process.wire, Source::Socket(at).to_data(), EventFlags::IN);
        }
        if !flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            return;
        }
        let Some(Stage::Alive(process, _)) = self.slots.get_mut(at).map(|slot| &mut slot.stage) else { return };
        match process.wire.read() {
            Ok(true) => self.hear(at, now),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(false) | Err(_) => self.bury(at, None, EXIT_PATIENCE),
        }
    }

    /// Deals with all a worker said that was read.
    fn hear(&mut self, at: usize, now: Instant) {
        while let Stage::Alive(process, _) = &mut self.slots[at].stage {
            let understood = match process.wire.heard() {
                Ok(None) => return,
                Ok(Some(heard)) => self.hear_one(at, heard, now),
                Err(nonsense) => Err(nonsense),
            };
            if let Err(nonsense) = understood {
                self.bury(at, Some(WorkerExitCause::ProtocolViolation(nonsense.into())), Duration::ZERO);
            }
        }
    }

    fn hear_one(&mut self, at: usize, heard: Heard, now: Instant) -> Result<(), String> {
        let frame = match heard {
            Heard::Frame(frame) => frame,
            Heard::Result(outcome) => {
                let task = self.ledger.at(self.slots[at].place.id).0.ok_or("it wrote a line without having a task")?;
                return self.answered(at, task, outcome, now);
            }
        };
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let phase = match &slot.stage {
            Stage::Alive(_, phase) => *phase,
            Stage::Dying(remains) => remains.phase,
            _ => return Ok(()),
        };
        match (frame.kind, phase) {
            (Kind::Ready, Phase::SettingUp(_)) => {
                let ready = ready_of(&frame.payload)?;
                if matches!(slot.stage, Stage::Alive(..)) {
                    let skill = match (ready.counts, ready.recalls) {
                        (true, true) => Skill::Recalls,
                        (true, false) => Skill::Counts,
                        (false, _) => Skill::None,
                    };
                    self.is_ready(at, skill, now);
                }
            }
            (Kind::SetupFailed, Phase::SettingUp(_)) => slot.setup_failure = Some(frame.text()),
            (Kind::Done, Phase::AtWork(_) | Phase::GivingUp(_)) => {
                self.answered(at, frame.task, TaskOutcome::Done(frame.payload), now)?
            }
            (Kind::Failed, Phase::AtWork(_) | Phase::GivingUp(_)) => {
                self.answered(at, frame.task, TaskOutcome::Failed(frame.payload), now)?
            }
            (Kind::Started, Phase::AtWork(_) | Phase::GivingUp(_)) => {}
            (Kind::CleanupFailed, Phase::AtWork(_) | Phase::GivingUp(_) | Phase::Stopping(_)) => {
                self.delivery.tell(RunEvent::WorkerCleanupFailed { worker, why: frame.text() });
            }
            (kind, phase) => return Err(format!("it said {kind:?} while {}", phase.doing())),
        }
        Ok(())
    }

    fn answered(&mut self, at: usize, task: TaskId, outcome: TaskOutcome, now: Instant) -> Result<(), String> {
        self.keep_output(at, task, &outcome);
        let excess = self.excess_behind(at, &outcome);
        let outcome = match &excess {
            Some(excess) => TaskOutcome::WorkerLost(WorkerLoss {
                stage: crate::LossStage::Running,
                cause: WorkerExitCause::BoundExceeded(excess.clone()),
            }),
            None => outcome,
        };
        let slot = &mut self.slots[at];
        slot.deaths = 0;
        let worker = slot.place.id;
        self.ledger.answered(worker, task, outcome, now, &mut self.effects).map_err(|nonsense| nonsense.to_string())?;
        // Over before the next is told to be started.
        self.obey_effects(now);
        if let Some(excess) = excess {
            self.bury(at, Some(WorkerExitCause::BoundExceeded(excess)), Duration::ZERO);
            return Ok(());
        }
        self.report_started(at, now);
        if self.slots[at].is_retiring {
            self.life_is_over(at);
        }
        Ok(())
    }

    /// A task that failed may have, because something of it was killed for using too much. Asked at once: when that is told
    /// the worker may be at another task, which has nothing to do with it.
    fn excess_behind(&self, at: usize, outcome: &TaskOutcome) -> Option<BoundExceeded> {
        match (&self.slots[at].stage, outcome) {
            (Stage::Alive(process, _), TaskOutcome::Failed(_)) => process.held.as_ref()?.exceeded_bound(),
            _ => None,
        }
    }

    /// What a command wrote is known by its runner's report; without one, all that is there.
    fn keep_output(&mut self, at: usize, task: TaskId, outcome: &TaskOutcome) {
        let spool = match &self.slots[at].stage {
            Stage::Alive(process, _) => &process.spool,
            Stage::Dying(remains) => &remains.spool,
            _ => return,
        };
        let Some(spool) = spool else { return };
        let report = match outcome {
            TaskOutcome::Done(said) | TaskOutcome::Failed(said) => CommandReport::parse(said),
            _ => None,
        };
        self.outputs.insert(task, spool.output(report.map(|report| report.written)));
    }

    /// Whether its task takes too long.
    pub(super) fn look_at_time(&mut self, at: usize, now: Instant) {
        let slot = &mut self.slots[at];
        let Stage::Alive(process, Phase::AtWork(_)) = &slot.stage else {
            slot.look_at = None;
            return;
        };
        if slot.look_at.is_none_or(|look_at| now < look_at) {
            return;
        }
        let counted = process.counters.read();
        let begun = self.clock.of(counted.started_at_ns, now);
        slot.look_at = self.ledger.look(Seen { worker: slot.place.id, counted, begun, now }, &mut self.effects);
    }

    /// Reads what a worker wrote to its standard output or error.
    pub(super) fn read_words(&mut self, at: usize) {
        let is_too_much = self.delivery.ready() > UNREAD_EVENTS;
        let slot = &mut self.slots[at];
        let Stage::Alive(process, _) = &mut slot.stage else { return };
        let Some(writes) = &process.writes else { return };
        let mut bytes = bytes::BytesMut::new();
        let read = if is_too_much { Ok(0) } else { read_into(&mut bytes, READ_BYTES, writes) };
        match read {
            Ok(0) if is_too_much => {
                // It waits until somebody takes what there is. Not only asked for nothing: a hang-up would be told all the same.
                slot.is_muted = epoll::delete(&self.epoll, writes).is_ok();
            }
            Ok(0) => {
                let _ = epoll::delete(&self.epoll, writes);
                process.writes = None;
            }
            Ok(_) => self.hear_words(at, bytes),
            Err(_) => {}
        }
    }

    fn hear_words(&mut self, at: usize, words: bytes::BytesMut) {
        let slot = &mut self.slots[at];
        slot.keep_words(&words);
        if self.plan.output == WorkerOutputPolicy::Reported && !words.is_empty() {
            self.delivery.tell(RunEvent::WorkerWrote { worker: slot.place.id, bytes: words.freeze() });
        }
    }

    /// What was not read because nobody took what there was is read again.
    pub(super) fn listen_again(&mut self) {
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if !std::mem::take(&mut slot.is_muted) {
                continue;
            }
            if let Stage::Alive(process, _) = &slot.stage
                && let Some(writes) = &process.writes
            {
                let _ = epoll::add(&self.epoll, writes, Source::Writes(at).to_data(), EventFlags::IN);
            }
        }
    }

    /// A worker that has lived long enough is replaced when it is done with what it has.
    pub(super) fn life_is_over(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.is_retiring = true;
        let is_free = self.ledger.retire(slot.place.id);
        if let Stage::Alive(process, phase) = &mut slot.stage {
            *phase = Phase::AtWork(None);
            if is_free {
                process.wire.put_stop();
                *phase = Phase::Stopping(Instant::now() + self.plan.clean_up_timeout);
            }
        }
    }

    /// The worker's keeper has something to tell. Stopped or continued by somebody, it is still a worker.
    pub(super) fn job_is_ready(&mut self, at: usize) {
        while let Some(Stage::Alive(process, _)) = self.slots.get_mut(at).map(|slot| &mut slot.stage) {
            match process.job.try_next_event() {
                Ok(None) => return,
                Ok(Some(JobEvent::Stopped(_) | JobEvent::Continued)) => {}
                Ok(Some(JobEvent::Ended(_))) | Err(_) => self.bury(at, None, Duration::ZERO),
            }
        }
    }
}

// A worker's end: its process is seen off by a thread, what it still said is heard, and somebody takes its place.

impl Engine {
    /// Ends a worker that is alive: killed after a grace, in which it may end by itself. Once it is gone, `buried` goes on.
    pub(super) fn bury(&mut self, at: usize, cause: Option<WorkerExitCause>, grace: Duration) {
        let slot = &mut self.slots[at];
        if !matches!(slot.stage, Stage::Alive(..)) {
            return;
        }
        let Stage::Alive(process, phase) = std::mem::replace(&mut slot.stage, Stage::Gone) else { return };
        let Process { job, held, mut wire, counters, writes, spool } = *process;
        for gone in [epoll::delete(&self.epoll, &wire), epoll::delete(&self.epoll, &job)] {
            debug_assert!(gone.is_ok(), "{gone:?}");
        }
        if let Some(writes) = &writes {
            let _ = epoll::delete(&self.epoll, writes);
        }
        let (generation, post) = (slot.generation, Arc::clone(&self.post));
        end(job, held, &mut wire, grace, move |cause| post.send(Message::Buried { slot: at, generation, cause }));
        slot.stage = Stage::Dying(Box::new(Remains { wire, counters, writes, spool, phase, cause }));
    }

    /// A process is gone; `cause` is what it died of where we did not kill it.
    pub(super) fn buried(&mut self, at: usize, generation: u64, cause: WorkerExitCause, now: Instant) {
        if self.slots.get(at).is_none_or(|slot| slot.generation != generation) {
            return;
        }
        self.hear_the_rest(at, now);
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let Stage::Dying(remains) = &slot.stage else { return };
        let phase = remains.phase;
        let cause = remains.cause.clone().unwrap_or(cause);
        let counted = remains.counters.read();
        if let (Some(task), _) = self.ledger.at(worker) {
            self.keep_output(at, task, &TaskOutcome::Cancelled);
        }
        self.ledger.gone(worker, counted, &cause, &mut self.effects);
        self.obey_effects(now);
        self.ended(at, phase, cause, now);
    }

    /// What it said and wrote before it died is heard.
    fn hear_the_rest(&mut self, at: usize, now: Instant) {
        let slot = &mut self.slots[at];
        let Stage::Dying(remains) = &mut slot.stage else { return };
        let mut words = bytes::BytesMut::new();
        if let Some(writes) = &remains.writes {
            while matches!(read_into(&mut words, READ_BYTES, writes), Ok(read) if read > 0) {}
        }
        if !matches!(remains.cause, Some(WorkerExitCause::ProtocolViolation(_))) {
            let last = remains.wire.last_heard(&remains.counters);
            for heard in last {
                if self.hear_one(at, heard, now).is_err() {
                    break;
                }
            }
        }
        self.hear_words(at, words);
    }

    /// Its process is gone: who comes next, if anybody.
    pub(super) fn ended(&mut self, at: usize, phase: Phase, cause: WorkerExitCause, now: Instant) {
        let is_open = self.progress == Progress::Open && !self.ledger.is_cancelled();
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let last_words = slot.take_last_words();
        let is_withdrawn = slot.withdrawn.is_some();
        let mut is_wanted = is_open && !is_withdrawn;
        slot.deaths += u32::from(!matches!(phase, Phase::Stopping(_)));
        // What a worker says that was interrupted came of that.
        let is_interrupted = self.ledger.is_cancelled() && matches!(cause, WorkerExitCause::Stopped);
        let own_words = slot.setup_failure.take().filter(|_| !is_interrupted);
        let is_setup_failure = matches!(phase, Phase::SettingUp(_)) && (is_wanted || own_words.is_some());
        let why = own_words.unwrap_or_else(|| with_words(&cause, &last_words));
        if is_setup_failure {
            is_wanted &= slot.has_worked && slot.deaths <= SETUP_TRIES;
            self.delivery.tell(RunEvent::WorkerSetupFailed { worker, why: Arc::clone(&why) });
        }
        slot.replaced += u64::from(is_wanted);
        slot.stage = if is_wanted { Stage::Waiting(now + backoff(slot.deaths)) } else { Stage::Gone };
        if !matches!(phase, Phase::SettingUp(_)) || is_withdrawn {
            self.delivery.tell(RunEvent::WorkerGone { worker, cause, last_words, is_last: !is_wanted });
        }
        if is_open && !is_wanted && !is_withdrawn {
            self.check_somebody_is_left(at, why);
        }
    }

    fn check_somebody_is_left(&mut self, last: usize, why: Arc<str>) {
        // A place that was taken away may come back.
        if self.slots.iter().any(|slot| !matches!(slot.stage, Stage::Gone) || slot.withdrawn.is_some()) {
            return;
        }
        let worker = self.slots[last].place.id;
        self.give_up(if self.slots.iter().any(|slot| slot.has_worked) {
            DispatchError::NoneLeft { worker, why }
        } else {
            DispatchError::AllFailedSetup { worker, why }
        });
    }
}

fn with_words(cause: &WorkerExitCause, last_words: &str) -> Arc<str> {
    match last_words.trim_end() {
        "" => cause.to_string().into(),
        words => format!("{cause}; its last words:\n{words}").into(),
    }
}
