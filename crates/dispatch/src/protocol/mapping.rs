//! Memory that two processes share: an anonymous file and mappings of it.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use bytes::BytesMut;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Creates zeroed shared memory of a sealed length, so that mappings of it stay valid.
pub fn create_sealed_memory(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, bytes)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Mapped bytes; unmapped when dropped.
#[derive(Debug)]
pub struct MemoryMapping {
    at: NonNull<u8>,
    length: usize,
}

// SAFETY: an address range belongs to no thread; its users coordinate reads and writes by atomics in shared memory.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Send for MemoryMapping {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "memory that two processes share")]
unsafe impl Sync for MemoryMapping {}

impl MemoryMapping {
    /// Maps a range of the file. Writes are visible to all shared mappings.
    pub fn shared(memory: impl AsFd, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(memory, offset, length, MapFlags::SHARED)
    }

    /// Maps a range of the file privately: writes are not visible to other mappings.
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

    /// Returns the page-aligned start address.
    pub fn address(&self) -> NonNull<u8> {
        self.at
    }

    /// Returns the number of mapped bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Copies bytes to this offset. The caller ensures that no other process reads them now.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn write<'a>(&self, at: usize, bytes: impl Into<SharedBytes<'a>>) {
        let bytes = bytes.into();
        self.assert_inside(at, bytes.length);
        // SAFETY: the assertion above keeps the target inside the mapping, and `bytes` promises its source; `copy` lets the two
        // overlap.
        unsafe { std::ptr::copy(bytes.at, self.at.as_ptr().add(at), bytes.length) };
    }

    /// Returns a range of the mapping, to which other processes may write.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub(crate) fn bytes(&self, at: usize, length: usize) -> SharedBytes<'_> {
        self.assert_inside(at, length);
        // SAFETY: the assertion above keeps them inside the mapping, which outlives the borrow.
        unsafe { SharedBytes::new(self.at.as_ptr().add(at), length) }
    }

    fn assert_inside(&self, at: usize, length: usize) {
        let is_inside = at.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(is_inside, "{length} bytes at {at} are outside a mapping of {}", self.length);
    }

    /// Discards writes to a private mapping, which then shows the file again.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn discard_changes(&self) {
        // SAFETY: the mapping is our own, and no reference into it is left.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.length, Advice::LinuxDontNeed) };
    }
}

impl Drop for MemoryMapping {
    #[allow(unsafe_code, reason = "memory that two processes share")]
    fn drop(&mut self) {
        // SAFETY: `map` made it with this length, and no reference into it is left.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.length) };
    }
}

/// Bytes that other processes or threads may change at any time, in a mapping or in a buffer of Python. They can only
/// be copied: a Rust reference to them would promise that they do not change.
#[derive(Debug, Clone, Copy)]
pub struct SharedBytes<'a> {
    at: *const u8,
    length: usize,
    _memory: PhantomData<&'a [u8]>,
}

impl SharedBytes<'_> {
    /// Wraps the bytes at an address.
    ///
    /// # Safety
    ///
    /// `length` bytes from `at` on stay mapped and readable for the whole lifetime. Other processes may write to them.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub unsafe fn new(at: *const u8, length: usize) -> Self {
        Self { at, length, _memory: PhantomData }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Appends a copy of the current bytes to a buffer.
    #[allow(unsafe_code, reason = "memory that two processes share")]
    pub fn append_to(&self, buffer: &mut BytesMut) {
        buffer.reserve(self.length);
        let filled = buffer.len();
        // SAFETY: the source is readable by the contract of `new`; the spare capacity was just reserved, belongs to the
        // buffer alone, and is filled when the length is set.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at, buffer.as_mut_ptr().add(filled), self.length);
            buffer.set_len(filled + self.length);
        }
    }
}

impl<'a> From<&'a [u8]> for SharedBytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { at: bytes.as_ptr(), length: bytes.len(), _memory: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_reads_the_writes_of_another() {
        let memory = create_sealed_memory("test", 8_192).unwrap();
        let (ours, theirs) =
            (MemoryMapping::shared(&memory, 0, 8_192).unwrap(), MemoryMapping::shared(&memory, 4_096, 4_096).unwrap());
        ours.write(4_096, &b"shared"[..]);
        let mut copied = BytesMut::from(&b"the text is "[..]);
        theirs.bytes(0, 6).append_to(&mut copied);
        assert_eq!(&copied[..], b"the text is shared");
        theirs.write(4_090, ours.bytes(4_096, 6));
        copied.clear();
        ours.bytes(8_186, 6).append_to(&mut copied);
        assert_eq!(&copied[..], b"shared");
    }

    #[test]
    #[should_panic(expected = "2 bytes at 4095 are outside a mapping of 4096")]
    fn a_range_past_the_end_panics() {
        let memory = create_sealed_memory("test", 4_096).unwrap();
        let _ = MemoryMapping::shared(&memory, 0, 4_096).unwrap().bytes(4_095, 2);
    }
}
