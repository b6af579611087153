//! What can go wrong with groups, by what the caller can do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::process::ProcessId;

/// Why a group could not be made, changed or killed.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// No groups here at all: watch the process tree instead.
    #[error("no control group can be made: {why}")]
    NotPossible {
        /// What is missing, and how to get it.
        why: String,
    },
    /// Groups can be made, but not with this limit: leave it out and watch the process tree instead.
    #[error("{limit} cannot be limited by a control group here: {why}")]
    NotEnforceable {
        /// What was to be limited.
        limit: &'static str,
        /// Why the kernel will not do it.
        why: String,
    },
    /// The name cannot be that of a group.
    #[error("group name {name:?}: allowed are 1 to {} letters, digits, '-' and '_'", crate::limits::GROUP_NAME_LENGTH)]
    InvalidName {
        /// The name given.
        name: String,
    },
    /// There is such a group already: open it.
    #[error("the group {} exists already", path.display())]
    Exists {
        /// Where it is.
        path: PathBuf,
    },
    /// The process ended before it could be moved.
    #[error("process {0} has ended")]
    ProcessGone(ProcessId),
    /// Doing it would hit somebody else.
    #[error("refused on {}: {why}", path.display())]
    Refused {
        /// The group or process directory it was asked for.
        path: PathBuf,
        /// Who would be hit.
        why: String,
    },
    /// Processes did not die in time (stuck inside the kernel).
    #[error("group {} still holds processes {left:?}", path.display())]
    StillAlive {
        /// The group.
        path: PathBuf,
        /// Who is left.
        left: Vec<u32>,
    },
    /// The system refused.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Adds what was tried and where to a system error.
pub(super) trait At<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, GroupError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, GroupError> {
        self.map_err(|source| GroupError::Io { action, path: path.to_owned(), source: source.into() })
    }
}
