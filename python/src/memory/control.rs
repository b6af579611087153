//! The control area at the beginning of the file: a word for each slot that says who has it.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

use super::pages::Pages;
use super::{REGION_BYTES, REGIONS};

/// Slots there can be.
const SLOTS: usize = 1 << 18;
/// Regions whose owners are known; what those beyond leave behind is there until the end.
const OWNERS: usize = 1 << 12;
/// What an owner that died left behind was given back.
const BURIED: u32 = u32::MAX;
/// Nobody has it but the one whose region it is in.
const RETURNED: u32 = 0;
/// It is on its way. Not the number of any process: those are smaller.
const LENT: u32 = u32::MAX;

/// The words, in their order.
#[repr(C)]
struct Words {
    next_region: AtomicU32,
    next_slot: AtomicU32,
    /// The processes that write to the regions, from the first on; 0 where there is none yet.
    owners: [AtomicU32; OWNERS],
    /// Else the number of the process that has it.
    states: [AtomicU32; SLOTS],
}

/// Who has a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Returned,
    Lent,
    TakenBy(u32),
}

/// The control area, on one side.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pages: Arc<Pages>,
    pub memory: Arc<OwnedFd>,
}

impl Control {
    pub fn of(memory: Arc<OwnedFd>) -> io::Result<Self> {
        if rustix::fs::fstat(&memory)?.st_size.cast_unsigned() < REGION_BYTES * REGIONS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the shared memory is too short"));
        }
        let pages = Arc::new(Pages::map(&memory, 0, size_of::<Words>() as u64, false)?);
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

    pub fn state(&self, slot: u32) -> State {
        match self.state_of(slot).load(Ordering::Acquire) {
            RETURNED => State::Returned,
            LENT => State::Lent,
            process => State::TakenBy(process),
        }
    }

    pub fn set(&self, slot: u32, state: State) {
        let word = match state {
            State::Returned => RETURNED,
            State::Lent => LENT,
            State::TakenBy(process) => process,
        };
        self.state_of(slot).store(word, Ordering::Release);
    }

    /// Whether there is such a slot.
    pub fn has(&self, slot: u32) -> bool {
        (slot as usize) < SLOTS
    }

    fn state_of(&self, slot: u32) -> &AtomicU32 {
        &self.words().states[slot as usize]
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn words(&self) -> &Words {
        // SAFETY: mapped as long as self lives, aligned to a page, of that size, and any bytes are atomics.
        unsafe { self.pages.address().cast().as_ref() }
    }
}

/// Whether there is such a process.
pub(super) fn is_alive(process: u32) -> bool {
    let number = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    number.is_some_and(|number| rustix::process::test_kill_process(number).is_ok())
}
