//! A worker from the start of its process to its end: tasks, messages, output, timeouts and restarts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_confine::bounds::BoundExceeded;
use gpupool_confine::spawn::JobEvent;
use rustix::event::epoll::{self, EventFlags};

use super::worker_slot::{DyingProcess, SlotStage, WorkerPhase};
use super::{Engine, EngineMessage, EpollSource, RunProgress};
use crate::command::CommandReport;
use crate::event::{DispatchError, RunEvent};
use crate::limits::{EXIT_TIMEOUT, MAX_SETUP_TRIES, MAX_UNREAD_EVENTS, READ_BYTES, RECALL_AFTER};
use crate::plan::{AttachDenied, WorkerOutputPolicy, WorkerProtocol};
use crate::process::{
    WorkerMessage, WorkerProcess, WorkerStartError, backoff, end_worker_process, parse_ready, spawn_without_signals,
    start_worker_process,
};
use crate::protocol::{FrameKind, read_into_buffer};
use crate::scheduler::{WorkerCapability, WorkerSample};
use crate::{TaskId, TaskOutcome, WorkerExitCause, WorkerId, WorkerLoss};

impl Engine {
    pub(super) fn start_process(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.stage = SlotStage::Starting;
        slot.generation += 1;
        let (generation, spec) = (slot.generation, slot.spec.clone());
        let (plan, mailbox, watcher) = (Arc::clone(&self.plan), Arc::clone(&self.mailbox), Arc::clone(&self.watcher));
        let start_process = move || {
            let to = Arc::clone(&mailbox);
            let on_excess = move |excess| to.send(EngineMessage::ExceededBound { slot: index, generation, excess });
            let outcome = start_worker_process(&plan, &spec, &watcher, Box::new(on_excess)).map(Box::new);
            mailbox.send(EngineMessage::Started { slot: index, generation, outcome });
        };
        // Ends when the process has started or failed; the run does not end before.
        let thread = std::thread::Builder::new().name("gpupool-start".into());
        if let Err(error) = spawn_without_signals(|| thread.spawn(start_process)) {
            let why = format!("cannot start a thread for the worker: {error}");
            let outcome = Err(AttachDenied::TryLater(why).into());
            self.mailbox.send(EngineMessage::Started { slot: index, generation, outcome });
        }
    }

    pub(super) fn on_process_started(
        &mut self,
        index: usize,
        generation: u64,
        outcome: Result<Box<WorkerProcess>, WorkerStartError>,
        now: Instant,
    ) {
        if self.slots.get(index).is_none_or(|slot| slot.generation != generation) {
            return;
        }
        let process = match outcome {
            Ok(process) => process,
            Err(reason) => return self.on_start_failed(index, &reason, now),
        };
        let registered = self.register_fds(index, &process);
        let setup_until = self.plan.setup_timeout.map(|limit| now + limit);
        let slot = &mut self.slots[index];
        slot.stage = SlotStage::Running(process, WorkerPhase::SettingUp(setup_until));
        (slot.reported_task, slot.check_at) = (None, None);
        (slot.is_output_paused, slot.is_retiring) = (false, false);
        if let Err(error) = registered {
            return self.kill_process(index, WorkerExitCause::StartFailed(error.to_string().into()));
        }
        let slot = &mut self.slots[index];
        let is_outdated = std::mem::take(&mut slot.is_outdated);
        if slot.withdrawn.is_some() || is_outdated || self.progress != RunProgress::Open {
            return self.kill_process(index, WorkerExitCause::Stopped);
        }
        if self.plan.program.protocol == WorkerProtocol::Lines {
            // A worker with the line protocol sends no ready message.
            self.on_worker_ready(index, WorkerCapability::OneTask, now);
        }
    }

