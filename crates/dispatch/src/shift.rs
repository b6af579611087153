//! Who drives the engine: the caller while it waits for events, and the relief while it is away.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::limits::AWAY;

/// Who drives.
#[derive(Debug, Default)]
pub(crate) struct Shift {
    /// The caller drives, or wants to.
    pub caller_is_in: AtomicBool,
    /// How often the caller has left.
    left: AtomicU64,
    pub relief_drives: AtomicBool,
    relief_rests: AtomicBool,
    pub is_over: AtomicBool,
    bed: Mutex<()>,
    call: Condvar,
}

impl Shift {
    /// Rests while the caller drives, and until it has been away for more than a moment; `false` when all is over.
    pub fn wait_until_caller_is_away(&self) -> bool {
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            while self.caller_is_in.load(Ordering::SeqCst) && !self.is_over.load(Ordering::SeqCst) {
                self.relief_rests.store(true, Ordering::SeqCst);
                // Looked at again after that was said: who leaves now calls.
                if self.caller_is_in.load(Ordering::SeqCst) {
                    bed = self.call.wait(bed).unwrap_or_else(PoisonError::into_inner);
                }
                self.relief_rests.store(false, Ordering::SeqCst);
            }
            let left = self.left.load(Ordering::SeqCst);
            if self.is_over.load(Ordering::SeqCst) {
                return false;
            }
            bed = self.call.wait_timeout(bed, AWAY).unwrap_or_else(PoisonError::into_inner).0;
            if !self.caller_is_in.load(Ordering::SeqCst) && self.left.load(Ordering::SeqCst) == left {
                return !self.is_over.load(Ordering::SeqCst);
            }
        }
    }

    pub fn is_relief_done(&self) -> bool {
        self.caller_is_in.load(Ordering::SeqCst) || self.is_over.load(Ordering::SeqCst)
    }

    pub fn caller_leaves(&self) {
        self.left.fetch_add(1, Ordering::SeqCst);
        self.caller_is_in.store(false, Ordering::SeqCst);
        if self.relief_rests.load(Ordering::SeqCst) {
            self.call_relief();
        }
    }

    pub fn call_relief(&self) {
        drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
        self.call.notify_all();
    }
}
