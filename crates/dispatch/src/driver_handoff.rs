//! Handoff of the driving role between the caller, while it waits for events, and the backup driver.
//!
//! Both sides hold the lock only to read or write a few words. `tests/without_processes/handoff.rs` runs this
//! file on a scheduler that tries many interleavings of both threads.

use crate::limits::BACKUP_DRIVER_DELAY;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct DriverHandoff {
    state: Mutex<HandoffState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HandoffState {
    /// Whether the caller drives or wants to.
    is_caller_driving: bool,
    /// Number of times that the caller stopped driving.
    caller_exits: u64,
    backup_driver: BackupDriverPhase,
    is_over: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum BackupDriverPhase {
    /// About to check the state.
    #[default]
    Awake,
    /// Until the caller leaves.
    Resting,
    /// For a short delay, in which the caller may return.
    Waiting,
    Driving,
}

impl DriverHandoff {
    /// Makes the caller the driver. Returns whether the backup drives now and must be woken.
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

    /// Ends driving for both sides.
    pub(crate) fn shut_down(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Runs the backup thread: drives whenever the caller stays away past the delay. `drive` continues until
    /// [`DriverHandoff::must_backup_yield`] and returns whether the run has ended.
    pub(crate) fn run_backup_driver(&self, mut drive: impl FnMut() -> bool) {
        while self.wait_for_absent_caller() {
            let is_over = drive();
            self.lock().backup_driver = BackupDriverPhase::Awake;
            if is_over {
                return;
            }
        }
    }

    /// Whether the backup must leave the engine to the caller, or the run has ended.
    pub(crate) fn must_backup_yield(&self) -> bool {
        let state = self.lock();
        state.is_caller_driving || state.is_over
    }

    /// Waits until the caller has been away for longer than the delay. Returns `false` at the end of the run.
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
