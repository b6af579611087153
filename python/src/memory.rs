//! Memory that a program and its workers share, so that large values need not be sent: written once by one side, read in
//! place by the other.
//!
//! All of it is one file without a name, which is gone when nobody has it any more, however everybody died. Whoever writes
//! ([`Lender`]) has a region of its own in it, and cuts it into slots. A slot is lent with a message, taken by whoever unpacks
//! that ([`Borrower`]), and returned by a word in memory when the last value in it is dropped. A borrower's changes are its
//! own: it sees a private copy of what it writes to.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use gpupool_dispatch::protocol::{MemoryMapping, SharedBytes, create_sealed_memory};
use rustix::fs::{FallocateFlags, fallocate};

/// Where a slot is, as it is told to the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Its number in the control area.
    pub number: u32,
    /// Where in the file it begins.
    pub offset: u64,
    /// How long it is, whatever of it is used.
    pub capacity: u64,
}

impl Slot {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.capacity)
    }
}

/// Address space of the file for each region; what is not used costs nothing.
const REGION_BYTES: u64 = 1 << 40;
/// How many regions there can be: one for each worker process that ever writes anything large, and one for the program.
const REGIONS: u64 = 1 << 20;

/// A new shared memory.
pub(crate) fn create() -> io::Result<Arc<OwnedFd>> {
    create_sealed_memory("gpupool-values", REGION_BYTES * REGIONS).map(Arc::new)
}

// Whoever writes large values: cuts its region into slots, and uses those again that were returned.

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
    pages: MemoryMapping,
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
    pub fn lend(&mut self, bytes: SharedBytes<'_>) -> Option<Lent> {
        let capacity = capacity_for(bytes.len() as u64)?;
        self.take_returned();
        let mut own = match self.free.get_mut(&capacity).and_then(Vec::pop) {
            Some(own) => {
                self.kept -= if own.is_kept { capacity } else { 0 };
                own
            }
            None => self.cut(capacity)?,
        };
        own.pages.write(0, bytes);
        own.is_kept = true;
        self.control.set(own.slot.number, LENT);
        self.serial += 1;
        own.serial = self.serial;
        let lent = Lent { slot: own.slot, serial: own.serial };
        self.lent.push(own);
        Some(lent)
    }

    /// Whoever was to take it does not: what it holds is over.
    pub fn is_over(&self, lent: Lent) {
        let is_same = self.lent.iter().any(|own| own.slot == lent.slot && own.serial == lent.serial);
        if is_same && self.control.state(lent.slot.number) == LENT {
            self.control.set(lent.slot.number, RETURNED);
        }
    }

    /// Takes back what processes had that are gone.
    pub fn bury(&mut self) {
        for own in &self.lent {
            let state = self.control.state(own.slot.number);
            if state != LENT && !is_alive(state) {
                self.control.set(own.slot.number, RETURNED);
            }
        }
        self.take_returned();
    }

    fn take_returned(&mut self) {
        let control = &self.control;
        let (returned, lent): (Vec<Own>, Vec<Own>) =
            std::mem::take(&mut self.lent).into_iter().partition(|own| control.state(own.slot.number) == RETURNED);
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
        let pages = MemoryMapping::shared(&self.control.memory, offset, capacity).ok()?;
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

// Whoever reads large values where they are, and returns their slots when nothing of them is left.

/// Reads large values. Mappings are kept for the next use of the same slots.
#[derive(Debug)]
pub(crate) struct Borrower {
    control: Control,
    /// Slots that are taken, by where they begin, with where they end.
    taken: Mutex<BTreeMap<u64, u64>>,
    /// Of slots that are returned, by where they begin.
    unused: Mutex<HashMap<u64, MemoryMapping>>,
}

impl Borrower {
    pub fn new(control: Control) -> Arc<Self> {
        Arc::new(Self { control, taken: Mutex::default(), unused: Mutex::default() })
    }

    /// Processes of the other side are gone, and all they sent is taken: what else they wrote is given back.
    pub fn bury(&self) {
        let control = &self.control;
        for region in control.bury() {
            let taken = lock(&self.taken);
            let mut from = region;
            for (begin, end) in taken.range(region..region + REGION_BYTES) {
                control.free(from..*begin);
                from = *end;
            }
            control.free(from..region + REGION_BYTES);
            lock(&self.unused).retain(|offset, _| !(region..region + REGION_BYTES).contains(offset));
        }
    }

    /// Takes what was lent: it is there until this is dropped.
    pub fn take(self: &Arc<Self>, slot: Slot, length: u64) -> io::Result<Taken> {
        let control = &self.control;
        if !control.has(slot.number) || length > slot.capacity || slot.capacity > REGION_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "there is no such shared memory"));
        }
        let known = lock(&self.unused).remove(&slot.offset);
        let pages = match known {
            Some(pages) => pages,
            None => MemoryMapping::private(&control.memory, slot.offset, slot.capacity)?,
        };
        let process = std::process::id();
        lock(&self.taken).insert(slot.offset, slot.range().end);
        control.set(slot.number, process);
        Ok(Taken { borrower: Arc::clone(self), slot, pages: Some(pages), process })
    }
}

