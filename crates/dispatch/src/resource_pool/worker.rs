//! A worker's process from its start to its end, tended by one task on the owner's thread.
//!
//! It takes orders, and tells the owner what becomes of the worker: ready, over a limit, and last that it is gone. What takes
//! long (starting, ending) is done by other threads.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::bounds::{BoundExceeded, BoundedJob, BoundsWatcher};
use gpupool_confine::spawn::{Job, JobEvent};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until};

use super::HeldWorkerError;
use super::owner::{Message, ToOwner};
use crate::limits::{DEPTH, EXIT_PATIENCE};
use crate::plan::{RunPlan, Speaks, WorkerSlot};
use crate::process::{Heard, Process, Wire, end, ready_of, start};
use crate::protocol::{Kind, WorkerCounters};
use crate::{TaskId, TaskOutcome, WorkerExitCause};

/// How a worker is to end.
#[derive(Debug, Clone)]
pub(super) enum Ending {
    /// Clean up and end by itself until then.
    Stop(Instant),
    Kill,
    /// It used too much, and is killed.
    Excess(BoundExceeded),
}

impl Ending {
    /// Orders this ending. A kill replaces a stop, the first kill counts, and so does the earliest stop.
    pub(super) fn order(self, endings: &watch::Sender<Option<Self>>) {
        endings.send_if_modified(|known| {
            let is_harder = match (&*known, &self) {
                (None, _) | (Some(Self::Stop(_)), Self::Kill | Self::Excess(_)) => true,
                (Some(Self::Stop(known)), Self::Stop(until)) => until < known,
                (Some(Self::Kill | Self::Excess(_)), _) => false,
            };
            if is_harder {
                *known = Some(self);
            }
            is_harder
        });
    }
}

/// Work for a worker.
#[derive(Debug)]
pub(super) struct Run {
    pub payload: Bytes,
    pub answer: oneshot::Sender<Result<Bytes, HeldWorkerError>>,
    pub busy: Busy,
}

/// Counts, as long as it lives, as something its holder has the worker do.
#[derive(Debug)]
pub(super) struct Busy(Arc<AtomicUsize>);

