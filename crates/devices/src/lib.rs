//! GPUs of a node: which exist, what they report and which processes use them, from every available source.
//!
//! Each read of a [`DeviceSource`] returns a [`SourceReading`]. Sources differ in the fields they support, but all
//! report a field as a value, as unsupported or as failed ([`Reported`]). One bad device, field or file never hides
//! another.
//!
//! - Vocabulary: a [`DetectedDevice`] is a device as one source read it once; a [`SourceReading`] holds everything that
//!   a source reported at one time.
//! - Sources: NVIDIA's library and tool, AMD's kernel files and tools, and [`simulated`] devices. [`SourceChoice`]
//!   opens the sources of a machine, [`SourcePaths`] holds their locations, and [`capture`] reads saved output from a
//!   file, a folder or an archive.
//! - Reading: a [`SourceProbe`] shields its caller from a hung driver, and a [`HostProcessResolver`] finds the
//!   processes behind the pids that a driver reports.
//! - Tracking: a [`DeviceTracker`] recognises devices over many readings. A [`TrackedDevice`] has a permanent number,
//!   facts, a judged health and the last reading.
//! - Output: [`DevicesReport`] for programs, [`JobEnvironment`] for jobs, and [`doctor`] for troubleshooting.

#![warn(unreachable_pub)]

mod address;
mod amd_names;
mod amd_sysfs;
mod amd_tools;
mod amounts;
pub mod capture;
mod detect;
mod detected_device;
pub mod doctor;
mod environment;
mod host_process;
mod kernel_file;
mod kernel_log;
pub mod limits;
mod nvidia_smi;
mod nvml;
mod pci_bus;
mod probe;
mod report;
mod reported;
pub mod simulated;
mod source;
mod source_reading;
mod tool;
mod tracker;

pub use address::parse_pci_address;
pub use amd_sysfs::AmdSysfsSource;
pub use detect::{SourceChoice, SourcePaths, UnknownBackend};
pub use detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
pub use environment::JobEnvironment;
pub use host_process::{HostProcessLookup, HostProcessResolver, ProcessFacts};
pub use nvml::NvmlSource;
pub use probe::{ProbeReply, SourceProbe};
pub use report::{DeviceReport, DevicesReport, ErrorReport, LinkReport, ProcessReport};
pub use reported::Reported;
pub use source::{DeviceSource, SourceError, SourceKind, SourceState, SourceStatus};
pub use source_reading::{DetectedLink, SourceReading};
pub use tracker::{DeviceTracker, GpuIdRegistry, TrackedChange, TrackedDevice, fresh_until};