/// A slot that is ours; returned when this is dropped, but not by a copy in a forked child.
#[derive(Debug)]
pub(crate) struct Taken {
    borrower: Arc<Borrower>,
    slot: Slot,
    pages: Option<MemoryMapping>,
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
        let Borrower { control, taken, unused } = &*self.borrower;
        lock(taken).remove(&self.slot.offset);
        if control.is_buried(self.slot.offset) {
            drop(pages);
            control.free(self.slot.range());
            return;
        }
        pages.discard_changes();
        lock(unused).insert(self.slot.offset, pages);
        control.set(self.slot.number, RETURNED);
    }
}

// The control area at the beginning of the file: a word for each slot that says who has it.

/// Slots there can be.
const SLOTS: usize = 1 << 18;
/// Regions whose owners are known; what those beyond leave behind is there until the end.
const OWNERS: usize = 1 << 12;
/// What an owner that died left behind was given back.
const BURIED: u32 = u32::MAX;
/// State of a slot that only the owner of its region has.
const RETURNED: u32 = 0;
/// State of a slot that is on its way. Not the number of any process: those are smaller.
const LENT: u32 = u32::MAX;

/// The words, in their order.
#[repr(C)]
struct Words {
    next_region: AtomicU32,
    next_slot: AtomicU32,
    /// The processes that write to the regions, from the first on; 0 where there is none yet.
    owners: [AtomicU32; OWNERS],
    /// [`RETURNED`], [`LENT`], or the number of the process that has the slot.
    states: [AtomicU32; SLOTS],
}

/// The control area, on one side.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pages: Arc<MemoryMapping>,
    pub memory: Arc<OwnedFd>,
}

impl Control {
    pub fn of(memory: Arc<OwnedFd>) -> io::Result<Self> {
        if rustix::fs::fstat(&memory)?.st_size.cast_unsigned() < REGION_BYTES * REGIONS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shared memory is too short"));
        }
        let pages = Arc::new(MemoryMapping::shared(&memory, 0, size_of::<Words>() as u64)?);
        Ok(Self { pages, memory })
    }

    /// Where a region begins that nobody else has.
    pub fn new_region(&self) -> io::Result<u64> {
        // The first one is this area.
        let number = u64::from(self.words().next_region.fetch_add(1, Ordering::Relaxed)) + 1;
        if let Some(owner) = self.owner(number * REGION_BYTES) {
            owner.store(std::process::id(), Ordering::Release);
        }
        if number < REGIONS { Ok(number * REGION_BYTES) } else { Err(io::ErrorKind::OutOfMemory.into()) }
    }

    /// Where the regions begin whose owners have died since this was last asked.
    pub fn bury(&self) -> Vec<u64> {
        let used = (self.words().next_region.load(Ordering::Acquire) as usize).min(OWNERS);
        let dead = self.words().owners.iter().zip(1..).take(used).filter_map(|(owner, number)| {
            let process = owner.load(Ordering::Acquire);
            let is_dead = process != 0 && process != BURIED && !is_alive(process);
            is_dead.then(|| {
                owner.store(BURIED, Ordering::Release);
                number * REGION_BYTES
            })
        });
        dead.collect()
    }

    /// Whether the owner of the region a slot is in was buried.
    pub fn is_buried(&self, offset: u64) -> bool {
        self.owner(offset).is_some_and(|owner| owner.load(Ordering::Acquire) == BURIED)
    }

    fn owner(&self, offset: u64) -> Option<&AtomicU32> {
        let number = usize::try_from(offset / REGION_BYTES).ok()?;
        self.words().owners.get(number.checked_sub(1)?)
    }

    /// Gives memory back to the system; whether it did.
    pub fn free(&self, range: Range<u64>) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        range.is_empty() || fallocate(&self.memory, flags, range.start, range.end - range.start).is_ok()
    }

    /// A slot's number that nobody else has; `None` where there are too many.
    pub fn new_slot(&self) -> Option<u32> {
        let number = self.words().next_slot.fetch_add(1, Ordering::Relaxed);
        ((number as usize) < SLOTS).then_some(number)
    }

    fn state(&self, slot: u32) -> u32 {
        self.words().states[slot as usize].load(Ordering::Acquire)
    }

    fn set(&self, slot: u32, state: u32) {
        self.words().states[slot as usize].store(state, Ordering::Release);
    }

    /// Whether there is such a slot.
    pub fn has(&self, slot: u32) -> bool {
        (slot as usize) < SLOTS
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn words(&self) -> &Words {
        // SAFETY: mapped as long as self lives, aligned to a page, of that size, and any bytes are atomics.
        unsafe { self.pages.address().cast().as_ref() }
    }
}

/// Whether there is such a process.
fn is_alive(process: u32) -> bool {
    let number = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    number.is_some_and(|number| rustix::process::test_kill_process(number).is_ok())
}
