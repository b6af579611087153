//! Which sources a machine has: all that answer, or the one that was asked for.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::amd_sysfs::AmdSysfsSource;
use crate::amd_tools::{AmdSmi, RocmSmi};
use crate::nvidia_smi::NvidiaSmi;
use crate::nvml::NvmlSource;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::tool::VendorTool;

/// What a person chose in `GPUPOOL_BACKEND`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SourceChoice {
    /// Every vendor, each by the best source that is here.
    #[default]
    Auto,
    /// NVIDIA devices only, by the best source that is here.
    Nvidia,
    /// AMD devices only, by the best source that is here.
    Amd,
    /// This source and no other.
    Only(SourceKind),
}

/// A choice nobody offers.
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
    /// The sources it means, one for each vendor, looking in these places; a tool gets `deadline` for each run.
    pub fn open_sources(self, places: &SourcePaths, deadline: Duration) -> Vec<Box<dyn DeviceSource>> {
        let open = |kind| open(kind, places, deadline);
        let best = |kinds: &[SourceKind]| -> Box<dyn DeviceSource> {
            Box::new(FirstThatIsHere::new(kinds.iter().filter_map(|&kind| open(kind)).collect()))
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

fn open(kind: SourceKind, places: &SourcePaths, deadline: Duration) -> Option<Box<dyn DeviceSource>> {
    let tool = |path| VendorTool::new(path, deadline);
    Some(match kind {
        SourceKind::Nvml => Box::new(NvmlSource::new(places)),
        SourceKind::NvidiaSmi => Box::new(NvidiaSmi::new(tool(&places.nvidia_smi))),
        SourceKind::AmdSysfs => Box::new(AmdSysfsSource::new(places)),
        SourceKind::AmdSmi => Box::new(AmdSmi::new(tool(&places.amd_smi))),
        SourceKind::RocmSmi => Box::new(RocmSmi::new(tool(&places.rocm_smi))),
        SourceKind::Simulated => return None,
    })
}

/// How long a source that is not here is left in peace.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Several sources for the same devices, best first: the first that is here is read.
///
/// A source that is here and fails is not passed over: the others would ask the same driver, and say less.
struct FirstThatIsHere {
    sources: Vec<Candidate>,
    reading: usize,
}

struct Candidate {
    source: Box<dyn DeviceSource>,
    missing: Option<(Instant, SourceError)>,
}

impl FirstThatIsHere {
    fn new(sources: Vec<Box<dyn DeviceSource>>) -> Self {
        let sources = sources.into_iter().map(|source| Candidate { source, missing: None }).collect();
        Self { sources, reading: 0 }
    }
}

impl Candidate {
    fn read(&mut self) -> Result<SourceReading, SourceError> {
        if let Some((since, error)) = &self.missing
            && since.elapsed() < LOOK_AGAIN
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

impl DeviceSource for FirstThatIsHere {
    /// The source that was read last.
    fn kind(&self) -> SourceKind {
        self.sources.get(self.reading).map_or(SourceKind::Nvml, |candidate| candidate.source.kind())
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let mut first_missing = None;
        for (place, candidate) in self.sources.iter_mut().enumerate() {
            match candidate.read() {
                Err(missing @ SourceError::NotPresent { .. }) => {
                    first_missing.get_or_insert(missing);
                }
                answer => {
                    self.reading = place;
                    return answer;
                }
            }
        }
        let nothing = SourceError::NotPresent { what: "a source of devices".into(), why: "none was asked for".into() };
        Err(first_missing.unwrap_or(nothing))
    }
}

// Where on a machine things are looked for; tests and captured trees point them elsewhere.

/// Roots of kernel trees, and the names or paths of libraries and tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourcePaths {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `/etc`.
    pub etc: PathBuf,
    /// NVIDIA's library.
    pub nvml: PathBuf,
    /// NVIDIA's tool.
    pub nvidia_smi: PathBuf,
    /// AMD's newer tool.
    pub amd_smi: PathBuf,
    /// AMD's older tool.
    pub rocm_smi: PathBuf,
}

impl Default for SourcePaths {
    fn default() -> Self {
        Self::from_env(|_| None)
    }
}

impl SourcePaths {
    /// The usual places, or what the environment says instead; `variable` looks one up.
    pub fn from_env(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let place = |name: &str, usual: &str| variable(name).unwrap_or_else(|| PathBuf::from(usual));
        Self {
            sys: place("GPUPOOL_SYS", "/sys"),
            proc: place("GPUPOOL_PROC", "/proc"),
            dev: place("GPUPOOL_DEV", "/dev"),
            etc: place("GPUPOOL_ETC", "/etc"),
            nvml: place("GPUPOOL_NVML", "libnvidia-ml.so.1"),
            nvidia_smi: place("GPUPOOL_NVIDIA_SMI", "nvidia-smi"),
            amd_smi: place("GPUPOOL_AMD_SMI", "amd-smi"),
            rocm_smi: place("GPUPOOL_ROCM_SMI", "rocm-smi"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scripted(SourceKind, Vec<Result<SourceReading, SourceError>>);

    impl DeviceSource for Scripted {
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
    ) -> FirstThatIsHere {
        FirstThatIsHere::new(vec![
            Box::new(Scripted(SourceKind::Nvml, nvml)),
            Box::new(Scripted(SourceKind::NvidiaSmi, smi)),
        ])
    }

    #[test]
    fn the_next_source_is_read_where_the_best_is_not_here_and_the_best_is_left_in_peace() {
        let ok = || Ok(SourceReading::default());
        let mut source = first(vec![missing()], vec![ok(), ok()]);
        assert!(source.read().is_ok() && source.read().is_ok());
        assert_eq!(source.kind(), SourceKind::NvidiaSmi);
    }

    #[test]
    fn a_source_that_is_here_and_fails_is_not_passed_over() {
        let mut source = first(vec![Err(SourceError::VersionMismatch("x".into()))], vec![]);
        assert_eq!(source.read().unwrap_err().code(), "driver_library_mismatch");
    }

    #[test]
    fn where_nothing_is_here_the_best_says_so() {
        assert_eq!(first(vec![missing()], vec![missing()]).read().unwrap_err().code(), "not_here");
    }

    #[test]
    fn a_choice_is_a_name_and_a_wrong_one_says_what_is_allowed() {
        assert_eq!("nvidia_smi".parse(), Ok(SourceChoice::Only(SourceKind::NvidiaSmi)));
        assert_eq!(" AUTO ".parse(), Ok(SourceChoice::Auto));
        assert!("cuda".parse::<SourceChoice>().unwrap_err().to_string().contains("rocm-smi"));
    }
}
