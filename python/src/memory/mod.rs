//! Memory that a program and its workers share, so that large values need not be sent: written once by one side, read in
//! place by the other.
//!
//! All of it is one file without a name, which is gone when nobody has it any more, however everybody died. Whoever writes
//! ([`Lender`]) has a region of its own in it, and cuts it into slots. A slot is lent with a message, taken by whoever unpacks
//! that ([`Borrower`]), and returned by a word in memory when the last value in it is dropped. A borrower's changes are its
//! own: it sees a private copy of what it writes to.

mod borrower;
mod control;
mod lender;
mod pages;

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

pub(crate) use borrower::{Borrower, Taken};
pub(crate) use control::Control;
pub(crate) use lender::{Lender, Lent};

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
    let memory = memfd_create("gpupool-values", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, REGION_BYTES * REGIONS)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(Arc::new(memory))
}
