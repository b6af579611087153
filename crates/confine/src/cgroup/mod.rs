//! Control groups: detection of the machine's layout, and one cgroup per lease with limits that the kernel enforces.
//!
//! Three layouts exist: v2 alone; hybrid, where v1 has the memory and pids controllers and v2 only tracks and kills
//! processes; and v1 alone. [`CgroupManager::detect`] determines the layout. [`CgroupManager::create`] creates a cgroup
//! below our own subtree (`gpupool/NAME`), and a [`ProcessCgroup`] exists only there, so a kill never reaches processes
//! outside of it. No threads; a cgroup lives in the kernel until [`ProcessCgroup::remove`], also across a restart of
//! this program.

mod detect;
mod group;
mod limit;

use std::io;
use std::path::{Path, PathBuf};

pub use detect::{CgroupLayout, CgroupManager, CgroupVersion};
pub(crate) use group::OrphanedCgroups;
pub use group::ProcessCgroup;
pub(crate) use limit::NO_DMEM_CONTROLLER;
pub use limit::{CgroupLimits, CgroupMeter, DeviceMemoryLimit, MemoryCgroup};

use crate::process::ProcessId;

/// Error of creating, changing or killing a cgroup, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup can be created: poll the process tree instead.
    #[error("cannot create a control group: {why}")]
    NotPossible {
        /// The missing requirement, and how to meet it.
        why: String,
    },
    /// Cgroups can be created, but not with this limit: omit it and poll the process tree instead.
    #[error("a control group cannot limit {limit} here: {why}")]
    NotEnforceable {
        limit: &'static str,
        /// Reason why the kernel cannot enforce it.
        why: String,
    },
    /// The name is invalid for a cgroup.
    #[error(
        "invalid control group name {name:?}: use 1 to {} letters, digits, '-' and '_'",
        crate::limits::MAX_CGROUP_NAME_LENGTH
    )]
    InvalidName { name: String },
    /// The cgroup exists already: open it.
    #[error("control group {} already exists", path.display())]
    Exists { path: PathBuf },
    /// The process exited before it could be moved.
    #[error("process {0} has exited")]
    ProcessGone(ProcessId),
    /// The operation would affect foreign processes.
    #[error("refused to change {}: {why}", path.display())]
    Refused {
        /// The cgroup or process directory of the operation.
        path: PathBuf,
        /// The affected processes.
        why: String,
    },
    /// Processes did not exit in time (stuck inside the kernel).
    #[error("control group {} still holds processes {left:?}", path.display())]
    StillAlive { path: PathBuf, left: Vec<u32> },
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Adds the failed action and its path to a system error.
pub(super) trait CgroupIoContext<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, CgroupError>;
}

impl<T, E: Into<io::Error>> CgroupIoContext<T> for Result<T, E> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, CgroupError> {
        self.map_err(|source| CgroupError::Io { action, path: path.to_owned(), source: source.into() })
    }
}
