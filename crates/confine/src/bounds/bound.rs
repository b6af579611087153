//! What a job may use, and what it uses.

use std::time::Duration;

use super::DeviceMemory;

/// What a job may use; `None`: as much as it likes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of host memory. Memory its processes share is counted once; swap is not given on top.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time, as the kernel counts them. The kernel refuses to make more; where it cannot,
    /// a job that made more is over its bound.
    pub processes: Option<u64>,
    /// Processor time of all its processes together, those that have ended included.
    pub cpu_time: Option<Duration>,
    /// Memory of devices, which only the kernel can keep.
    pub device_memory: Vec<DeviceMemory>,
}

/// What a job uses at this moment; `None`: cannot be told, or the job has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of host memory. Where a control group counts it, with files that were read and stay in memory.
    pub host_memory: Option<u64>,
    /// Processor time since it started, or since it was last counted anew.
    pub cpu_time: Option<Duration>,
    /// Processes and threads.
    pub processes: Option<u64>,
}
