//! From the source to the queue: a task is packed when there is room for it, and never more than the queue holds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use gpupool_dispatch::{Refused, Remote, TaskId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Shared, of_log};
use crate::carry::{Carrier, Packed};
use crate::memory::Lent;
use crate::worker::told;

/// Bytes of shared memory for tasks that are not over. One that is larger goes alone.
const LENT_BYTES: u64 = 256 << 20;

/// How much is lent for tasks that are not over.
#[derive(Debug, Default)]
pub(super) struct Budget {
    lent: Mutex<Ledger>,
    has_room: Condvar,
}

#[derive(Debug, Default)]
struct Ledger {
    bytes: u64,
    is_over: bool,
}

impl Budget {
    /// Waits until so much may be lent.
    fn take(&self, bytes: u64) {
        let mut lent = self.lock();
        while lent.bytes > 0 && lent.bytes + bytes > LENT_BYTES && !lent.is_over {
            lent = self.has_room.wait(lent).unwrap_or_else(PoisonError::into_inner);
        }
        lent.bytes += bytes;
    }

    pub fn give_back(&self, bytes: u64) {
        self.lock().bytes -= bytes;
        self.has_room.notify_all();
    }

    /// Nobody waits any more.
    pub fn is_over(&self) {
        self.lock().is_over = true;
        self.has_room.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn bytes_of(lent: &[Lent]) -> u64 {
    lent.iter().map(|lent| lent.slot.capacity).sum()
}

/// How far the source is read. The only one that puts tasks: so it knows the number of the next.
#[derive(Debug, Default)]
pub(super) struct Feeding {
    /// Of the source, those that were done in an earlier run included.
    read: AtomicU64,
    put: AtomicU64,
}

impl Feeding {
    pub fn put(&self, remote: &Remote, shared: &Shared, item: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = item.py();
        let place = self.read.fetch_add(1, Ordering::Relaxed);
        if let Some(log) = &shared.log
            && log.has(place).map_err(of_log)?
        {
            return Ok(true);
        }
        let Packed { payload, lent } = packed(py, shared, item);
        let task = TaskId(self.put.fetch_add(1, Ordering::Relaxed));
        if let Some(log) = &shared.log {
            log.put(task, place);
        }
        if !lent.is_empty() {
            let bytes = bytes_of(&lent);
            // Told of before it is put: it may be over before this thread goes on.
            py.detach(|| shared.budget.take(bytes));
            shared.tasks().insert(task, lent);
        }
        let outcome = match remote.try_push(payload.clone()) {
            Err(Refused::Full) => py.detach(|| remote.push(payload)),
            outcome => outcome,
        };
        match outcome {
            Ok(same) => debug_assert_eq!(same, task),
            Err(Refused::Closed) => return Ok(false),
            Err(refused) => return Err(PyValueError::new_err(format!("task {place}: {refused}"))),
        }
        Ok(true)
    }
}

/// A value that cannot be packed is a task that fails: its worker says why.
fn packed(py: Python<'_>, shared: &Shared, item: &Bound<'_, PyAny>) -> Packed {
    shared.carrier.pack(item).unwrap_or_else(|error| Packed {
        payload: Carrier::excuse(&format!("the task cannot be pickled:\n{}", told(py, &error))),
        lent: Vec::new(),
    })
}
