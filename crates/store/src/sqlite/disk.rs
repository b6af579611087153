//! Files beside the database: the lock and the ballast, and the length of the log.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, statvfs};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::StoreError;
use crate::limits::{BALLAST_BYTES, FULL_DISK_BYTES, LOG_BYTES, LOG_FREE_BYTES};

/// Exclusive lock of a state directory, held until drop.
#[derive(Debug)]
pub(super) struct StateDirLock {
    _file: File,
}

impl StateDirLock {
    /// Locks a state directory, or returns the process that has the lock.
    pub fn acquire(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join("lock");
        let fail = |doing, source| StoreError::File { path: path.clone(), doing, source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|error| fail("open", error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StoreError::InUse { dir: dir.to_owned(), pid: read_pid(&mut file) }),
            Err(error) => return Err(fail("lock", error.into())),
        }
        // The pid is only information: a full disk must not prevent an agent from starting.
        let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { _file: file })
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

// A reserved file that is removed when the disk is full.
//
// Releases must be possible on a full disk: one MiB is enough for thousands of them.

/// Path of the reserved file, which may be absent.
#[derive(Debug)]
pub(super) struct BallastFile {
    pub path: PathBuf,
}

impl BallastFile {
    pub fn new(dir: &Path) -> Self {
        Self { path: dir.join("ballast") }
    }

    /// Creates the file if it is missing or short. A partial file is removed again.
    pub fn fill(&self) -> io::Result<()> {
        if fs::metadata(&self.path).is_ok_and(|meta| meta.len() == BALLAST_BYTES) {
            return Ok(());
        }
        let written = self.write();
        if written.is_err() {
            let _ = fs::remove_file(&self.path);
        }
        written
    }

    fn write(&self) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
        if fallocate(&file, FallocateFlags::empty(), 0, BALLAST_BYTES).is_err() {
            // Zeros take no space on a compressing file system.
            let mut block = [0; 4096];
            getrandom(&mut block, GetRandomFlags::empty())?;
            file.set_len(0)?;
            for _ in 0..BALLAST_BYTES / block.len() as u64 {
                file.write_all(&block)?;
            }
        }
        file.sync_all()
    }

    /// Removes the file to free its space; returns whether it existed.
    pub fn release(&self) -> bool {
        let removed = fs::remove_file(&self.path).is_ok();
        // Some file systems free the space only when the removal is durable.
        if let Some(Ok(dir)) = self.path.parent().map(File::open) {
            let _ = dir.sync_all();
        }
        removed
    }

    /// Returns whether the disk has hardly any space left.
    pub fn is_disk_full(&self) -> bool {
        let dir = self.path.parent().unwrap_or(&self.path);
        statvfs(dir).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < FULL_DISK_BYTES)
    }
}

// Extension of the log before it is written.
//
// Making a page within a file durable is one write. In a growing file the new length must be durable as well, which
// takes about as long again. The database restarts its log at the front and never reads beyond its last write, so the
// rest of the file may contain anything.

/// Extends the log of a database to its maximum size, if there is enough free space. A log that cannot be extended
/// works as well.
pub(super) fn extend_log(database: &Path) {
    let path = database.with_extension("db-wal");
    let Ok(mut file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(length) = file.metadata().map(|meta| meta.len()) else { return };
    let has_space =
        statvfs(database).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) >= LOG_FREE_BYTES);
    if has_space && write_zeros(&mut file, length).is_err() {
        // The existing frames stay.
        let _ = file.set_len(length);
    }
}

fn write_zeros(file: &mut File, from: u64) -> io::Result<()> {
    let missing = usize::try_from(LOG_BYTES.cast_unsigned().saturating_sub(from)).unwrap_or_default();
    if missing == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(from))?;
    // Written zeros instead of a hole: writing to a hole allocates blocks, which costs as much as growing.
    file.write_all(&vec![0; missing])?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn extending_the_log_keeps_its_frames_and_adds_zeros() {
        let dir = tempdir().unwrap();
        let (database, log) = (dir.path().join("pool.db"), dir.path().join("pool.db-wal"));
        fs::write(&database, b"").unwrap();
        extend_log(&database);
        assert!(!log.exists(), "the database makes it");
        for _ in 0..2 {
            fs::write(&log, b"frames").unwrap();
            extend_log(&database);
            extend_log(&database);
            let bytes = fs::read(&log).unwrap();
            assert_eq!(bytes.len() as i64, LOG_BYTES);
            assert!(bytes.starts_with(b"frames") && bytes[6..].iter().all(|byte| *byte == 0));
        }
    }
}