impl Busy {
    /// One more, of which there can be [`DEPTH`].
    pub(super) fn begin(count: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |count: usize| (count < DEPTH).then_some(count + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What becomes of a worker. Each is told at most once of a process.
#[derive(Debug)]
pub(super) enum News {
    /// It is set up.
    Ready(Live),
    /// It used too much, and is being killed.
    Exceeded(BoundExceeded),
    /// It is being ended, or died, and is given to no one any more.
    Dying,
    /// It could not clean up.
    CleanUpFailed(Arc<str>),
    /// Its process is gone with all it started, or never was. The last news.
    Gone { cause: WorkerExitCause, why: Arc<str>, was_ordered: bool },
}

/// What the owner knows of a process that lives.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub pid: u32,
    pub held: Option<Arc<BoundedJob>>,
}

/// How a process is to be started, and who hears of it.
pub(super) struct Tending {
    pub slot: usize,
    pub plan: Arc<RunPlan>,
    pub place: WorkerSlot,
    pub watcher: Arc<BoundsWatcher>,
    pub setup_timeout: Duration,
    pub owner: ToOwner,
    pub runs: mpsc::Receiver<Run>,
    pub endings: watch::Sender<Option<Ending>>,
}

impl Tending {
    /// Starts a process and tends it until it is gone.
    pub(super) async fn tend(mut self) {
        let last = match self.start().await {
            Ok(worker) => worker.live(&mut self.runs, self.endings.subscribe()).await,
            Err(why) => gone(WorkerExitCause::StartFailed(why.into()), None, false),
        };
        self.owner.tell(Message::Worker(self.slot, last));
    }

    async fn start(&self) -> Result<Worker, String> {
        let (plan, place, watcher) = (Arc::clone(&self.plan), self.place.clone(), Arc::clone(&self.watcher));
        let endings = self.endings.clone();
        let on_excess = Box::new(move |excess| Ending::Excess(excess).order(&endings));
        let started = spawn_blocking(move || start(&plan, &place, &watcher, on_excess)).await;
        let process = started.map_err(|error| error.to_string())?.map_err(|reason| reason.to_string())?;
        let mut worker = Worker::new(process, self).map_err(|error| error.to_string())?;
        if self.plan.program.speaks == Speaks::Lines {
            // It says nothing of itself: it is ready when it runs.
            worker.talk.is_ready();
        }
        Ok(worker)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    SettingUp(Instant),
    AtWork,
    Stopping(Instant),
}

/// Why a process is not to be tended any longer.
struct Leave {
    /// `None`: it ended by itself, or is about to.
    cause: Option<WorkerExitCause>,
    grace: Duration,
}

impl Leave {
    fn killed(cause: WorkerExitCause) -> Self {
        Self { cause: Some(cause), grace: Duration::ZERO }
    }
}

/// A worker's process that runs.
struct Worker {
    job: AsyncFd<ByFd<Job>>,
    talk: Talk,
}

/// What it was told and said.
struct Talk {
    slot: usize,
    wire: AsyncFd<ByFd<Wire>>,
    counters: WorkerCounters,
    live: Live,
    phase: Phase,
    setup_timeout: Duration,
    /// What it works on.
    running: Option<(TaskId, Run)>,
    next_task: u64,
    queue: VecDeque<Run>,
    setup_failure: Option<Arc<str>>,
    has_failed_to_clean_up: bool,
    was_ordered: bool,
    is_dead: bool,
    owner: ToOwner,
}

impl Worker {
    pub(crate) fn new(process: Process, tending: &Tending) -> io::Result<Self> {
        let Process { job, held, wire, counters, .. } = process;
        let live = Live { pid: job.id().pid, held };
        let talk = Talk {
            slot: tending.slot,
            wire: ByFd(wire).register(Interest::READABLE | Interest::WRITABLE)?,
            counters,
            live,
            phase: Phase::SettingUp(Instant::now() + tending.setup_timeout),
            setup_timeout: tending.setup_timeout,
            running: None,
            next_task: 0,
            queue: VecDeque::new(),
            setup_failure: None,
            has_failed_to_clean_up: false,
            was_ordered: false,
            is_dead: false,
            owner: tending.owner.clone(),
        };
        Ok(Self { job: ByFd(job).register(Interest::READABLE)?, talk })
    }

    /// Tends it until it is gone.
    async fn live(mut self, runs: &mut mpsc::Receiver<Run>, mut endings: watch::Receiver<Option<Ending>>) -> News {
        // What was ordered while it was started counts.
        endings.mark_changed();
        let Leave { cause, grace } = loop {
            if let Err(leave) = self.turn(runs, &mut endings).await {
                break leave;
            }
        };
        let Self { job, mut talk } = self;
        talk.is_dead = true;
        talk.tell(News::Dying);
        let (tell, told) = oneshot::channel();
        let held = talk.live.held.clone();
        end(job.into_inner().0, held, &mut talk.wire.get_mut().0, grace, move |cause| drop(tell.send(cause)));
        let death = told.await.unwrap_or(WorkerExitCause::Stopped);
        if !matches!(cause, Some(WorkerExitCause::ProtocolViolation(_))) {
            talk.hear_the_rest();
        }
        gone(cause.unwrap_or(death), talk.setup_failure, talk.was_ordered)
    }

    /// Waits for the next thing to happen, and deals with it.
    async fn turn(
        &mut self,
        runs: &mut mpsc::Receiver<Run>,
        endings: &mut watch::Receiver<Option<Ending>>,
    ) -> Result<(), Leave> {
        self.talk.send_next()?;
        let until = match self.talk.phase {
            Phase::SettingUp(until) | Phase::Stopping(until) => Some(until),
            Phase::AtWork => None,
        };
        let is_full = self.talk.wire.get_ref().0.is_full();
        let interest = if is_full { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        tokio::select! {
            // A run that came before the order to stop is sent to the worker before it.
            biased;
            Some(run) = runs.recv() => {
                self.talk.queue.push_back(run);
                Ok(())
            }
            Ok(()) = endings.changed() => {
                let ending = endings.borrow_and_update().clone();
                ending.map_or(Ok(()), |ending| self.talk.end(ending))
            }
            ready = self.job.readable_mut() => match ready {
                Ok(mut guard) => match guard.get_inner_mut().0.try_next_event() {
                    Ok(None) => {
                        guard.clear_ready();
                        Ok(())
                    }
                    Ok(Some(JobEvent::Stopped(_) | JobEvent::Continued)) => Ok(()),
                    Ok(Some(JobEvent::Ended(_))) | Err(_) => Err(Leave { cause: None, grace: Duration::ZERO }),
                },
                Err(error) => Err(Leave::killed(WorkerExitCause::StartFailed(error.to_string().into()))),
            },
            ready = self.talk.wire.ready_mut(interest) => {
                let is_open = match ready {
                    Ok(mut guard) => {
                        let ready = guard.ready();
                        let wire = &mut guard.get_inner_mut().0;
                        let (is_open, spent) = transfer(wire, ready);
                        guard.clear_ready_matching(spent);
                        is_open
                    }
                    Err(_) => false,
                };
                self.talk.hear()?;
                // One that never stops talking must not keep this thread from others, nor from keeping time.
                tokio::task::yield_now().await;
                // It may have ended by itself, and then its own exit code is told.
                if is_open { Ok(()) } else { Err(Leave { cause: None, grace: EXIT_PATIENCE }) }
            }
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                if matches!(self.talk.phase, Phase::SettingUp(_)) {
                    self.talk.setup_failure = Some(format!("setup took longer than {:?}", self.talk.setup_timeout).into());
                }
                Err(Leave::killed(WorkerExitCause::IgnoredInterrupt))
            }
        }
    }
}

impl Talk {
    fn end(&mut self, ending: Ending) -> Result<(), Leave> {
        match ending {
            Ending::Stop(until) => {
                self.was_ordered = true;
                match self.phase {
                    Phase::Stopping(_) => self.phase = Phase::Stopping(until),
                    Phase::SettingUp(_) | Phase::AtWork => {
                        self.queue.clear();
                        self.phase = Phase::Stopping(until);
                        self.wire.get_mut().0.put_stop();
                        self.send()?;
                    }
                }
                Ok(())
            }
            Ending::Kill => {
                self.was_ordered = true;
                Err(Leave::killed(WorkerExitCause::Stopped))
            }
            Ending::Excess(excess) => {
                self.tell(News::Exceeded(excess.clone()));
                Err(Leave::killed(WorkerExitCause::BoundExceeded(excess)))
            }
        }
    }

    /// Gives it the next piece of work that somebody still wants, if it has none.
    fn send_next(&mut self) -> Result<(), Leave> {
        if self.running.is_some() || self.phase != Phase::AtWork {
            return Ok(());
        }
        while let Some(run) = self.queue.pop_front() {
            if run.answer.is_closed() {
                continue;
            }
            let task = TaskId(self.next_task);
            self.next_task += 1;
            self.wire.get_mut().0.put_task(task, run.payload.clone());
            self.running = Some((task, run));
            return self.send();
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Leave> {
        self.wire.get_mut().0.send().map_err(|_| Leave { cause: None, grace: EXIT_PATIENCE })
    }

    /// It is set up.
    fn is_ready(&mut self) {
        self.phase = Phase::AtWork;
        // One that died in the same moment is of no use to anybody.
        if !self.is_dead {
            self.tell(News::Ready(self.live.clone()));
        }
    }

    /// What it said before it died is heard.
    fn hear_the_rest(&mut self) {
        for heard in self.wire.get_mut().0.last_heard(&self.counters) {
            if self.hear_one(heard).is_err() {
                return;
            }
        }
    }

    fn tell(&self, news: News) {
        self.owner.tell(Message::Worker(self.slot, news));
    }

    /// Deals with all it said that was read.
    fn hear(&mut self) -> Result<(), Leave> {
        loop {
            let understood = match self.wire.get_mut().0.heard() {
                Ok(None) => return Ok(()),
                Ok(Some(heard)) => self.hear_one(heard),
                Err(nonsense) => Err(nonsense),
            };
            understood.map_err(|nonsense| Leave::killed(WorkerExitCause::ProtocolViolation(nonsense.into())))?;
        }
    }

    fn hear_one(&mut self, heard: Heard) -> Result<(), String> {
        let frame = match heard {
            Heard::Frame(frame) => frame,
            Heard::Result(outcome) => return answer(&mut self.running, None, outcome),
        };
        let is_set_up = !matches!(self.phase, Phase::SettingUp(_));
        match frame.kind {
            Kind::Ready if !is_set_up => {
                ready_of(&frame.payload)?;
                self.is_ready();
            }
            Kind::SetupFailed if !is_set_up => self.setup_failure = Some(frame.text()),
            Kind::Done if is_set_up => answer(&mut self.running, Some(frame.task), TaskOutcome::Done(frame.payload))?,
            Kind::Failed if is_set_up => {
                answer(&mut self.running, Some(frame.task), TaskOutcome::Failed(frame.payload))?
            }
            Kind::Started if is_set_up => {}
            Kind::CleanupFailed if is_set_up => {
                if !std::mem::replace(&mut self.has_failed_to_clean_up, true) {
                    self.tell(News::CleanUpFailed(frame.text()));
                }
            }
            kind => return Err(format!("it said {kind:?} out of turn")),
        }
        Ok(())
    }
}

/// The last news of a process; `why` in its own words, if it said any.
fn gone(cause: WorkerExitCause, why: Option<Arc<str>>, was_ordered: bool) -> News {
    News::Gone { why: why.unwrap_or_else(|| cause.to_string().into()), cause, was_ordered }
}

/// Tells whoever wanted it what came of the work.
fn answer(running: &mut Option<(TaskId, Run)>, task: Option<TaskId>, outcome: TaskOutcome) -> Result<(), String> {
    let is_it = |(running, _): &mut (TaskId, Run)| task.is_none_or(|task| task == *running);
    let Some((_, run)) = running.take_if(is_it) else {
        return Err(format!("it answered {}, which it was not at", task.map_or("a line".into(), |it| it.to_string())));
    };
    let Run { answer, busy, .. } = run;
    // First, so that whoever hears the answer can give the worker back.
    drop(busy);
    let _ = answer.send(match outcome {
        TaskOutcome::Done(result) => Ok(result),
        TaskOutcome::Failed(why) => Err(HeldWorkerError::Failed(why)),
        // A worker says no other.
        TaskOutcome::TimedOut(_) | TaskOutcome::WorkerLost(_) | TaskOutcome::Cancelled => Err(HeldWorkerError::Killed),
    });
    Ok(())
}

/// Sends and reads what can be now: whether the other side is there, and what has to be waited for again.
fn transfer(wire: &mut Wire, ready: Ready) -> (bool, Ready) {
    let mut spent = Ready::EMPTY;
    if ready.is_writable() {
        if wire.send().is_err() {
            return (false, spent);
        }
        if wire.is_full() {
            spent |= Ready::WRITABLE;
        }
    }
    if ready.is_readable() {
        match wire.read() {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => spent |= Ready::READABLE,
            Ok(false) | Err(_) => return (false, spent),
        }
    }
    (true, spent)
}

/// Something with a file descriptor that is open, and the same, as long as it lives: nothing in this crate that is put here
/// ever changes its own.
#[derive(Debug)]
struct ByFd<T>(T);

impl<T: AsFd> ByFd<T> {
    /// Has the runtime watch it.
    #[allow(unsafe_code, reason = "the runtime wants to be told that the descriptor stays open")]
    fn register(self, interest: Interest) -> io::Result<AsyncFd<Self>> {
        // SAFETY: what is inside owns its file descriptor, and keeps it until it is dropped.
        unsafe { AsyncFd::register_with_interest(self, interest) }.map_err(io::Error::from)
    }
}

impl<T: AsFd> AsRawFd for ByFd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}
