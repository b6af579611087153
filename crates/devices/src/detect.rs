//! Selection of sources: all that work on the machine, or the configured one.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::amd_sysfs::AmdSysfsSource;
use crate::amd_tools::{AmdSmiSource, RocmSmiSource};
use crate::nvidia_smi::NvidiaSmi;
use crate::nvml::NvmlSource;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::tool::VendorTool;

/// Value of `GPUPOOL_BACKEND`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SourceChoice {
    /// All vendors, each by its best available source.
    #[default]
    Auto,
    /// NVIDIA devices only, by the best available source.
    Nvidia,
    /// AMD devices only, by the best available source.
    Amd,
    Only(SourceKind),
}

/// An unknown value of `GPUPOOL_BACKEND`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("GPUPOOL_BACKEND is {0:?}; allowed are auto, nvidia, amd, nvml, nvidia-smi, amd-sysfs, amd-smi, rocm-smi")]
pub struct UnknownBackend(String);

impl FromStr for SourceChoice {
    type Err = UnknownBackend;

    fn from_str(text: &str) -> Result<Self, UnknownBackend> {
        let name = text.trim().to_ascii_lowercase().replace('_', "-");
        match &*name {
            "" | "auto" => Ok(Self::Auto),
            "nvidia" => Ok(Self::Nvidia),
            "amd" => Ok(Self::Amd),
            _ => SourceKind::ALL
                .into_iter()
                .filter(|kind| *kind != SourceKind::Simulated)
                .find(|kind| kind.name() == name)
                .map(Self::Only)
                .ok_or_else(|| UnknownBackend(text.to_owned())),
        }
    }
}

impl SourceChoice {
    /// Opens the chosen sources, one for each vendor; each run of a tool gets `deadline`.
    pub fn open_sources(self, paths: &SourcePaths, deadline: Duration) -> Vec<Box<dyn DeviceSource>> {
        let open = |kind| open_source(kind, paths, deadline);
        let best = |kinds: &[SourceKind]| -> Box<dyn DeviceSource> {
            Box::new(FallbackSource::new(kinds.iter().filter_map(|&kind| open(kind)).collect()))
        };
        let nvidia = || best(&[SourceKind::Nvml, SourceKind::NvidiaSmi]);
        let amd = || best(&[SourceKind::AmdSysfs, SourceKind::AmdSmi, SourceKind::RocmSmi]);
        match self {
            Self::Auto => vec![nvidia(), amd()],
            Self::Nvidia => vec![nvidia()],
            Self::Amd => vec![amd()],
            Self::Only(kind) => open(kind).into_iter().collect(),
        }
    }
}

fn open_source(kind: SourceKind, paths: &SourcePaths, deadline: Duration) -> Option<Box<dyn DeviceSource>> {
    let tool = |path| VendorTool::new(path, deadline);
    Some(match kind {
        SourceKind::Nvml => Box::new(NvmlSource::new(paths)),
        SourceKind::NvidiaSmi => Box::new(NvidiaSmi::new(tool(&paths.nvidia_smi))),
        SourceKind::AmdSysfs => Box::new(AmdSysfsSource::new(paths)),
        SourceKind::AmdSmi => Box::new(AmdSmiSource::new(tool(&paths.amd_smi))),
        SourceKind::RocmSmi => Box::new(RocmSmiSource::new(tool(&paths.rocm_smi))),
        SourceKind::Simulated => return None,
    })
}

/// Time before a missing source is tried again.
const RETRY_MISSING_AFTER: Duration = Duration::from_secs(30);

/// Several sources for the same devices, best first; the first available source is read.
///
/// An available source that fails is not skipped: the others would query the same driver and report less.
struct FallbackSource {
    sources: Vec<FallbackCandidate>,
    last_read: usize,
}

struct FallbackCandidate {
    source: Box<dyn DeviceSource>,
    missing: Option<(Instant, SourceError)>,
}

impl FallbackSource {
    fn new(sources: Vec<Box<dyn DeviceSource>>) -> Self {
        let sources = sources.into_iter().map(|source| FallbackCandidate { source, missing: None }).collect();
        Self { sources, last_read: 0 }
    }
}

impl FallbackCandidate {
    fn read(&mut self) -> Result<SourceReading, SourceError> {
        if let Some((since, error)) = &self.missing
            && since.elapsed() < RETRY_MISSING_AFTER
        {
            return Err(error.clone());
        }
        let result = self.source.read();
        self.missing = match &result {
            Err(error @ SourceError::NotPresent { .. }) => Some((Instant::now(), error.clone())),
            _ => None,
        };
        result
    }
}

