//! The files beside the database: a lock, a ballast, and the length of the log.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, statvfs};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::StoreError;
use crate::limits::{BALLAST_BYTES, FULL_BELOW_BYTES, LOG_BYTES, LOG_SPACE};

/// Held as long as it lives.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a state directory, or says who has it.
    pub fn take(dir: &Path) -> Result<Self, StoreError> {
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
            Err(Errno::WOULDBLOCK) => return Err(StoreError::InUse { dir: dir.to_owned(), pid: pid_in(&mut file) }),
            Err(error) => return Err(fail("lock", error.into())),
        }
        // Only for people: a full disk must not keep an agent from starting.
        let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { _file: file })
    }
}

fn pid_in(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

// A file that only takes up space, to be given up when the disk is full.
//
// A full disk must not keep anybody from giving GPUs back: one MiB keeps thousands of releases.

/// Where the file is, or was.
#[derive(Debug)]
pub(super) struct Ballast {
    pub path: PathBuf,
}

impl Ballast {
    pub fn of(dir: &Path) -> Self {
        Self { path: dir.join("ballast") }
    }

    /// Makes the file where it is missing or short. What could be made of it in part is removed again.
    pub fn take(&self) -> io::Result<()> {
        if fs::metadata(&self.path).is_ok_and(|meta| meta.len() == BALLAST_BYTES) {
            return Ok(());
        }
        let made = self.fill();
        if made.is_err() {
            let _ = fs::remove_file(&self.path);
        }
        made
    }

    fn fill(&self) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
        if fallocate(&file, FallocateFlags::empty(), 0, BALLAST_BYTES).is_err() {
            // Zeros take no space on a file system that compresses.
            let mut block = [0; 4096];
            getrandom(&mut block, GetRandomFlags::empty())?;
            file.set_len(0)?;
            for _ in 0..BALLAST_BYTES / block.len() as u64 {
                file.write_all(&block)?;
            }
        }
        file.sync_all()
    }

    /// Gives the space up; says whether there was any.
    pub fn give_up(&self) -> bool {
        let given = fs::remove_file(&self.path).is_ok();
        // Some file systems free space only when the removal is on disk.
        if let Some(Ok(dir)) = self.path.parent().map(File::open) {
            let _ = dir.sync_all();
        }
        given
    }

    /// Returns whether hardly any space is left here.
    pub fn is_crowded(&self) -> bool {
        let dir = self.path.parent().unwrap_or(&self.path);
        statvfs(dir).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < FULL_BELOW_BYTES)
    }
}

// The log gets its length before it is written.
//
// To make a page durable that lies within a file is one write; where the file grows its new length has to be durable as
// well, which takes about as long again. The database starts its log over at the front and never looks behind what it
// wrote last, so the rest may as well be there.

/// Lengthens the log of a database to what it is cut back to later, where it is shorter and there is space to spare. A log
/// that cannot be lengthened works as well.
pub(super) fn lengthen_log(database: &Path) {
    let path = database.with_extension("db-wal");
    let Ok(mut file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(length) = file.metadata().map(|meta| meta.len()) else { return };
    let is_roomy = statvfs(database).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) >= LOG_SPACE);
    if is_roomy && fill_log(&mut file, length).is_err() {
        // What is in it stays.
        let _ = file.set_len(length);
    }
}

fn fill_log(file: &mut File, from: u64) -> io::Result<()> {
    let missing = usize::try_from(LOG_BYTES.cast_unsigned().saturating_sub(from)).unwrap_or_default();
    if missing == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(from))?;
    // Zeros that are written, not a hole: a hole is filled when it is written to, which is growing once more.
    file.write_all(&vec![0; missing])?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn what_is_in_the_log_stays_and_zeros_follow() {
        let dir = tempdir().unwrap();
        let (database, log) = (dir.path().join("pool.db"), dir.path().join("pool.db-wal"));
        fs::write(&database, b"").unwrap();
        lengthen_log(&database);
        assert!(!log.exists(), "the database makes it");
        for _ in 0..2 {
            fs::write(&log, b"frames").unwrap();
            lengthen_log(&database);
            lengthen_log(&database);
            let bytes = fs::read(&log).unwrap();
            assert_eq!(bytes.len() as i64, LOG_BYTES);
            assert!(bytes.starts_with(b"frames") && bytes[6..].iter().all(|byte| *byte == 0));
        }
    }
}
