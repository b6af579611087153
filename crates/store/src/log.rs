//! The log gets its length before it is written.
//!
//! To make a page durable that lies within a file is one write; where the file grows its new length has to be durable as
//! well, which takes about as long again. The database starts its log over at the front and never looks behind what it
//! wrote last, so the rest may as well be there.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use rustix::fs::statvfs;

use crate::limits::{LOG_BYTES, LOG_SPACE};

/// Lengthens the log of a database to what it is cut back to later, where it is shorter and there is space to spare. A log
/// that cannot be lengthened works as well.
pub(crate) fn lengthen(database: &Path) {
    let path = database.with_extension("db-wal");
    let Ok(mut file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(length) = file.metadata().map(|meta| meta.len()) else { return };
    let is_roomy = statvfs(database).is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) >= LOG_SPACE);
    if is_roomy && fill(&mut file, length).is_err() {
        // What is in it stays.
        let _ = file.set_len(length);
    }
}

fn fill(file: &mut File, from: u64) -> io::Result<()> {
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
        lengthen(&database);
        assert!(!log.exists(), "the database makes it");
        for _ in 0..2 {
            fs::write(&log, b"frames").unwrap();
            lengthen(&database);
            lengthen(&database);
            let bytes = fs::read(&log).unwrap();
            assert_eq!(bytes.len() as i64, LOG_BYTES);
            assert!(bytes.starts_with(b"frames") && bytes[6..].iter().all(|byte| *byte == 0));
        }
    }
}