    fn on_start_failed(&mut self, index: usize, reason: &WorkerStartError, now: Instant) {
        let why: Arc<str> = reason.to_string().into();
        let slot = &mut self.slots[index];
        let is_outdated = std::mem::take(&mut slot.is_outdated);
        match reason {
            // The revoked slot was replaced by a new one while its process started.
            WorkerStartError::NotAttached(AttachDenied::SlotRevoked(_)) if is_outdated && slot.withdrawn.is_none() => {
                slot.stage = SlotStage::Waiting(now);
            }
            WorkerStartError::NotAttached(AttachDenied::SlotRevoked(_)) => {
                slot.withdrawn.get_or_insert_with(|| Arc::clone(&why));
                self.on_worker_ended(index, WorkerPhase::SettingUp(None), WorkerExitCause::GpuWithdrawn(why), now);
            }
            WorkerStartError::NotAttached(AttachDenied::TryLater(_))
                if slot.deaths < MAX_SETUP_TRIES && slot.withdrawn.is_none() =>
            {
                slot.deaths += 1;
                slot.stage = SlotStage::Waiting(now + backoff(slot.deaths + 1));
            }
            _ => {
                slot.setup_failure = Some(Arc::clone(&why));
                self.on_worker_ended(index, WorkerPhase::SettingUp(None), WorkerExitCause::StartFailed(why), now);
            }
        }
    }

