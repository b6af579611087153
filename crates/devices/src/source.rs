//! Sources of devices, and their errors.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::source_reading::SourceReading;

/// A library, tool, kernel tree or simulation that devices are read from.
///
/// A source may block forever in a driver, so it is read on its own thread (see `probe`). It caches facts that do not
/// change between readings, and searches for devices again when their number changes or a device is lost.
pub trait DeviceSource: Send {
    /// Returns the kind of the source.
    fn kind(&self) -> SourceKind;

    /// Reads every present device. An empty list is a valid result.
    fn read(&mut self) -> Result<SourceReading, SourceError>;
}

/// Kind of a source.
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
    /// All kinds, best first for each vendor.
    pub const ALL: [Self; 6] =
        [Self::Nvml, Self::NvidiaSmi, Self::AmdSysfs, Self::AmdSmi, Self::RocmSmi, Self::Simulated];

    /// Returns the name, as typed in `GPUPOOL_BACKEND`.
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

/// Reason why a source returned no devices, by possible remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The library, tool or tree is missing on this machine. Another source may work.
    #[error("{what} not found: {why}")]
    NotPresent {
        /// Library, tool or tree.
        what: Cow<'static, str>,
        why: String,
    },
    /// The source exists, but its driver is not loaded.
    #[error("the driver is not loaded or does not answer: {0}")]
    DriverNotLoaded(String),
    /// The library and the loaded driver have different versions. Running jobs still work; a reboot or a reload of the
    /// driver fixes the mismatch.
    #[error("the driver and its library have different versions: {0}")]
    VersionMismatch(String),
    /// The caller lacks permission.
    #[error("permission denied: {0}")]
    NoPermission(String),
    /// The source did not answer before its deadline; it gets no further request until it does.
    #[error("driver unresponsive: {what} has not answered for {} s", after.as_secs())]
    Unresponsive { what: Cow<'static, str>, after: Duration },
    /// The driver returned an error.
    #[error("the driver failed: {0}")]
    Driver(String),
    /// The output cannot be parsed.
    #[error("cannot parse {format} output: {problem}")]
    Malformed {
        /// Expected format.
        format: Cow<'static, str>,
        problem: String,
    },
}

impl SourceError {
    /// Returns a stable name for programs.
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

    /// Creates the error for malformed output in `format`; `problem` describes the fault.
    pub(crate) fn malformed(format: &'static str, problem: impl Into<String>) -> Self {
        Self::Malformed { format: Cow::Borrowed(format), problem: problem.into() }
    }

    /// Returns the reason why the devices of the source get no new work, if the error means that their driver is away:
    /// running work continues, but new work would hang or fail. Other errors do not concern the devices.
    pub(crate) fn driver_away(&self) -> Option<Arc<str>> {
        match self {
            Self::Unresponsive { .. } => Some("driver unresponsive".into()),
            Self::DriverNotLoaded(_) | Self::VersionMismatch(_) => Some(self.to_string().into()),
            Self::NotPresent { .. } | Self::NoPermission(_) | Self::Driver(_) | Self::Malformed { .. } => None,
        }
    }
}

/// State of a source after its last reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceState {
    /// No reply so far.
    Pending,
    /// The last reply was a reading.
    Ready,
    /// The last reply was an error or is overdue.
    Failed(SourceError),
}

/// A source and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    pub kind: SourceKind,
    /// State after the last reply.
    pub state: SourceState,
}

impl SourceStatus {
    /// Returns the problem of the source, for people. A source that is missing on this machine is no problem.
    pub fn problem(&self) -> Option<String> {
        match &self.state {
            SourceState::Pending => Some(format!("{}: has not answered yet", self.kind)),
            SourceState::Ready | SourceState::Failed(SourceError::NotPresent { .. }) => None,
            SourceState::Failed(error) => Some(format!("{}: {error}", self.kind)),
        }
    }

    /// Whether devices can be read from the source.
    pub fn is_ready(&self) -> bool {
        self.state == SourceState::Ready
    }
}
