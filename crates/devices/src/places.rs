//! Where on a machine things are looked for; tests and captured trees point them elsewhere.

use std::path::PathBuf;

/// Roots of kernel trees, and the names or paths of libraries and tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
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

impl Default for Places {
    fn default() -> Self {
        Self::from_env(|_| None)
    }
}

impl Places {
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
