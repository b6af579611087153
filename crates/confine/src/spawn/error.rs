//! Why a job could not be started or followed.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use crate::cgroup::GroupError;

/// What went wrong, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is no such program: a shell would exit with 127.
    #[error("{}: command not found", program.display())]
    NotFound {
        /// What was asked for.
        program: OsString,
    },
    /// The program is there but cannot be run: a shell would exit with 126.
    #[error("{} cannot be run: {source}", program.display())]
    NotExecutable {
        /// What was asked for.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
    /// The working directory cannot be entered.
    #[error("working directory {}: {source}", path.display())]
    Directory {
        /// What was asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The process beside the job did not come up or was killed.
    #[error("the keeper of the job {why}")]
    Keeper {
        /// What it did, or did not.
        why: &'static str,
    },
    /// The process could not be put into its group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The system refused.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl SpawnError {
    /// The exit code a shell would give.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NotFound { .. } => 127,
            _ => 126,
        }
    }

    pub(super) fn of_exec(program: OsString, errno: i32) -> Self {
        match errno {
            libc::ENOENT | libc::ENOTDIR => Self::NotFound { program },
            _ => Self::NotExecutable { program, source: io::Error::from_raw_os_error(errno) },
        }
    }
}

/// Adds what was tried to a system error.
pub(super) trait Trying<T> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, action: &'static str) -> Result<T, SpawnError> {
        self.map_err(|source| SpawnError::Io { action, source: source.into() })
    }
}
