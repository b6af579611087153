//! Whoever writes large values: cuts its region into slots, and uses those again that were returned.

use std::collections::BTreeMap;
use std::io;

use super::control::{Control, State, is_alive};
use super::pages::Pages;
use super::{REGION_BYTES, Slot};

/// Smallest slot.
const SMALLEST: u64 = 64 * 1024;
/// Bytes of returned slots that are kept for the next ones; what is more is given back to the system.
const KEPT: u64 = 256 << 20;

/// Writes large values, and knows which slots are its own.
#[derive(Debug)]
pub(crate) struct Lender {
    control: Control,
    /// Where the part of its region begins that was never used.
    unused: u64,
    end: u64,
    /// Slots nobody has, by their length.
    free: BTreeMap<u64, Vec<Own>>,
    /// Bytes of those that are in memory.
    kept: u64,
    lent: Vec<Own>,
    /// How often it lent.
    serial: u64,
}

#[derive(Debug)]
struct Own {
    slot: Slot,
    pages: Pages,
    /// Which lending it is, the last or the one that goes on.
    serial: u64,
    /// It has memory, and not only an address.
    is_kept: bool,
}

/// A slot that was lent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lent {
    pub slot: Slot,
    /// Which lending of the slot it is: it may have been returned and lent again since.
    serial: u64,
}

impl Lender {
    pub fn new(control: Control) -> io::Result<Self> {
        let unused = control.new_region()?;
        let end = unused + REGION_BYTES;
        Ok(Self { control, unused, end, free: BTreeMap::new(), kept: 0, lent: Vec::new(), serial: 0 })
    }

    /// Puts bytes into a slot, which is the other side's until it returns it. `None` where there is no room.
    pub fn lend(&mut self, bytes: &[u8]) -> Option<Lent> {
        let capacity = capacity_for(bytes.len() as u64)?;
        self.take_returned();
        let mut own = match self.free.get_mut(&capacity).and_then(Vec::pop) {
            Some(own) => {
                self.kept -= if own.is_kept { capacity } else { 0 };
                own
            }
            None => self.cut(capacity)?,
        };
        own.pages.write(bytes);
        own.is_kept = true;
        self.control.set(own.slot.number, State::Lent);
        self.serial += 1;
        own.serial = self.serial;
        let lent = Lent { slot: own.slot, serial: own.serial };
        self.lent.push(own);
        Some(lent)
    }

    /// Whoever was to take it does not: what it holds is over.
    pub fn is_over(&self, lent: Lent) {
        let is_same = self.lent.iter().any(|own| own.slot == lent.slot && own.serial == lent.serial);
        if is_same && self.control.state(lent.slot.number) == State::Lent {
            self.control.set(lent.slot.number, State::Returned);
        }
    }

    /// Takes back what processes had that are gone.
    pub fn bury(&mut self) {
        for own in &self.lent {
            if let State::TakenBy(process) = self.control.state(own.slot.number)
                && !is_alive(process)
            {
                self.control.set(own.slot.number, State::Returned);
            }
        }
        self.take_returned();
    }

    fn take_returned(&mut self) {
        let control = &self.control;
        let (returned, lent): (Vec<Own>, Vec<Own>) = std::mem::take(&mut self.lent)
            .into_iter()
            .partition(|own| control.state(own.slot.number) == State::Returned);
        self.lent = lent;
        for mut own in returned {
            let capacity = own.slot.capacity;
            if self.kept + capacity > KEPT {
                own.is_kept = !self.control.free(own.slot.range());
            }
            self.kept += if own.is_kept { capacity } else { 0 };
            self.free.entry(capacity).or_default().push(own);
        }
    }

    fn cut(&mut self, capacity: u64) -> Option<Own> {
        let offset = self.unused;
        if offset + capacity > self.end {
            return None;
        }
        let pages = Pages::map(&self.control.memory, offset, capacity, false).ok()?;
        let slot = Slot { number: self.control.new_slot()?, offset, capacity };
        self.unused += capacity;
        Some(Own { slot, pages, serial: 0, is_kept: false })
    }
}

/// How long a slot is for so many bytes: at most a quarter more, so that different lengths can use the same ones.
fn capacity_for(bytes: u64) -> Option<u64> {
    if bytes <= SMALLEST {
        return Some(SMALLEST);
    }
    let step = (bytes.checked_next_power_of_two()? / 8).max(SMALLEST / 4);
    bytes.checked_next_multiple_of(step).filter(|capacity| *capacity <= REGION_BYTES)
}
