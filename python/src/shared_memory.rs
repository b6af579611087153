//! Memory shared by a program and its workers for large values: written once by one side, read in place by the other.
//!
//! All of it is one anonymous file, which the system frees with its last process. A writer ([`SlotLender`]) owns a
//! region of the file and divides it into slots. A message lends a slot; the reader ([`SlotBorrower`]) borrows it when
//! it unpacks the message, and returns it through a word in memory when the last value in it is dropped. A borrower's
//! changes are private: its mapping is copy-on-write.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use gpupool_dispatch::protocol::{MemoryMapping, SharedBytes, create_sealed_memory};
use rustix::fs::{FallocateFlags, fallocate};

/// Location of a slot, as sent to the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemorySlot {
    /// Number in the control area.
    pub number: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes, used or not.
    pub capacity: u64,
}

impl MemorySlot {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.capacity)
    }
}

/// Address space of each region in the file; unused parts cost nothing.
const REGION_BYTES: u64 = 1 << 40;
/// Maximum number of regions: one for the program and one for each worker process that ever writes a large value.
const MAX_REGIONS: u64 = 1 << 20;

/// Creates a new shared memory.
pub(crate) fn create() -> io::Result<Arc<OwnedFd>> {
    create_sealed_memory("gpupool-values", REGION_BYTES * MAX_REGIONS).map(Arc::new)
}

// The writer of large values: divides its region into slots and reuses returned ones.

/// Size of the smallest slot.
const MIN_SLOT_BYTES: u64 = 64 * 1024;
/// Maximum bytes of returned slots that stay in memory for reuse; the rest is returned to the system.
const MAX_FREE_RESIDENT_BYTES: u64 = 256 << 20;

/// Writer of large values and owner of their slots.
#[derive(Debug)]
pub(crate) struct SlotLender {
    control: ControlArea,
    /// Start of the unused part of its region.
    unused: u64,
    end: u64,
    /// Free slots by capacity.
    free: BTreeMap<u64, Vec<OwnedSlot>>,
    /// Bytes of free slots that are in memory.
    free_resident: u64,
    lent: Vec<OwnedSlot>,
    /// Number of loans so far.
    serial: u64,
}

#[derive(Debug)]
struct OwnedSlot {
    slot: MemorySlot,
    pages: MemoryMapping,
    /// Number of the slot's current or last loan.
    serial: u64,
    /// Whether the slot has memory and not only an address.
    is_resident: bool,
}

/// A lent slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LentSlot {
    pub slot: MemorySlot,
    /// Number of the loan: the slot may have been returned and lent again since.
    serial: u64,
}

impl SlotLender {
    pub fn new(control: ControlArea) -> io::Result<Self> {
        let unused = control.new_region()?;
        let end = unused + REGION_BYTES;
        Ok(Self { control, unused, end, free: BTreeMap::new(), free_resident: 0, lent: Vec::new(), serial: 0 })
    }

    /// Writes bytes into a slot, which belongs to the other side until returned. `None` if there is no room.
    pub fn lend(&mut self, bytes: SharedBytes<'_>) -> Option<LentSlot> {
        let capacity = capacity_for(bytes.len() as u64)?;
        self.reclaim_returned();
        let mut own = match self.free.get_mut(&capacity).and_then(Vec::pop) {
            Some(own) => {
                self.free_resident -= if own.is_resident { capacity } else { 0 };
                own
            }
            None => self.allocate_slot(capacity)?,
        };
        own.pages.write(0, bytes);
        own.is_resident = true;
        self.control.set_state(own.slot.number, LENT);
        self.serial += 1;
        own.serial = self.serial;
        let lent = LentSlot { slot: own.slot, serial: own.serial };
        self.lent.push(own);
        Some(lent)
    }

    /// Cancels a loan that was never borrowed.
    pub fn cancel(&self, lent: LentSlot) {
        let is_same = self.lent.iter().any(|own| own.slot == lent.slot && own.serial == lent.serial);
        if is_same && self.control.state(lent.slot.number) == LENT {
            self.control.set_state(lent.slot.number, RETURNED);
        }
    }

    /// Reclaims slots that exited processes had borrowed.
    pub fn reclaim_from_dead(&mut self) {
        for own in &self.lent {
            let state = self.control.state(own.slot.number);
            if state != LENT && !process_exists(state) {
                self.control.set_state(own.slot.number, RETURNED);
            }
        }
        self.reclaim_returned();
    }

