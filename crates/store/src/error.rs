//! Errors, by what the caller can do about them.

use std::error::Error;
use std::io;
use std::path::PathBuf;

/// Error of the database or the system below a store.
pub type BoxedError = Box<dyn Error + Send + Sync>;

/// Error of opening a store. The files stay unchanged.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another agent has the store open.
    #[error("{} is in use by {}; stop that agent, or choose another state directory", dir.display(), process_name(*pid))]
    InUse {
        dir: PathBuf,
        /// Process that has the store open, if known.
        pid: Option<u32>,
    },
    /// A newer gpupool wrote the store.
    #[error(
        "{} has schema {found}, but this gpupool supports up to schema {known}; it is left untouched: start the newer \
         gpupool again, or choose another state directory", file.display()
    )]
    NewerSchema { file: PathBuf, found: u32, known: u32 },
    /// The database is damaged.
    #[error("{} is damaged ({what}); it is left untouched: restore a copy, or move it away to start empty", file.display())]
    Corrupt { file: PathBuf, what: String },
    /// The database belongs to another program.
    #[error("{} is a database of another program (application id {found:#010x}); it is left untouched: choose another state \
         directory", file.display())]
    NotOurs { file: PathBuf, found: u32 },
    /// A file or directory cannot be used.
    #[error("cannot {doing} {}: {source}; the state directory must be on a local disk and writable for this user", path.display())]
    File { path: PathBuf, doing: &'static str, source: io::Error },
    /// The file system does not support a write-ahead log.
    #[error("{} cannot have a write-ahead log on this file system: the state directory must be on a local disk", file.display())]
    NoLog { file: PathBuf },
    /// The database cannot be used.
    #[error("cannot use {}: {source}", file.display())]
    Database { file: PathBuf, source: BoxedError },
}

fn process_name(pid: Option<u32>) -> String {
    pid.map_or("another process".into(), |pid| format!("process {pid}"))
}

/// Error of a commit. Nothing of the batch was written.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// No space is left.
    #[error("{} was not written, the disk is full: free some space ({source})", file.display())]
    Full { file: PathBuf, source: BoxedError },
    /// The file or its file system is read-only.
    #[error("{} was not written, it is read-only: check the mount and the file's permissions ({source})", file.display())]
    ReadOnly { file: PathBuf, source: BoxedError },
    /// The disk failed.
    #[error("{} was not written, the disk reports an error: check the kernel's log ({source})", file.display())]
    Io { file: PathBuf, source: BoxedError },
    /// The database is damaged.
    #[error("{} was not written, it is damaged: stop the agent and restore a copy ({source})", file.display())]
    Corrupt { file: PathBuf, source: BoxedError },
    /// The database refused the commit for another reason.
    #[error("{} was not written: {source}; another program may be writing to it", file.display())]
    Refused { file: PathBuf, source: BoxedError },
}

/// Error of a read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", file.display())]
pub struct ReadError {
    pub file: PathBuf,
    pub source: BoxedError,
}