    fn register_fds(&self, index: usize, process: &WorkerProcess) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, &process.socket, EpollSource::Socket(index).to_data(), EventFlags::IN)?;
        epoll::add(&self.epoll, &process.job, EpollSource::Job(index).to_data(), EventFlags::IN)?;
        match &process.output_pipe {
            Some(output) => epoll::add(&self.epoll, output, EpollSource::Output(index).to_data(), EventFlags::IN),
            None => Ok(()),
        }
    }

    fn on_worker_ready(&mut self, index: usize, capability: WorkerCapability, now: Instant) {
        let lifetime = self.plan.worker_lifetime.map(|lifetime| now + lifetime);
        let slot = &mut self.slots[index];
        if let SlotStage::Running(_, phase) = &mut slot.stage {
            *phase = WorkerPhase::Serving(lifetime);
        }
        slot.has_worked = true;
        let worker = slot.spec.id;
        self.events.push_event(RunEvent::WorkerReady { worker });
        if self.progress == RunProgress::Open {
            self.scheduler.add_worker(worker, capability, now);
        } else if let SlotStage::Running(process, phase) = &mut self.slots[index].stage {
            process.socket.queue_stop();
            *phase = WorkerPhase::Stopping(now + self.plan.clean_up_timeout);
        }
    }

    pub(super) fn send_tasks(&mut self, worker: WorkerId, tasks: &[TaskId], now: Instant) {
        let Some(index) = self.slot_index(worker) else { return };
        if let SlotStage::Running(process, _) = &mut self.slots[index].stage {
            if let Some(bounded_job) = process.bounded_job.as_ref().filter(|_| self.plan.counts_cpu_time_per_task()) {
                bounded_job.restart_cpu_time();
            }
            for task in tasks {
                if let Some(payload) = self.payloads.get(task) {
                    process.socket.queue_task(*task, payload.clone());
                }
            }
        }
        self.report_task_start(index, now);
    }

    /// Takes back the tasks that a worker has not claimed.
    pub(super) fn recall_tasks(&mut self, worker: WorkerId) {
        let Some(index) = self.slot_index(worker) else { return };
        if let SlotStage::Running(process, _) = &mut self.slots[index].stage {
            let claimed = process.counters.recall_unclaimed();
            process.socket.queue_recalled();
            self.scheduler.take_back_unclaimed(worker, claimed, &mut self.effects);
        }
    }

    /// Reports the first task in a worker's queue as started.
    fn report_task_start(&mut self, index: usize, now: Instant) {
        let slot = &mut self.slots[index];
        let worker = slot.spec.id;
        let (Some(task), _) = self.scheduler.current_task(worker) else { return };
        let behind = self.scheduler.has_blocked_tasks(worker).then(|| now + RECALL_AFTER);
        if slot.reported_task == Some(task) {
            slot.check_at = slot.check_at.or(behind);
            return;
        }
        slot.reported_task = Some(task);
        slot.check_at = if self.scheduler.has_timeout() { Some(now) } else { behind };
        if self.plan.report_started {
            self.events.push_event(RunEvent::TaskStarted { task, worker, at: now });
        }
    }

    /// Sends queued bytes, and polls for writability if some are left.
    pub(super) fn send_pending(&mut self) {
        for index in 0..self.slots.len() {
            let SlotStage::Running(process, _) = &mut self.slots[index].stage else { continue };
            if !process.socket.has_unsent() {
                continue;
            }
            let sent = process.socket.send_pending();
            if process.socket.has_unsent() {
                let flags = EventFlags::IN | EventFlags::OUT;
                let _ = epoll::modify(&self.epoll, &process.socket, EpollSource::Socket(index).to_data(), flags);
            }
            if sent.is_err() {
                self.end_process(index, None, EXIT_TIMEOUT);
            }
        }
    }

    pub(super) fn on_socket_ready(&mut self, index: usize, flags: EventFlags, now: Instant) {
        if flags.contains(EventFlags::OUT)
            && let Some(SlotStage::Running(process, _)) = self.slots.get(index).map(|slot| &slot.stage)
        {
            // The next turn sends, and polls again if bytes are left.
            let _ = epoll::modify(&self.epoll, &process.socket, EpollSource::Socket(index).to_data(), EventFlags::IN);
        }
        if !flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            return;
        }
        let Some(SlotStage::Running(process, _)) = self.slots.get_mut(index).map(|slot| &mut slot.stage) else {
            return;
        };
        match process.socket.read() {
            Ok(true) => self.read_messages(index, now),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(false) | Err(_) => self.end_process(index, None, EXIT_TIMEOUT),
        }
    }

    /// Handles all messages that were read from a worker.
    fn read_messages(&mut self, index: usize, now: Instant) {
        while let SlotStage::Running(process, _) = &mut self.slots[index].stage {
            let handled = match process.socket.next_message() {
                Ok(None) => return,
                Ok(Some(message)) => self.on_message(index, message, now),
                Err(violation) => Err(violation),
            };
            if let Err(violation) = handled {
                self.kill_process(index, WorkerExitCause::ProtocolViolation(violation.into()));
            }
        }
    }

    fn on_message(&mut self, index: usize, message: WorkerMessage, now: Instant) -> Result<(), String> {
        let frame = match message {
            WorkerMessage::Frame(frame) => frame,
            WorkerMessage::Result(outcome) => {
                let task =
                    self.scheduler.current_task(self.slots[index].spec.id).0.ok_or("it wrote a line without a task")?;
                return self.on_result(index, task, outcome, now);
            }
        };
        let slot = &mut self.slots[index];
        let worker = slot.spec.id;
        let phase = match &slot.stage {
            SlotStage::Running(_, phase) => *phase,
            SlotStage::Dying(dying) => dying.phase,
            _ => return Ok(()),
        };
        match (frame.kind, phase) {
            (FrameKind::Ready, WorkerPhase::SettingUp(_)) => {
                let ready = parse_ready(&frame.payload)?;
                if matches!(slot.stage, SlotStage::Running(..)) {
                    let capability = match (ready.counts, ready.recalls) {
                        (true, true) => WorkerCapability::Recallable,
                        (true, false) => WorkerCapability::Counting,
                        (false, _) => WorkerCapability::OneTask,
                    };
                    self.on_worker_ready(index, capability, now);
                }
            }
            (FrameKind::SetupFailed, WorkerPhase::SettingUp(_)) => slot.setup_failure = Some(frame.payload_text()),
            (FrameKind::Done, WorkerPhase::Serving(_) | WorkerPhase::Cancelling(_)) => {
                self.on_result(index, frame.task, TaskOutcome::Done(frame.payload), now)?
            }
            (FrameKind::Failed, WorkerPhase::Serving(_) | WorkerPhase::Cancelling(_)) => {
                self.on_result(index, frame.task, TaskOutcome::Failed(frame.payload), now)?
            }
            (FrameKind::Started, WorkerPhase::Serving(_) | WorkerPhase::Cancelling(_)) => {}
            (
                FrameKind::CleanupFailed,
                WorkerPhase::Serving(_) | WorkerPhase::Cancelling(_) | WorkerPhase::Stopping(_),
            ) => {
                self.events.push_event(RunEvent::WorkerCleanupFailed { worker, why: frame.payload_text() });
            }
            (kind, phase) => return Err(format!("it sent {kind:?} while {}", phase.description())),
        }
        Ok(())
    }

    fn on_result(&mut self, index: usize, task: TaskId, outcome: TaskOutcome, now: Instant) -> Result<(), String> {
        self.capture_output(index, task, &outcome);
        let excess = self.find_exceeded_bound(index, &outcome);
        let outcome = match &excess {
            Some(excess) => TaskOutcome::WorkerLost(WorkerLoss {
                stage: crate::LossStage::Running,
                cause: WorkerExitCause::BoundExceeded(excess.clone()),
            }),
            None => outcome,
        };
        let slot = &mut self.slots[index];
        slot.deaths = 0;
        let worker = slot.spec.id;
        self.scheduler
            .record_result(worker, task, outcome, now, &mut self.effects)
            .map_err(|violation| violation.to_string())?;
        // The end of this task precedes the start of the next.
        self.apply_effects(now);
        if let Some(excess) = excess {
            self.kill_process(index, WorkerExitCause::BoundExceeded(excess));
            return Ok(());
        }
        self.report_task_start(index, now);
        if self.slots[index].is_retiring {
            self.retire_worker(index);
        }
        Ok(())
    }

    /// Finds the exceeded bound behind a failed task. Must run at once, because the notification may arrive when the
    /// worker already runs another task.
    fn find_exceeded_bound(&self, index: usize, outcome: &TaskOutcome) -> Option<BoundExceeded> {
        match (&self.slots[index].stage, outcome) {
            (SlotStage::Running(process, _), TaskOutcome::Failed(_)) => process.bounded_job.as_ref()?.exceeded_bound(),
            _ => None,
        }
    }

    /// Captures what a command wrote, as its runner reports; all unread output if there is no report.
    fn capture_output(&mut self, index: usize, task: TaskId, outcome: &TaskOutcome) {
        let output_spool = match &self.slots[index].stage {
            SlotStage::Running(process, _) => &process.output_spool,
            SlotStage::Dying(dying) => &dying.output_spool,
            _ => return,
        };
        let Some(output_spool) = output_spool else { return };
        let report = match outcome {
            TaskOutcome::Done(payload) | TaskOutcome::Failed(payload) => CommandReport::parse(payload),
            _ => None,
        };
        self.outputs.insert(task, output_spool.output(report.map(|report| report.written)));
    }

    /// Checks the time limit of a worker's task.
    pub(super) fn check_task_timeout(&mut self, index: usize, now: Instant) {
        let slot = &mut self.slots[index];
        let SlotStage::Running(process, WorkerPhase::Serving(_)) = &slot.stage else {
            slot.check_at = None;
            return;
        };
        if slot.check_at.is_none_or(|check_at| now < check_at) {
            return;
        }
        let counted = process.counters.read();
        let started = self.clock.to_instant(counted.started_at_ns, now);
        slot.check_at = self
            .scheduler
            .check_worker(WorkerSample { worker: slot.spec.id, counted, started, now }, &mut self.effects);
    }

    /// Reads a worker's standard output and error.
    pub(super) fn read_output(&mut self, index: usize) {
        let is_too_much = self.events.ready_count() > MAX_UNREAD_EVENTS;
        let slot = &mut self.slots[index];
        let SlotStage::Running(process, _) = &mut slot.stage else { return };
        let Some(output) = &process.output_pipe else { return };
        let mut bytes = bytes::BytesMut::new();
        let read = if is_too_much { Ok(0) } else { read_into_buffer(&mut bytes, READ_BYTES, output) };
        match read {
            Ok(0) if is_too_much => {
                // Reading resumes when the caller takes events. The descriptor is removed from epoll, because a hang-up
                // is reported even with an empty event mask.
                slot.is_output_paused = epoll::delete(&self.epoll, output).is_ok();
            }
            Ok(0) => {
                let _ = epoll::delete(&self.epoll, output);
                process.output_pipe = None;
            }
            Ok(_) => self.on_output(index, bytes),
            Err(_) => {}
        }
    }

    fn on_output(&mut self, index: usize, bytes: bytes::BytesMut) {
        let slot = &mut self.slots[index];
        slot.append_output(&bytes);
        if self.plan.output == WorkerOutputPolicy::Reported && !bytes.is_empty() {
            self.events.push_event(RunEvent::WorkerWrote { worker: slot.spec.id, bytes: bytes.freeze() });
        }
    }

    /// Resumes reading the output that was paused by too many undelivered events.
    pub(super) fn resume_output_reading(&mut self) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if !std::mem::take(&mut slot.is_output_paused) {
                continue;
            }
            if let SlotStage::Running(process, _) = &slot.stage
                && let Some(output) = &process.output_pipe
            {
                let _ = epoll::add(&self.epoll, output, EpollSource::Output(index).to_data(), EventFlags::IN);
            }
        }
    }

    /// Replaces a worker at the end of its lifetime, when its queued tasks are done.
    pub(super) fn retire_worker(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.is_retiring = true;
        let is_free = self.scheduler.retire_worker(slot.spec.id);
        if let SlotStage::Running(process, phase) = &mut slot.stage {
            *phase = WorkerPhase::Serving(None);
            if is_free {
                process.socket.queue_stop();
                *phase = WorkerPhase::Stopping(Instant::now() + self.plan.clean_up_timeout);
            }
        }
    }

    /// Handles an event of the worker's job. A worker that was stopped or continued by a signal stays a worker.
    pub(super) fn on_job_ready(&mut self, index: usize) {
        while let Some(SlotStage::Running(process, _)) = self.slots.get_mut(index).map(|slot| &mut slot.stage) {
            match process.job.try_next_event() {
                Ok(None) => return,
                Ok(Some(JobEvent::Stopped(_) | JobEvent::Continued)) => {}
                Ok(Some(JobEvent::Ended(_))) | Err(_) => self.end_process(index, None, Duration::ZERO),
            }
        }
    }
}