    fn reclaim_returned(&mut self) {
        let control = &self.control;
        let (returned, lent): (Vec<OwnedSlot>, Vec<OwnedSlot>) =
            std::mem::take(&mut self.lent).into_iter().partition(|own| control.state(own.slot.number) == RETURNED);
        self.lent = lent;
        for mut own in returned {
            let capacity = own.slot.capacity;
            if self.free_resident + capacity > MAX_FREE_RESIDENT_BYTES {
                own.is_resident = !self.control.free_range(own.slot.range());
            }
            self.free_resident += if own.is_resident { capacity } else { 0 };
            self.free.entry(capacity).or_default().push(own);
        }
    }

    fn allocate_slot(&mut self, capacity: u64) -> Option<OwnedSlot> {
        let offset = self.unused;
        if offset + capacity > self.end {
            return None;
        }
        let pages = MemoryMapping::shared(&self.control.memory, offset, capacity).ok()?;
        let slot = MemorySlot { number: self.control.new_slot()?, offset, capacity };
        self.unused += capacity;
        Some(OwnedSlot { slot, pages, serial: 0, is_resident: false })
    }
}

/// Returns the capacity of a slot for this many bytes: at most a quarter more, so that different lengths share slots.
fn capacity_for(bytes: u64) -> Option<u64> {
    if bytes <= MIN_SLOT_BYTES {
        return Some(MIN_SLOT_BYTES);
    }
    let step = (bytes.checked_next_power_of_two()? / 8).max(MIN_SLOT_BYTES / 4);
    bytes.checked_next_multiple_of(step).filter(|capacity| *capacity <= REGION_BYTES)
}

// The reader of large values: uses them in place and returns their slots.

/// Reader of large values. Mappings are reused with their slots.
#[derive(Debug)]
pub(crate) struct SlotBorrower {
    control: ControlArea,
    /// Borrowed slots: start to end.
    taken: Mutex<BTreeMap<u64, u64>>,
    /// Mappings of returned slots by start.
    unused: Mutex<HashMap<u64, MemoryMapping>>,
}

impl SlotBorrower {
    pub fn new(control: ControlArea) -> Arc<Self> {
        Arc::new(Self { control, taken: Mutex::default(), unused: Mutex::default() })
    }

    /// Frees the regions of exited processes after all their messages were unpacked, except for borrowed slots.
    pub fn free_dead_regions(&self) {
        let control = &self.control;
        for region in control.take_dead_regions() {
            let taken = lock(&self.taken);
            let mut from = region;
            for (begin, end) in taken.range(region..region + REGION_BYTES) {
                control.free_range(from..*begin);
                from = *end;
            }
            control.free_range(from..region + REGION_BYTES);
            lock(&self.unused).retain(|offset, _| !(region..region + REGION_BYTES).contains(offset));
        }
    }

    /// Borrows a lent slot until the result is dropped.
    pub fn borrow(self: &Arc<Self>, slot: MemorySlot, length: u64) -> io::Result<BorrowedSlot> {
        let control = &self.control;
        if !control.has_slot(slot.number) || length > slot.capacity || slot.capacity > REGION_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "invalid shared memory slot"));
        }
        let known = lock(&self.unused).remove(&slot.offset);
        let pages = match known {
            Some(pages) => pages,
            None => MemoryMapping::private(&control.memory, slot.offset, slot.capacity)?,
        };
        let process = std::process::id();
        lock(&self.taken).insert(slot.offset, slot.range().end);
        control.set_state(slot.number, process);
        Ok(BorrowedSlot { borrower: Arc::clone(self), slot, pages: Some(pages), process })
    }
}

/// A borrowed slot; returned on drop, but not by a copy in a forked child.
#[derive(Debug)]
pub(crate) struct BorrowedSlot {
    borrower: Arc<SlotBorrower>,
    slot: MemorySlot,
    pages: Option<MemoryMapping>,
    process: u32,
}

impl BorrowedSlot {
    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.address().as_ptr() as usize)
    }
}

impl Drop for BorrowedSlot {
    fn drop(&mut self) {
        let Some(pages) = self.pages.take() else { return };
        if self.process != std::process::id() {
            std::mem::forget(pages);
            return;
        }
        let SlotBorrower { control, taken, unused } = &*self.borrower;
        lock(taken).remove(&self.slot.offset);
        if control.is_owner_dead(self.slot.offset) {
            drop(pages);
            control.free_range(self.slot.range());
            return;
        }
        pages.discard_changes();
        lock(unused).insert(self.slot.offset, pages);
        control.set_state(self.slot.number, RETURNED);
    }
}

