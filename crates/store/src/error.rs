//! What can go wrong, by what the caller can do about it.

use std::error::Error;
use std::io;
use std::path::PathBuf;

/// Error of what is beneath a store: the database, or the system.
pub type BoxedError = Box<dyn Error + Send + Sync>;

/// Why a store cannot be opened. The files are left as they are.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another agent has it open.
    #[error("{} is in use by {}; stop that agent, or choose another state directory", dir.display(), who(*pid))]
    InUse {
        dir: PathBuf,
        /// The process that has it open, where it can be told.
        pid: Option<u32>,
    },
    /// A newer gpupool wrote it.
    #[error(
        "{} has schema {found} and this gpupool knows up to {known}; it is left untouched: start the newer gpupool again, \
         or choose another state directory", file.display()
    )]
    NewerSchema { file: PathBuf, found: u32, known: u32 },
    /// The database is damaged.
    #[error("{} is damaged ({what}); it is left untouched: bring back a copy, or move it away to start empty", file.display())]
    Corrupt { file: PathBuf, what: String },
    /// The database is another program's.
    #[error("{} is a database of another program (application id {found:#010x}); it is left untouched: choose another state \
         directory", file.display())]
    NotOurs { file: PathBuf, found: u32 },
    /// A file or directory does not let itself be used.
    #[error("cannot {doing} {}: {source}; the state directory must be on a local disk and writable for this user", path.display())]
    File { path: PathBuf, doing: &'static str, source: io::Error },
    /// The file system cannot hold a write-ahead log.
    #[error("{} cannot have a write-ahead log there: the state directory must be on a local disk", file.display())]
    NoLog { file: PathBuf },
    /// The database does not let itself be used.
    #[error("cannot use {}: {source}", file.display())]
    Database { file: PathBuf, source: BoxedError },
}

fn who(pid: Option<u32>) -> String {
    pid.map_or("another process".into(), |pid| format!("process {pid}"))
}

/// Why something was not kept. Nothing of it was.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// No space is left.
    #[error("{} was not written, the disk is full: free some space ({source})", file.display())]
    Full { file: PathBuf, source: BoxedError },
    /// The file or its file system cannot be written to.
    #[error("{} was not written, it is read-only: check the mount and the file's permissions ({source})", file.display())]
    ReadOnly { file: PathBuf, source: BoxedError },
    /// The disk failed.
    #[error("{} was not written, the disk reports an error: look at the kernel's log ({source})", file.display())]
    Io { file: PathBuf, source: BoxedError },
    /// The database is damaged.
    #[error("{} was not written, it is damaged: stop the agent and bring back a copy ({source})", file.display())]
    Corrupt { file: PathBuf, source: BoxedError },
    /// The database refused, for another reason.
    #[error("{} was not written: {source}; another program may be writing to it", file.display())]
    Refused { file: PathBuf, source: BoxedError },
}

/// Why something could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", file.display())]
pub struct ReadError {
    pub file: PathBuf,
    pub source: BoxedError,
}
