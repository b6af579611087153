//! A piece of the file, mapped.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Mapped bytes; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Pages {
    at: NonNull<u8>,
    length: usize,
}

// SAFETY: an address range is no thread's own; who reads and writes it when is kept by the words of the control area.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Send for Pages {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps so much of the file from there. What is written to private pages is seen by nobody else.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn map(memory: impl AsFd, offset: u64, length: u64, is_private: bool) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let flags = if is_private { MapFlags::PRIVATE } else { MapFlags::SHARED };
        // SAFETY: a fresh mapping, within a file that cannot be shortened.
        let at =
            unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags, memory, offset)? };
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, length })
    }

    pub fn address(&self) -> NonNull<u8> {
        self.at
    }

    /// Copies bytes to the beginning.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "a slot is as long as what is put into it");
        // SAFETY: within the mapping; nobody else looks at a slot that is not lent.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr(), bytes.len()) };
    }

    /// Forgets what was written to private pages: they show the file again.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn forget_changes(&self) {
        // SAFETY: our own mapping, which nobody has a reference into any more.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.length, Advice::LinuxDontNeed) };
    }
}

impl Drop for Pages {
    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn drop(&mut self) {
        // SAFETY: mapped in `map` by this length, and nobody has a reference into it any more.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.length) };
    }
}
