//! A file that only takes up space, to be given up when the disk is full.
//!
//! A full disk must not keep anybody from giving GPUs back: one MiB keeps thousands of releases.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::limits::{BALLAST_BYTES, FULL_BELOW_BYTES};

/// Where the file is, or was.
#[derive(Debug)]
pub(crate) struct Ballast {
    path: PathBuf,
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

    /// Whether hardly any space is left here.
    pub fn crowded(&self) -> bool {
        let dir = self.path.parent().unwrap_or(&self.path);
        statvfs(dir).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) < FULL_BELOW_BYTES)
    }
}