// The control area at the beginning of the file: one state word per slot.

/// Maximum number of slots.
const MAX_SLOTS: usize = 1 << 18;
/// Number of regions with a known owner; memory of dead owners beyond is freed only at the end.
const MAX_OWNERS: usize = 1 << 12;
/// Owner of a region that was freed after its owner died.
const DEAD_OWNER: u32 = u32::MAX;
/// State of a slot that only the region's owner has.
const RETURNED: u32 = 0;
/// State of a slot in transit. No process id is this large.
const LENT: u32 = u32::MAX;

/// Layout of the control area.
#[repr(C)]
struct ControlWords {
    next_region: AtomicU32,
    next_slot: AtomicU32,
    /// Process ids of the region owners, from the first region on; 0 for none yet.
    owners: [AtomicU32; MAX_OWNERS],
    /// [`RETURNED`], [`LENT`], or the id of the borrowing process.
    states: [AtomicU32; MAX_SLOTS],
}

/// Mapping of the control area.
#[derive(Debug, Clone)]
pub(crate) struct ControlArea {
    pages: Arc<MemoryMapping>,
    pub memory: Arc<OwnedFd>,
}

impl ControlArea {
    pub fn map(memory: Arc<OwnedFd>) -> io::Result<Self> {
        if rustix::fs::fstat(&memory)?.st_size.cast_unsigned() < REGION_BYTES * MAX_REGIONS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shared memory is too short"));
        }
        let pages = Arc::new(MemoryMapping::shared(&memory, 0, size_of::<ControlWords>() as u64)?);
        Ok(Self { pages, memory })
    }

    /// Allocates a region and returns its offset.
    pub fn new_region(&self) -> io::Result<u64> {
        // Region 0 is the control area.
        let number = u64::from(self.words().next_region.fetch_add(1, Ordering::Relaxed)) + 1;
        if let Some(owner) = self.region_owner(number * REGION_BYTES) {
            owner.store(std::process::id(), Ordering::Release);
        }
        if number < MAX_REGIONS { Ok(number * REGION_BYTES) } else { Err(io::ErrorKind::OutOfMemory.into()) }
    }

    /// Returns the offsets of regions whose owners died since the last call.
    pub fn take_dead_regions(&self) -> Vec<u64> {
        let used = (self.words().next_region.load(Ordering::Acquire) as usize).min(MAX_OWNERS);
        let dead = self.words().owners.iter().zip(1..).take(used).filter_map(|(owner, number)| {
            let process = owner.load(Ordering::Acquire);
            let is_dead = process != 0 && process != DEAD_OWNER && !process_exists(process);
            is_dead.then(|| {
                owner.store(DEAD_OWNER, Ordering::Release);
                number * REGION_BYTES
            })
        });
        dead.collect()
    }

    /// Whether the owner of a slot's region is marked as dead.
    pub fn is_owner_dead(&self, offset: u64) -> bool {
        self.region_owner(offset).is_some_and(|owner| owner.load(Ordering::Acquire) == DEAD_OWNER)
    }

    fn region_owner(&self, offset: u64) -> Option<&AtomicU32> {
        let number = usize::try_from(offset / REGION_BYTES).ok()?;
        self.words().owners.get(number.checked_sub(1)?)
    }

    /// Returns memory to the system; `false` if that failed.
    pub fn free_range(&self, range: Range<u64>) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        range.is_empty() || fallocate(&self.memory, flags, range.start, range.end - range.start).is_ok()
    }

    /// Allocates a slot number; `None` if there are too many.
    pub fn new_slot(&self) -> Option<u32> {
        let number = self.words().next_slot.fetch_add(1, Ordering::Relaxed);
        ((number as usize) < MAX_SLOTS).then_some(number)
    }

    fn state(&self, slot: u32) -> u32 {
        self.words().states[slot as usize].load(Ordering::Acquire)
    }

    fn set_state(&self, slot: u32, state: u32) {
        self.words().states[slot as usize].store(state, Ordering::Release);
    }

    /// Whether the slot number is valid.
    pub fn has_slot(&self, slot: u32) -> bool {
        (slot as usize) < MAX_SLOTS
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn words(&self) -> &ControlWords {
        // SAFETY: mapped for the lifetime of `self`, page-aligned, of that size; all bytes are valid atomics.
        unsafe { self.pages.address().cast().as_ref() }
    }
}

/// Whether the process exists.
fn process_exists(process: u32) -> bool {
    let number = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    number.is_some_and(|number| rustix::process::test_kill_process(number).is_ok())
}
