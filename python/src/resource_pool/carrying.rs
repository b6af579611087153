//! What goes to workers and comes back: Python values, the large ones in memory that is shared with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use pyo3::prelude::*;

use crate::carry::{Carrier, Packed};
use crate::memory::Lent;

/// Packs for all workers of a pool, and unpacks what they say.
#[derive(Debug)]
pub(super) struct Carrying {
    carrier: Carrier,
    /// The last process known of each worker.
    processes: Mutex<HashMap<u32, u32>>,
}

/// What was lent for work; taken back, where nobody took it, when the work is over or not waited for any more.
#[derive(Debug)]
pub(super) struct LentForWork {
    carrying: Arc<Carrying>,
    lent: Vec<Lent>,
}

impl Carrying {
    pub fn new(carrier: Carrier) -> Arc<Self> {
        Arc::new(Self { carrier, processes: Mutex::default() })
    }

    /// Work, ready to be sent.
    pub fn pack(self: &Arc<Self>, work: &Bound<'_, PyAny>) -> PyResult<(Bytes, LentForWork)> {
        let Packed { payload, lent } = self.carrier.pack(work)?;
        Ok((payload, LentForWork { carrying: Arc::clone(self), lent }))
    }

    pub fn unpack<'py>(&self, py: Python<'py>, answer: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        self.carrier.unpack(py, answer)
    }

    /// A worker was got. Where another process had its number before, that one is gone, and what it had comes back.
    pub fn meet(&self, worker: u32, process: u32) {
        let before = self.processes.lock().unwrap_or_else(PoisonError::into_inner).insert(worker, process);
        if before.is_some_and(|before| before != process) {
            // Not all it left: an answer of it may not have been unpacked yet.
            self.carrier.take_back();
        }
    }
}

impl Drop for LentForWork {
    fn drop(&mut self) {
        self.carrying.carrier.is_over(&self.lent);
    }
}
