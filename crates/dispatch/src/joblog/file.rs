//! The file of a job log: made or gone on with, locked for one run, and only ever appended to.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::finished::Finished;
use super::line::{Entry, HEADER};
use super::sync::Syncing;
use super::{JobLogError, trouble};

/// What of an earlier run is done again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// Nothing that was logged.
    Nothing,
    /// What failed.
    Failed,
}

/// A log that is being written. No other run can use it meanwhile.
#[derive(Debug)]
pub struct JobLog {
    path: PathBuf,
    file: File,
    /// Where the last whole line ends.
    end: u64,
    line: Vec<u8>,
    syncing: Syncing,
}

impl JobLog {
    /// Begins a log. An earlier run's log in the same file is given up.
    pub fn start(path: &Path) -> Result<Self, JobLogError> {
        let file = open(path)?;
        let mut beginning = Vec::new();
        let read = (&file).take(HEADER.len() as u64).read_to_end(&mut beginning);
        read.map_err(trouble(path, "read"))?;
        // Whatever else the file may be is not ours to throw away.
        if !HEADER.starts_with(&beginning) {
            return Err(JobLogError::NotAJobLog(path.to_owned()));
        }
        Self::write_on(file, path, 0)
    }

    /// Goes on with an earlier run's log, or begins one where there is none. A line that was cut off is removed: its task
    /// was not logged.
    pub fn resume(path: &Path, again: Again) -> Result<(Self, Finished), JobLogError> {
        let mut file = open(path)?;
        let (finished, end) = Finished::read(&mut file, path, again)?;
        Ok((Self::write_on(file, path, end)?, finished))
    }

    fn write_on(mut file: File, path: &Path, end: u64) -> Result<Self, JobLogError> {
        let prepare = |file: &mut File| {
            file.set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
            if end == 0 {
                file.write_all(HEADER)?;
            }
            file.sync_all()
        };
        prepare(&mut file).map_err(trouble(path, "written"))?;
        let syncing = file.try_clone().and_then(Syncing::start).map_err(trouble(path, "written"))?;
        let end = end.max(HEADER.len() as u64);
        Ok(Self { path: path.to_owned(), file, end, line: Vec::new(), syncing })
    }

    /// Writes what became of a task. It is in the file when this returns, and on the disk a moment later.
    pub fn append(&mut self, entry: &Entry<'_>) -> Result<(), JobLogError> {
        self.line.clear();
        entry.write(&mut self.line);
        if let Err(error) = self.file.write_all(&self.line) {
            // As on a full disk: half a line would spoil the next one.
            let _ = self.file.set_len(self.end).and_then(|()| self.file.seek(SeekFrom::Start(self.end)));
            return Err(trouble(&self.path, "written")(error));
        }
        self.end += self.line.len() as u64;
        self.syncing.wrote().map_err(trouble(&self.path, "brought to the disk"))
    }

    /// Waits until everything is on the disk.
    pub fn finish(self) -> Result<(), JobLogError> {
        self.syncing.finish().map_err(trouble(&self.path, "brought to the disk"))
    }
}

fn open(path: &Path) -> Result<File, JobLogError> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.map_err(trouble(path, "opened"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JobLogError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(trouble(path, "locked")(error)),
    }
}
