//! Memory that two processes share: a file without a name, and pieces of it that are mapped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Makes memory of so many zeros that nobody can shorten or lengthen: a mapping of it always stays whole.
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
    /// Maps so much of the file from there. Everybody who maps it sees what is written.
    pub fn shared(memory: impl AsFd, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(memory, offset, length, MapFlags::SHARED)
    }

    /// The same, but what is written here is seen by nobody else.
    pub fn private(memory: impl AsFd, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(memory, offset, length, MapFlags::PRIVATE)
    }

    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn map(memory: impl AsFd, offset: u64, length: u64, flags: MapFlags) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, which is nobody else's, and unmapped in drop only.
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

    /// Copies bytes to this place, at which nobody else looks now.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(bytes.len() <= self.length.saturating_sub(at), "there is room for what is written");
        // SAFETY: within the mapping, as was just asked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr().add(at), bytes.len()) };
    }

    /// Forgets what was written to a private mapping: it shows the file again.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn forget_changes(&self) {
        // SAFETY: our own mapping, which nobody has a reference into any more.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn drop(&mut self) {
        // SAFETY: mapped in `map` by this length, and nobody has a reference into it any more.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.length) };
    }
}
