//! The log of finished tasks, in the columns of GNU parallel, from which an interrupted run goes on.
//!
//! [`JobLog`] appends a line when a task is over, at once, so that killing the run loses none; a thread of its own brings
//! them to the disk without taking more than a small part of the time, and ends with the log. [`Finished`] is what an
//! earlier run's log says: which tasks are not to be repeated, in two bytes for each.

mod file;
mod finished;
mod line;
mod sync;

use std::io;
use std::path::{Path, PathBuf};

pub use file::{Again, JobLog};
pub use finished::Finished;
pub use line::Entry;

/// Why a job log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JobLogError {
    /// The file cannot be read or written.
    #[error("the job log {} cannot be {doing}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Read, written and such.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// Another run writes to it.
    #[error("the job log {} is in use by another run: wait for its end, or name another file", .0.display())]
    InUse(PathBuf),
    /// The file is something else, and was not touched.
    #[error("{} is not a job log (its first line is not `Seq Host Starttime …`): name another file", .0.display())]
    NotAJobLog(PathBuf),
    /// A line cannot be understood.
    #[error("line {line} of the job log {} is no entry: {what}; correct or remove it to resume", path.display())]
    BadLine {
        /// Which log.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The log tells of another command with this number.
    #[error(
        "the job log {} is of another run: its task {seq} is `{logged}`, and that of this run is `{asked}`; resume with the \
         same command and arguments, or name another file",
        path.display()
    )]
    AnotherRun {
        /// Which log.
        path: PathBuf,
        /// Which task, from 1.
        seq: u64,
        /// What the log says.
        logged: String,
        /// What this run would do.
        asked: String,
    },
}

/// Names the file in an error of the system.
fn trouble(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> JobLogError {
    let path = path.to_owned();
    move |source| JobLogError::File { path, doing, source }
}
