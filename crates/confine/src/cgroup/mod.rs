//! Control groups: which kind this machine has, and one group per lease with limits the kernel enforces.
//!
//! Three worlds exist: v2 alone; hybrid, where v1 carries memory and pids and v2 only knows who is in a group and how to
//! kill it; and v1 alone. [`CgroupManager::detect`] finds out and says so; [`CgroupManager::create`] makes a group below a subtree
//! that is ours alone (`gpupool/NAME`), and a [`ProcessCgroup`] can only be had from there: what is killed is always below it.
//! No threads; a group lives in the kernel until [`ProcessCgroup::remove`], also across a restart of this program.

mod detect;
mod group;
mod limit;

use std::io;
use std::path::{Path, PathBuf};

pub use detect::{CgroupLayout, CgroupManager, CgroupVersion};
pub(crate) use group::Leftovers;
pub use group::ProcessCgroup;
pub(crate) use limit::NO_CONTROLLER;
pub use limit::{CgroupLimits, CgroupMeter, DeviceMemoryLimit, MemoryCgroup};

use crate::process::ProcessId;

/// Why a group could not be made, changed or killed, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No groups here at all: watch the process tree instead.
    #[error("no control group can be made: {why}")]
    NotPossible {
        /// What is missing, and how to get it.
        why: String,
    },
    /// Groups can be made, but not with this limit: leave it out and watch the process tree instead.
    #[error("{limit} cannot be limited by a control group here: {why}")]
    NotEnforceable {
        limit: &'static str,
        /// Why the kernel will not do it.
        why: String,
    },
    /// The name cannot be that of a group.
    #[error("group name {name:?}: allowed are 1 to {} letters, digits, '-' and '_'", crate::limits::GROUP_NAME_LENGTH)]
    InvalidName { name: String },
    /// There is such a group already: open it.
    #[error("the group {} exists already", path.display())]
    Exists { path: PathBuf },
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
    StillAlive { path: PathBuf, left: Vec<u32> },
    /// The system refused.
    #[error("{action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Adds what was tried and where to a system error.
pub(super) trait At<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CgroupError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, CgroupError> {
        self.map_err(|source| CgroupError::Io { action, path: path.to_owned(), source: source.into() })
    }
}
