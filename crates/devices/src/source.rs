//! What a source of devices is, and how it fails.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::source_reading::SourceReading;

/// Somewhere devices can be read from: a library, a tool, a kernel tree, a simulation.
///
/// A source may block for ever in a driver, so it is read on a thread of its own (see `probe`). It keeps what does not
/// change between readings and looks again for devices whenever their number changed or one was lost.
pub trait DeviceSource: Send {
    /// Which source it is.
    fn kind(&self) -> SourceKind;

    /// Every device there is now, with what it reports now. No device at all is a valid answer.
    fn read(&mut self) -> Result<SourceReading, SourceError>;
}

/// The sources there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SourceKind {
    /// NVIDIA's management library.
    Nvml,
    /// NVIDIA's command line tool.
    NvidiaSmi,
    /// The kernel's files about AMD devices.
    AmdSysfs,
    /// AMD's newer command line tool.
    AmdSmi,
    /// AMD's older command line tool.
    RocmSmi,
    /// Devices that do not exist.
    Simulated,
}

impl SourceKind {
    /// All of them, best first for each vendor.
    pub const ALL: [Self; 6] =
        [Self::Nvml, Self::NvidiaSmi, Self::AmdSysfs, Self::AmdSmi, Self::RocmSmi, Self::Simulated];

    /// Its name, as typed in `GPUPOOL_BACKEND`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvml => "nvml",
            Self::NvidiaSmi => "nvidia-smi",
            Self::AmdSysfs => "amd-sysfs",
            Self::AmdSmi => "amd-smi",
            Self::RocmSmi => "rocm-smi",
            Self::Simulated => "simulated",
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a source gave no devices, by what can be done about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Its library, tool or tree is not on this machine: another source may do.
    #[error("{what} is not here: {why}")]
    NotPresent {
        /// What was looked for.
        what: Cow<'static, str>,
        why: String,
    },
    /// It is here and its driver is not loaded.
    #[error("the driver is not loaded or does not answer: {0}")]
    DriverNotLoaded(String),
    /// The library and the loaded driver are of different versions; running jobs still work, a reboot or a reload of
    /// the driver mends it.
    #[error("the driver and its library are of different versions: {0}")]
    VersionMismatch(String),
    /// The caller may not look.
    #[error("permission denied: {0}")]
    NoPermission(String),
    /// It was asked and has not answered in time; it is left alone.
    #[error("driver unresponsive: {what} has not answered for {} s", after.as_secs())]
    Unresponsive { what: Cow<'static, str>, after: Duration },
    /// The driver answered with an error.
    #[error("the driver failed: {0}")]
    Driver(String),
    /// What it gave cannot be understood.
    #[error("{format} output cannot be read: {problem}")]
    Malformed {
        /// Which format it should have been.
        format: Cow<'static, str>,
        problem: String,
    },
}

impl SourceError {
    /// A name for programs that never changes.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotPresent { .. } => "not_here",
            Self::DriverNotLoaded(_) => "driver_not_loaded",
            Self::VersionMismatch(_) => "driver_library_mismatch",
            Self::NoPermission(_) => "no_permission",
            Self::Unresponsive { .. } => "driver_unresponsive",
            Self::Driver(_) => "driver_failed",
            Self::Malformed { .. } => "malformed",
        }
    }

    /// Output in the format `format` that is wrong in the way `problem` says.
    pub(crate) fn malformed(format: &'static str, problem: impl Into<String>) -> Self {
        Self::Malformed { format: Cow::Borrowed(format), problem: problem.into() }
    }

    /// Returns why no new work can be trusted to the devices of the source, where the error means that their driver is
    /// away: what runs goes on, what starts would hang or fail. Any other failure says nothing about the devices.
    pub(crate) fn driver_away(&self) -> Option<Arc<str>> {
        match self {
            Self::Unresponsive { .. } => Some("driver unresponsive".into()),
            Self::DriverNotLoaded(_) | Self::VersionMismatch(_) => Some(self.to_string().into()),
            Self::NotPresent { .. } | Self::NoPermission(_) | Self::Driver(_) | Self::Malformed { .. } => None,
        }
    }
}

/// State of a source, by its last answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceState {
    /// It has not answered yet, not even once.
    Pending,
    /// Its last answer was a reading.
    Ready,
    /// Its last answer was an error, or is overdue.
    Failed(SourceError),
}

/// A source and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// Which source.
    pub kind: SourceKind,
    /// Its state.
    pub state: SourceState,
}

impl SourceStatus {
    /// Returns what is wrong with it, for people. That it is not on this machine is not wrong.
    pub fn problem(&self) -> Option<String> {
        match &self.state {
            SourceState::Pending => Some(format!("{}: has not answered yet", self.kind)),
            SourceState::Ready | SourceState::Failed(SourceError::NotPresent { .. }) => None,
            SourceState::Failed(error) => Some(format!("{}: {error}", self.kind)),
        }
    }

    /// Returns whether devices can be read from it.
    pub fn is_ready(&self) -> bool {
        self.state == SourceState::Ready
    }
}
