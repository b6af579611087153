//! Whoever reads large values where they are, and returns their slots when nothing of them is left.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::control::{Control, State};
use super::pages::Pages;
use super::{REGION_BYTES, Slot};

/// Reads large values. Mappings are kept for the next use of the same slots.
#[derive(Debug, Clone)]
pub(crate) struct Borrower {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    control: Control,
    /// Slots that are taken, by where they begin, with where they end.
    taken: Mutex<BTreeMap<u64, u64>>,
    /// Of slots that are returned, by where they begin.
    unused: Mutex<HashMap<u64, Pages>>,
}

impl Borrower {
    pub fn new(control: Control) -> Self {
        Self { shared: Arc::new(Shared { control, taken: Mutex::default(), unused: Mutex::default() }) }
    }

    /// Processes of the other side are gone, and all they sent is taken: what else they wrote is given back.
    pub fn bury(&self) {
        let control = &self.shared.control;
        for region in control.bury() {
            let taken = self.shared.taken();
            let mut from = region;
            for (begin, end) in taken.range(region..region + REGION_BYTES) {
                control.free(from..*begin);
                from = *end;
            }
            control.free(from..region + REGION_BYTES);
            self.shared.lock().retain(|offset, _| !(region..region + REGION_BYTES).contains(offset));
        }
    }

    /// Takes what was lent: it is there until this is dropped.
    pub fn take(&self, slot: Slot, length: u64) -> io::Result<Taken> {
        let control = &self.shared.control;
        if !control.has(slot.number) || length > slot.capacity || slot.capacity > REGION_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "there is no such shared memory"));
        }
        let known = self.shared.lock().remove(&slot.offset);
        let pages = match known {
            Some(pages) => pages,
            None => Pages::map(&control.memory, slot.offset, slot.capacity, true)?,
        };
        let process = std::process::id();
        self.shared.taken().insert(slot.offset, slot.range().end);
        control.set(slot.number, State::TakenBy(process));
        Ok(Taken { shared: Arc::clone(&self.shared), slot, pages: Some(pages), process })
    }
}

impl Shared {
    fn taken(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Pages>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot that is ours; returned when this is dropped, but not by a copy in a forked child.
#[derive(Debug)]
pub(crate) struct Taken {
    shared: Arc<Shared>,
    slot: Slot,
    pages: Option<Pages>,
    process: u32,
}

impl Taken {
    /// Where it begins.
    pub fn address(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.address().as_ptr() as usize)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let Some(pages) = self.pages.take() else { return };
        if self.process != std::process::id() {
            std::mem::forget(pages);
            return;
        }
        let Shared { control, .. } = &*self.shared;
        self.shared.taken().remove(&self.slot.offset);
        if control.is_buried(self.slot.offset) {
            drop(pages);
            control.free(self.slot.range());
            return;
        }
        pages.forget_changes();
        self.shared.lock().insert(self.slot.offset, pages);
        control.set(self.slot.number, State::Returned);
    }
}