// The end of a worker: a thread reaps its process, its final messages are handled, and its slot restarts.

impl Engine {
    /// Kills a running worker and its descendants.
    pub(super) fn kill_process(&mut self, index: usize, cause: WorkerExitCause) {
        self.end_process(index, Some(cause), Duration::ZERO);
    }

    /// Ends a running worker: kills it after a grace in which it may exit on its own. `on_process_reaped` follows.
    pub(super) fn end_process(&mut self, index: usize, cause: Option<WorkerExitCause>, grace: Duration) {
        let slot = &mut self.slots[index];
        if !matches!(slot.stage, SlotStage::Running(..)) {
            return;
        }
        let SlotStage::Running(process, phase) = std::mem::replace(&mut slot.stage, SlotStage::Gone) else { return };
        let WorkerProcess { job, bounded_job, mut socket, counters, output_pipe, output_spool } = *process;
        for removed in [epoll::delete(&self.epoll, &socket), epoll::delete(&self.epoll, &job)] {
            debug_assert!(removed.is_ok(), "{removed:?}");
        }
        if let Some(output) = &output_pipe {
            let _ = epoll::delete(&self.epoll, output);
        }
        let (generation, mailbox) = (slot.generation, Arc::clone(&self.mailbox));
        end_worker_process(job, bounded_job, &mut socket, grace, move |cause| {
            mailbox.send(EngineMessage::Reaped { slot: index, generation, cause })
        });
        slot.stage =
            SlotStage::Dying(Box::new(DyingProcess { socket, counters, output_pipe, output_spool, phase, cause }));
    }

