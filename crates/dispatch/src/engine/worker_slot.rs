//! Runtime state of a worker slot and its process.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::command::OutputSpool;
use crate::limits::OUTPUT_TAIL_BYTES;
use crate::plan::WorkerSlot;
use crate::process::{WorkerProcess, WorkerSocket};
use crate::protocol::WorkerCounters;
use crate::{RunStats, TaskId, WorkerExitCause, WorkerState};

#[derive(Debug)]
pub(super) struct SlotRuntime {
    pub spec: WorkerSlot,
    pub stage: SlotStage,
    /// Number of this slot's process. Messages about an earlier process are ignored.
    pub generation: u64,
    /// Whether a worker of this slot was ever set up.
    pub has_worked: bool,
    /// Consecutive exits of its process without a finished task in between.
    pub deaths: u32,
    /// Reason for a failed setup, as reported by the worker, or for its kill.
    pub setup_failure: Option<Arc<str>>,
    /// Reason for which the slot was withdrawn.
    pub withdrawn: Option<Arc<str>>,
    /// Whether the slot was withdrawn while its process was being started.
    pub is_outdated: bool,
    /// Time of the next check of its task's time limit.
    pub check_at: Option<Instant>,
    /// Last task whose start was reported.
    pub reported_task: Option<TaskId>,
    /// Whether the worker reached its lifetime and is replaced after its queued tasks.
    pub is_retiring: bool,
    pub output_tail: Vec<u8>,
    /// Whether reading of its output is paused.
    pub is_output_paused: bool,
    /// Outcomes of its tasks.
    pub totals: RunStats,
    /// Number of times that its process was replaced.
    pub replaced: u64,
}

#[derive(Debug)]
pub(super) enum SlotStage {
    /// Starts at this time.
    Waiting(Instant),
    /// A thread starts the process.
    Starting,
    Running(Box<WorkerProcess>, WorkerPhase),
    /// Killed or exiting on its own; a thread reaps it.
    Dying(Box<DyingProcess>),
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    SettingUp(Option<Instant>),
    /// Until the end of the worker's lifetime, if it has one.
    Serving(Option<Instant>),
    /// Interrupted to cancel its task; killed at this time.
    Cancelling(Instant),
    /// Ordered to clean up and exit; killed at this time.
    Stopping(Instant),
}

impl WorkerPhase {
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::SettingUp(_) => "setting up",
            Self::Serving(_) | Self::Cancelling(_) => "serving tasks",
            Self::Stopping(_) => "stopping",
        }
    }
}

/// Parts of a process that are needed until it is reaped.
#[derive(Debug)]
pub(super) struct DyingProcess {
    pub socket: WorkerSocket,
    pub counters: WorkerCounters,
    pub output_pipe: Option<OwnedFd>,
    pub output_spool: Option<OutputSpool>,
    pub phase: WorkerPhase,
    /// Reason of our kill.
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
            output_tail: Vec::new(),
            is_output_paused: false,
            totals: RunStats::default(),
            replaced: 0,
        }
    }

    /// Returns the time of the next action for this slot.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let phase = match &self.stage {
            SlotStage::Waiting(until) => Some(*until),
            SlotStage::Running(_, WorkerPhase::SettingUp(until) | WorkerPhase::Serving(until)) => *until,
            SlotStage::Running(_, WorkerPhase::Cancelling(until) | WorkerPhase::Stopping(until)) => Some(*until),
            SlotStage::Starting | SlotStage::Dying(_) | SlotStage::Gone => None,
        };
        phase.into_iter().chain(self.check_at).min()
    }

    pub(super) fn append_output(&mut self, bytes: &[u8]) {
        self.output_tail.extend_from_slice(bytes);
        // Trimmed only sometimes, to keep appends cheap.
        if self.output_tail.len() > 2 * OUTPUT_TAIL_BYTES {
            self.output_tail.drain(..self.output_tail.len() - OUTPUT_TAIL_BYTES);
        }
    }

    pub(super) fn take_output_tail(&mut self) -> Arc<str> {
        let bytes = std::mem::take(&mut self.output_tail);
        let last = bytes.len().saturating_sub(OUTPUT_TAIL_BYTES);
        String::from_utf8_lossy(&bytes[last..]).into()
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

/// Conversion of the counters' timestamps to `Instant`.
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

    /// Converts a timestamp, which a worker may have set wrong, to a time no later than now.
    pub(super) fn to_instant(&self, nanos: u64, now: Instant) -> Option<Instant> {
        let since = nanos.checked_sub(self.nanos)?;
        self.instant.checked_add(Duration::from_nanos(since)).map(|at| at.min(now))
    }
}

/// Map by task number.
pub(super) type TaskMap<T> = HashMap<TaskId, T, BuildHasherDefault<TaskIdHasher>>;

/// Hasher for task ids. Ids are consecutive, so one multiplication spreads them well enough.
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
