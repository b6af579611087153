//! The place of one worker, and how far the worker there is.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::command::Spool;
use crate::limits::LAST_WORDS;
use crate::plan::WorkerSlot;
use crate::process::{Process, Wire};
use crate::protocol::WorkerCounters;
use crate::{RunStats, TaskId, WorkerExitCause, WorkerState};

#[derive(Debug)]
pub(super) struct Slot {
    pub place: WorkerSlot,
    pub stage: Stage,
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
    pub look_at: Option<Instant>,
    /// The last task that was told to have been started.
    pub told: Option<TaskId>,
    /// It has lived long enough, and is replaced when it is done with what it has.
    pub is_retiring: bool,
    pub last_words: Vec<u8>,
    /// Whether what it writes is not read for now.
    pub is_muted: bool,
    /// What became of its tasks.
    pub tally: RunStats,
    /// How often its process was replaced.
    pub replaced: u64,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// To be started then.
    Waiting(Instant),
    /// A thread is at it.
    Starting,
    Alive(Box<Process>, Phase),
    /// Killed, or ending by itself; a thread waits for that.
    Dying(Box<Remains>),
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    SettingUp(Option<Instant>),
    /// Until its life is over, if it ever is.
    AtWork(Option<Instant>),
    /// Interrupted, as nobody wants what it is at; killed then if it has not given it up.
    GivingUp(Instant),
    /// Told to clean up and end, until it is killed.
    Stopping(Instant),
}

impl Phase {
    pub(super) fn doing(self) -> &'static str {
        match self {
            Self::SettingUp(_) => "it was being set up",
            Self::AtWork(_) | Self::GivingUp(_) => "it was at work",
            Self::Stopping(_) => "it was to end",
        }
    }
}

/// What is left of a process while it dies.
#[derive(Debug)]
pub(super) struct Remains {
    pub wire: Wire,
    pub counters: WorkerCounters,
    pub writes: Option<OwnedFd>,
    pub spool: Option<Spool>,
    pub phase: Phase,
    /// Why we killed it, if we did.
    pub cause: Option<WorkerExitCause>,
}

impl Slot {
    pub(super) fn new(place: WorkerSlot, now: Instant) -> Self {
        Self {
            place,
            stage: Stage::Waiting(now),
            generation: 0,
            has_worked: false,
            deaths: 0,
            setup_failure: None,
            withdrawn: None,
            is_outdated: false,
            look_at: None,
            told: None,
            is_retiring: false,
            last_words: Vec::new(),
            is_muted: false,
            tally: RunStats::default(),
            replaced: 0,
        }
    }

    /// When something has to be done here by the clock.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let phase = match &self.stage {
            Stage::Waiting(until) => Some(*until),
            Stage::Alive(_, Phase::SettingUp(until) | Phase::AtWork(until)) => *until,
            Stage::Alive(_, Phase::GivingUp(until) | Phase::Stopping(until)) => Some(*until),
            Stage::Starting | Stage::Dying(_) | Stage::Gone => None,
        };
        phase.into_iter().chain(self.look_at).min()
    }

    pub(super) fn keep_words(&mut self, words: &[u8]) {
        self.last_words.extend_from_slice(words);
        // Cut now and then, not at each word.
        if self.last_words.len() > 2 * LAST_WORDS {
            self.last_words.drain(..self.last_words.len() - LAST_WORDS);
        }
    }

    pub(super) fn take_last_words(&mut self) -> Arc<str> {
        let words = std::mem::take(&mut self.last_words);
        let last = words.len().saturating_sub(LAST_WORDS);
        String::from_utf8_lossy(&words[last..]).into()
    }

    pub(super) fn state(&self, is_busy: bool) -> WorkerState {
        match &self.stage {
            Stage::Waiting(_) | Stage::Starting => WorkerState::Starting,
            Stage::Alive(_, Phase::SettingUp(_)) => WorkerState::SettingUp,
            Stage::Alive(_, Phase::AtWork(_)) if is_busy => WorkerState::Busy,
            Stage::Alive(_, Phase::AtWork(_)) => WorkerState::Idle,
            Stage::Alive(_, Phase::GivingUp(_) | Phase::Stopping(_)) | Stage::Dying(_) => WorkerState::Ending,
            Stage::Gone => WorkerState::Gone,
        }
    }
}

/// The time of the counters, by our clock.
#[derive(Debug)]
pub(super) struct Clock {
    instant: Instant,
    nanos: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        Self { instant: Instant::now(), nanos }
    }

    /// No later than now, whatever a worker wrote.
    pub(super) fn of(&self, nanos: u64, now: Instant) -> Option<Instant> {
        let since = nanos.checked_sub(self.nanos)?;
        self.instant.checked_add(Duration::from_nanos(since)).map(|at| at.min(now))
    }
}

/// Things by the number of their task.
pub(super) type ByTask<T> = HashMap<TaskId, T, BuildHasherDefault<ByNumber>>;

/// Tasks are numbered one after the other: their numbers are spread well enough by one multiplication.
#[derive(Debug, Default)]
pub(super) struct ByNumber(u64);

impl Hasher for ByNumber {
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
