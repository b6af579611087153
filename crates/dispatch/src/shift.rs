//! Who drives the engine: the caller while it waits for events, and the relief while it is away.
//!
//! A lock for a few words: neither side keeps it for longer than it takes to read or write them. `tests/without_processes/hand_over.rs`
//! runs this file on a scheduler that tries many orders of both threads.

use crate::limits::AWAY;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Shift {
    state: Mutex<State>,
    call: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The caller drives, or wants to.
    caller_is_in: bool,
    /// How often the caller has left.
    left: u64,
    relief: Relief,
    is_over: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Relief {
    /// Looks around, and sees what changes.
    #[default]
    Awake,
    /// Until it is called.
    Rests,
    /// For a moment, in which the caller may come back.
    Waits,
    Drives,
}

impl Shift {
    /// The caller drives from now on; whether the relief drives and has to be woken.
    pub(crate) fn caller_enters(&self) -> bool {
        let mut state = self.lock();
        state.caller_is_in = true;
        state.relief == Relief::Drives
    }

    pub(crate) fn caller_leaves(&self) {
        let mut state = self.lock();
        state.caller_is_in = false;
        state.left += 1;
        if state.relief == Relief::Rests {
            self.call.notify_all();
        }
    }

    /// Nobody drives any more.
    pub(crate) fn end(&self) {
        self.lock().is_over = true;
        self.call.notify_all();
    }

    /// The life of the relief: drives whenever the caller is away for longer than a moment. `drive` goes on until
    /// [`Shift::is_relief_done`], and says whether all is over.
    pub(crate) fn relieve(&self, mut drive: impl FnMut() -> bool) {
        while self.wait_until_caller_is_away() {
            let is_over = drive();
            self.lock().relief = Relief::Awake;
            if is_over {
                return;
            }
        }
    }

    /// Whether the relief is to leave the engine to the caller, or to the end.
    pub(crate) fn is_relief_done(&self) -> bool {
        let state = self.lock();
        state.caller_is_in || state.is_over
    }

    /// The relief rests while the caller drives, and until it has been away for more than a moment; then the relief drives.
    /// `false` when all is over.
    fn wait_until_caller_is_away(&self) -> bool {
        let mut state = self.lock();
        loop {
            while state.caller_is_in && !state.is_over {
                state.relief = Relief::Rests;
                state = self.call.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let left = state.left;
            if !state.is_over {
                state.relief = Relief::Waits;
                state = self.call.wait_timeout(state, AWAY).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.is_over {
                return false;
            }
            if !state.caller_is_in && state.left == left {
                state.relief = Relief::Drives;
                return true;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
