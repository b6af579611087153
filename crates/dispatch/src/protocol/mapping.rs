//! Memory that two processes share: a file without a name, and pieces of it that are mapped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Makes memory of so many zeros. Its length is sealed, so a mapping of it always stays whole.
pub fn sealed_memory(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, bytes)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Mapped bytes; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    at: NonNull<u8>,
    length: usize,
}

// SAFETY: an address range is no thread's own; its users agree by atomics in shared memory on who reads and writes when.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps so much of the file from there. Every mapping of the file sees what is written.
    pub fn shared(memory: impl AsFd, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(memory, offset, length, MapFlags::SHARED)
    }

    /// The same, but private: other mappings do not see what is written here.
    pub fn private(memory: impl AsFd, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(memory, offset, length, MapFlags::PRIVATE)
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn map(memory: impl AsFd, offset: u64, length: u64, flags: MapFlags) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is fresh, belongs to this value alone, and is unmapped in drop only.
        let at = unsafe { mmap(std::ptr::null_mut(), length, protection, flags, memory, offset)? };
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, length })
    }

    /// Where it begins: at the beginning of a page.
    pub fn address(&self) -> NonNull<u8> {
        self.at
    }

    /// How many bytes are mapped.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Copies bytes to this place. The caller knows that no other process reads it now.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let is_inside = at.checked_add(bytes.len()).is_some_and(|end| end <= self.length);
        assert!(is_inside, "{} bytes at {at} are outside of a mapping of {}", bytes.len(), self.length);
        // SAFETY: the assertion above keeps the copy inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr().add(at), bytes.len()) };
    }

    /// Forgets what was written to a private mapping: it shows the file again.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn forget_changes(&self) {
        // SAFETY: the mapping is our own, and no reference into it is left.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn drop(&mut self) {
        // SAFETY: `map` made it with this length, and no reference into it is left.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.length) };
    }
}