    /// Handles the exit of a process; `cause` applies unless the engine killed it.
    pub(super) fn on_process_reaped(&mut self, index: usize, generation: u64, cause: WorkerExitCause, now: Instant) {
        if self.slots.get(index).is_none_or(|slot| slot.generation != generation) {
            return;
        }
        self.drain_final_messages(index, now);
        let slot = &mut self.slots[index];
        let worker = slot.spec.id;
        let SlotStage::Dying(dying) = &slot.stage else { return };
        let phase = dying.phase;
        let cause = dying.cause.clone().unwrap_or(cause);
        let counted = dying.counters.read();
        if let (Some(task), _) = self.scheduler.current_task(worker) {
            self.capture_output(index, task, &TaskOutcome::Cancelled);
        }
        self.scheduler.remove_worker(worker, counted, &cause, &mut self.effects);
        self.apply_effects(now);
        self.on_worker_ended(index, phase, cause, now);
    }

    /// Handles the messages and the output that a worker sent before its exit.
    fn drain_final_messages(&mut self, index: usize, now: Instant) {
        let slot = &mut self.slots[index];
        let SlotStage::Dying(dying) = &mut slot.stage else { return };
        let mut bytes = bytes::BytesMut::new();
        if let Some(output) = &dying.output_pipe {
            while matches!(read_into_buffer(&mut bytes, READ_BYTES, output), Ok(read) if read > 0) {}
        }
        if !matches!(dying.cause, Some(WorkerExitCause::ProtocolViolation(_))) {
            let last = dying.socket.remaining_messages(&dying.counters);
            for message in last {
                if self.on_message(index, message, now).is_err() {
                    break;
                }
            }
        }
        self.on_output(index, bytes);
    }

