//! Which bound was passed.

use std::fmt;
use std::time::Duration;

/// A bound that was passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Excess {
    /// Bytes of host memory.
    HostMemory {
        /// What it used; `None` if the kernel stopped it at the bound.
        used: Option<u64>,
        /// What it may use.
        allowed: u64,
    },
    /// Processes and threads at one time.
    Processes {
        /// How many it had.
        used: u64,
        /// How many it may have.
        allowed: u64,
    },
    /// Processor time.
    CpuTime {
        /// What it used.
        used: Duration,
        /// What it may use.
        allowed: Duration,
    },
    /// Bytes of device memory, where somebody who can see them told.
    DeviceMemory {
        /// What it used.
        used: u64,
        /// What it may use.
        allowed: u64,
    },
}

/// A sentence: "it used 612 MiB of host memory; 512 MiB allowed".
impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostMemory { used: Some(used), allowed } => {
                write!(f, "it used {} of host memory; {} allowed", Bytes(*used), Bytes(*allowed))
            }
            Self::HostMemory { used: None, allowed } => {
                write!(f, "it used more than {} of host memory", Bytes(*allowed))
            }
            Self::Processes { used, allowed } => {
                write!(f, "it had {used} processes and threads; {allowed} allowed")
            }
            Self::DeviceMemory { used, allowed } => {
                write!(f, "it used {} of GPU memory; {} allowed", Bytes(*used), Bytes(*allowed))
            }
            Self::CpuTime { used, allowed } => {
                let (used, allowed) = (used.as_secs_f64(), allowed.as_secs_f64());
                write!(f, "it used {used:.2} s of CPU time; {allowed:.2} s allowed")
            }
        }
    }
}

/// Bytes in MiB, or exactly where they are few or no whole number of them.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 20 {
            0 => write!(f, "{} bytes", self.0),
            mib => write!(f, "{mib} MiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_told_in_a_sentence() {
        let memory = |used| Excess::HostMemory { used, allowed: 512 << 20 };
        assert_eq!(memory(Some(612 << 20)).to_string(), "it used 612 MiB of host memory; 512 MiB allowed");
        assert_eq!(memory(None).to_string(), "it used more than 512 MiB of host memory");
        let small = Excess::HostMemory { used: Some(5000), allowed: 4096 };
        assert_eq!(small.to_string(), "it used 5000 bytes of host memory; 4096 bytes allowed");
        let processes = Excess::Processes { used: 30, allowed: 20 };
        assert_eq!(processes.to_string(), "it had 30 processes and threads; 20 allowed");
        let time = Excess::CpuTime { used: Duration::from_millis(1260), allowed: Duration::from_secs(1) };
        assert_eq!(time.to_string(), "it used 1.26 s of CPU time; 1.00 s allowed");
    }
}
