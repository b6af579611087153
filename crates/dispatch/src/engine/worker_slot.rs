//! The place of one worker, and how far the worker there is.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::command::OutputSpool;
use crate::limits::STDERR_TAIL_BYTES;
use crate::plan::WorkerSlot;
use crate::process::{WorkerProcess, WorkerSocket};
use crate::protocol::WorkerCounters;
use crate::{RunStats, TaskId, WorkerExitCause, WorkerState};

#[derive(Debug)]
pub(super) struct SlotRuntime {
    pub spec: WorkerSlot,
    pub stage: SlotStage,
    /// Which process of this place it is; news of an earlier one are no news.
    pub generation: u64,
    /// Whether a worker of this place was ever set up.
    pub has_worked: bool,
    /// Times in a row that its process died without a task done between.
    pub deaths: u32,
    /// Why its setup failed, in its own words, or why it is to end.
    pub setup_failure: Option<Arc<str>>,
    /// Its place was taken away.
    pub withdrawn: Option<Arc<str>>,
    /// Its place was taken away while its process was being started.
    pub is_outdated: bool,
    /// When it is to be looked at because of its task's time.
    pub check_at: Option<Instant>,
    /// The last task that was told to have been started.
    pub reported_task: Option<TaskId>,
    /// It has lived long enough, and is replaced when it is done with what it has.
    pub is_retiring: bool,
    pub stderr_tail: Vec<u8>,
    /// Whether what it writes is not read for now.
    pub is_output_paused: bool,
    /// What became of its tasks.
    pub totals: RunStats,
    /// How often its process was replaced.
    pub replaced: u64,
}

#[derive(Debug)]
pub(super) enum SlotStage {
    /// To be started then.
    Waiting(Instant),
    /// A thread is at it.
    Starting,
    Running(Box<WorkerProcess>, WorkerPhase),
    /// Killed, or ending by itself; a thread waits for that.
    Dying(Box<DyingProcess>),
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    SettingUp(Option<Instant>),
    /// Until its life is over, if it ever is.
    Serving(Option<Instant>),
    /// Interrupted, as nobody wants what it is at; killed then if it has not given it up.
    Cancelling(Instant),
    /// Told to clean up and end, until it is killed.
    Stopping(Instant),
}

impl WorkerPhase {
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::SettingUp(_) => "it was being set up",
            Self::Serving(_) | Self::Cancelling(_) => "it was at work",
            Self::Stopping(_) => "it was to end",
        }
    }
}

/// What is left of a process while it dies.
#[derive(Debug)]
pub(super) struct DyingProcess {
    pub socket: WorkerSocket,
    pub counters: WorkerCounters,
    pub output: Option<OwnedFd>,
    pub output_spool: Option<OutputSpool>,
    pub phase: WorkerPhase,
    /// Why we killed it, if we did.
    pub cause: Option<WorkerExitCause>,
}

impl SlotRuntime {
    pub(super) fn new(spec: WorkerSlot, now: Instant) -> Self {
        Self {
            spec,
            stage: SlotStage::Waiting(now),
            generation: 0,
            has_worked: false,
            deaths: 0,
            setup_failure: None,
            withdrawn: None,
            is_outdated: false,
            check_at: None,
            reported_task: None,
            is_retiring: false,
            stderr_tail: Vec::new(),
            is_output_paused: false,
            totals: RunStats::default(),
            replaced: 0,
        }
    }

    /// When something has to be done here by the clock.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let phase = match &self.stage {
            SlotStage::Waiting(until) => Some(*until),
            SlotStage::Running(_, WorkerPhase::SettingUp(until) | WorkerPhase::Serving(until)) => *until,
            SlotStage::Running(_, WorkerPhase::Cancelling(until) | WorkerPhase::Stopping(until)) => Some(*until),
            SlotStage::Starting | SlotStage::Dying(_) | SlotStage::Gone => None,
        };
        phase.into_iter().chain(self.check_at).min()
    }

    pub(super) fn append_stderr(&mut self, words: &[u8]) {
        self.stderr_tail.extend_from_slice(words);
        // Cut now and then, not at each word.
        if self.stderr_tail.len() > 2 * STDERR_TAIL_BYTES {
            self.stderr_tail.drain(..self.stderr_tail.len() - STDERR_TAIL_BYTES);
        }
    }

    pub(super) fn take_stderr_tail(&mut self) -> Arc<str> {
        let words = std::mem::take(&mut self.stderr_tail);
        let last = words.len().saturating_sub(STDERR_TAIL_BYTES);
        String::from_utf8_lossy(&words[last..]).into()
    }

    pub(super) fn worker_state(&self, is_busy: bool) -> WorkerState {
        match &self.stage {
            SlotStage::Waiting(_) | SlotStage::Starting => WorkerState::Starting,
            SlotStage::Running(_, WorkerPhase::SettingUp(_)) => WorkerState::SettingUp,
            SlotStage::Running(_, WorkerPhase::Serving(_)) if is_busy => WorkerState::Busy,
            SlotStage::Running(_, WorkerPhase::Serving(_)) => WorkerState::Idle,
            SlotStage::Running(_, WorkerPhase::Cancelling(_) | WorkerPhase::Stopping(_)) | SlotStage::Dying(_) => {
                WorkerState::Ending
            }
            SlotStage::Gone => WorkerState::Gone,
        }
    }
}

/// The time of the counters, by our clock.
#[derive(Debug)]
pub(super) struct CounterClock {
    instant: Instant,
    nanos: u64,
}

impl CounterClock {
    pub(super) fn new() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        Self { instant: Instant::now(), nanos }
    }

    /// No later than now, whatever a worker wrote.
    pub(super) fn to_instant(&self, nanos: u64, now: Instant) -> Option<Instant> {
        let since = nanos.checked_sub(self.nanos)?;
        self.instant.checked_add(Duration::from_nanos(since)).map(|at| at.min(now))
    }
}

/// Things by the number of their task.
pub(super) type TaskMap<T> = HashMap<TaskId, T, BuildHasherDefault<TaskIdHasher>>;

/// Tasks are numbered one after the other: their numbers are spread well enough by one multiplication.
#[derive(Debug, Default)]
pub(super) struct TaskIdHasher(u64);

impl Hasher for TaskIdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}