    /// Reports the end of a process and decides whether its slot restarts.
    pub(super) fn on_worker_ended(&mut self, index: usize, phase: WorkerPhase, cause: WorkerExitCause, now: Instant) {
        let is_open = self.progress == RunProgress::Open && !self.scheduler.is_cancelled();
        let slot = &mut self.slots[index];
        let worker = slot.spec.id;
        let output_tail = slot.take_output_tail();
        let is_withdrawn = slot.withdrawn.is_some();
        let mut is_wanted = is_open && !is_withdrawn;
        slot.deaths += u32::from(!matches!(phase, WorkerPhase::Stopping(_)));
        // An interrupted worker's error message results from the interrupt.
        let is_interrupted = self.scheduler.is_cancelled() && matches!(cause, WorkerExitCause::Stopped);
        let own_words = slot.setup_failure.take().filter(|_| !is_interrupted);
        let is_setup_failure = matches!(phase, WorkerPhase::SettingUp(_)) && (is_wanted || own_words.is_some());
        let why = own_words.unwrap_or_else(|| with_output_tail(&cause, &output_tail));
        if is_setup_failure {
            is_wanted &= slot.has_worked && slot.deaths <= MAX_SETUP_TRIES;
            self.events.push_event(RunEvent::WorkerSetupFailed { worker, why: Arc::clone(&why) });
        }
        slot.replaced += u64::from(is_wanted);
        slot.stage = if is_wanted { SlotStage::Waiting(now + backoff(slot.deaths)) } else { SlotStage::Gone };
        if !matches!(phase, WorkerPhase::SettingUp(_)) || is_withdrawn {
            self.events.push_event(RunEvent::WorkerGone { worker, cause, output_tail, is_last: !is_wanted });
        }
        if is_open && !is_wanted && !is_withdrawn {
            self.abort_if_no_worker(index, why);
        }
    }

    fn abort_if_no_worker(&mut self, last: usize, why: Arc<str>) {
        // A withdrawn slot may be restored.
        if self.slots.iter().any(|slot| !matches!(slot.stage, SlotStage::Gone) || slot.withdrawn.is_some()) {
            return;
        }
        let worker = self.slots[last].spec.id;
        self.abort_run(if self.slots.iter().any(|slot| slot.has_worked) {
            DispatchError::NoneLeft { worker, why }
        } else {
            DispatchError::AllFailedSetup { worker, why }
        });
    }
}

fn with_output_tail(cause: &WorkerExitCause, output_tail: &str) -> Arc<str> {
    match output_tail.trim_end() {
        "" => cause.to_string().into(),
        tail => format!("{cause}; its output ends with:\n{tail}").into(),
    }
}