impl DeviceSource for FallbackSource {
    /// Returns the kind of the source that was read last.
    fn kind(&self) -> SourceKind {
        self.sources.get(self.last_read).map_or(SourceKind::Nvml, |candidate| candidate.source.kind())
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut first_missing = None;
        for (position, candidate) in self.sources.iter_mut().enumerate() {
            match candidate.read() {
                Err(missing @ SourceError::NotPresent { .. }) => {
                    first_missing.get_or_insert(missing);
                }
                result => {
                    self.last_read = position;
                    return result;
                }
            }
        }
        let no_source = SourceError::NotPresent { what: "device source".into(), why: "none is configured".into() };
        Err(first_missing.unwrap_or(no_source))
    }
}

// Locations on a machine; tests and captured trees override them.

/// Roots of kernel trees, and names or paths of libraries and tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourcePaths {
    pub sys: PathBuf,
    pub proc: PathBuf,
    pub dev: PathBuf,
    pub etc: PathBuf,
    /// NVIDIA's management library.
    pub nvml: PathBuf,
    /// NVIDIA's command line tool.
    pub nvidia_smi: PathBuf,
    /// AMD's newer command line tool.
    pub amd_smi: PathBuf,
    /// AMD's older command line tool.
    pub rocm_smi: PathBuf,
}

impl Default for SourcePaths {
    fn default() -> Self {
        Self::from_env(|_| None)
    }
}

impl SourcePaths {
    /// Returns the default locations, overridden by environment variables that `variable` looks up.
    pub fn from_env(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let path_or = |name: &str, default: &str| variable(name).unwrap_or_else(|| PathBuf::from(default));
        Self {
            sys: path_or("GPUPOOL_SYS", "/sys"),
            proc: path_or("GPUPOOL_PROC", "/proc"),
            dev: path_or("GPUPOOL_DEV", "/dev"),
            etc: path_or("GPUPOOL_ETC", "/etc"),
            nvml: path_or("GPUPOOL_NVML", "libnvidia-ml.so.1"),
            nvidia_smi: path_or("GPUPOOL_NVIDIA_SMI", "nvidia-smi"),
            amd_smi: path_or("GPUPOOL_AMD_SMI", "amd-smi"),
            rocm_smi: path_or("GPUPOOL_ROCM_SMI", "rocm-smi"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ScriptedSource(SourceKind, Vec<Result<SourceReading, SourceError>>);

    impl DeviceSource for ScriptedSource {
        fn kind(&self) -> SourceKind {
            self.0
        }

        fn read(&mut self) -> Result<SourceReading, SourceError> {
            self.1.pop().unwrap_or_else(|| panic!("{} was asked too often", self.0))
        }
    }

    fn missing() -> Result<SourceReading, SourceError> {
        Err(SourceError::NotPresent { what: "it".into(), why: "gone".into() })
    }

    fn first(
        nvml: Vec<Result<SourceReading, SourceError>>,
        smi: Vec<Result<SourceReading, SourceError>>,
    ) -> FallbackSource {
        FallbackSource::new(vec![
            Box::new(ScriptedSource(SourceKind::Nvml, nvml)),
            Box::new(ScriptedSource(SourceKind::NvidiaSmi, smi)),
        ])
    }

    #[test]
    fn a_missing_source_is_replaced_by_the_next_and_not_retried_at_once() {
        let ok = || Ok(SourceReading::default());
        let mut source = first(vec![missing()], vec![ok(), ok()]);
        assert!(source.read().is_ok() && source.read().is_ok());
        assert_eq!(source.kind(), SourceKind::NvidiaSmi);
    }

    #[test]
    fn a_failing_source_is_not_replaced_by_the_next() {
        let mut source = first(vec![Err(SourceError::VersionMismatch("x".into()))], vec![]);
        assert_eq!(source.read().unwrap_err().code(), "driver_library_mismatch");
    }

    #[test]
    fn without_any_source_the_error_of_the_best_is_returned() {
        assert_eq!(first(vec![missing()], vec![missing()]).read().unwrap_err().code(), "not_here");
    }

    #[test]
    fn source_names_are_parsed_and_an_unknown_one_lists_the_allowed() {
        assert_eq!("nvidia_smi".parse(), Ok(SourceChoice::Only(SourceKind::NvidiaSmi)));
        assert_eq!(" AUTO ".parse(), Ok(SourceChoice::Auto));
        let error = "cuda".parse::<SourceChoice>().unwrap_err().to_string();
        for kind in SourceKind::ALL.into_iter().filter(|kind| *kind != SourceKind::Simulated) {
            assert!(error.contains(kind.name()), "{error}: {kind} is not listed");
        }
    }
}
