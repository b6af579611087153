//! Who drives the engine: the caller while it waits for events, and the relief while it is away.
//!
//! A lock for a few words: neither side keeps it for longer than it takes to read or write them. `tests/without_processes/hand_over.rs`
//! runs this file on a scheduler that tries many orders of both threads.

use crate::limits::BACKUP_DRIVER_DELAY;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct DriverHandoff {
    state: Mutex<HandoffState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HandoffState {
    /// The caller drives, or wants to.
    is_caller_driving: bool,
    /// How often the caller has left.
    caller_exits: u64,
    backup_driver: BackupDriverPhase,
    is_over: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum BackupDriverPhase {
    /// Looks around, and sees what changes.
    #[default]
    Awake,
    /// Until it is called.
    Resting,
    /// For a moment, in which the caller may come back.
    Waiting,
    Driving,
}

impl DriverHandoff {
    /// The caller drives from now on; whether the relief drives and has to be woken.
    pub(crate) fn begin_caller_turn(&self) -> bool {
        let mut state = self.lock();
        state.is_caller_driving = true;
        state.backup_driver == BackupDriverPhase::Driving
    }

    pub(crate) fn end_caller_turn(&self) {
        let mut state = self.lock();
        state.is_caller_driving = false;
        state.caller_exits += 1;
        if state.backup_driver == BackupDriverPhase::Resting {
            self.changed.notify_all();
        }
    }

    /// Nobody drives any more.
    pub(crate) fn shut_down(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// The life of the relief: drives whenever the caller is away for longer than a moment. `drive` goes on until
    /// [`Shift::is_relief_done`], and says whether all is over.
    pub(crate) fn run_backup_driver(&self, mut drive: impl FnMut() -> bool) {
        while self.wait_for_absent_caller() {
            let is_over = drive();
            self.lock().backup_driver = BackupDriverPhase::Awake;
            if is_over {
                return;
            }
        }
    }

    /// Whether the relief is to leave the engine to the caller, or to the end.
    pub(crate) fn must_backup_yield(&self) -> bool {
        let state = self.lock();
        state.is_caller_driving || state.is_over
    }

    /// The relief rests while the caller drives, and until it has been away for more than a moment; then the relief drives.
    /// `false` when all is over.
    fn wait_for_absent_caller(&self) -> bool {
        let mut state = self.lock();
        loop {
            while state.is_caller_driving && !state.is_over {
                state.backup_driver = BackupDriverPhase::Resting;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let caller_exits = state.caller_exits;
            if !state.is_over {
                state.backup_driver = BackupDriverPhase::Waiting;
                state = self.changed.wait_timeout(state, BACKUP_DRIVER_DELAY).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.is_over {
                return false;
            }
            if !state.is_caller_driving && state.caller_exits == caller_exits {
                state.backup_driver = BackupDriverPhase::Driving;
                return true;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HandoffState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
