//! The truth about the GPUs of a node: which there are, how they are, who uses them, from every source there is.
//!
//! A [`DeviceSource`] gives a [`SourceReading`] each time it is read. Sources differ in what they can tell; all of them say so in
//! the same words: a field is a value, unsupported, or failed ([`Reported`]), and one bad device, field or file never
//! loses another.
//!
//! - Words: a device as one source read it once is [`DetectedDevice`]; a [`SourceReading`] is all that a source said at one time.
//! - Sources: NVIDIA's library and tool, AMD's kernel files and tools, and [`simulated`] devices. [`SourceChoice`] opens
//!   those that a machine has, [`SourcePaths`] knows where they are on it, and [`capture`] reads what a source once said from
//!   a file, a folder or an archive.
//! - Reading: a [`SourceProbe`] keeps a hung driver away from its caller, and a [`HostProcessResolver`] finds the processes that a
//!   driver names by number.
//! - Tracking: a [`DeviceTracker`] recognises devices over many readings. A [`TrackedDevice`] has a number that stays,
//!   facts, a judged health, and the last reading.
//! - Answers: [`DevicesReport`] for programs, [`JobEnvironment`] for jobs, and [`doctor`] for people whose devices do not work.

#![warn(unreachable_pub)]

mod address;
mod amd_names;
mod amd_sysfs;
mod amd_tools;
mod amounts;
mod attribution;
pub mod capture;
mod detect;
mod detected_device;
pub mod doctor;
mod environment;
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
pub use attribution::{HostProcessLookup, HostProcessResolver, ProcessFacts};
pub use detect::{SourceChoice, SourcePaths, UnknownBackend};
pub use detected_device::{
    DetectedDevice, DevicePartition, DeviceProcess, MemoryReading, Milliwatts, ProcessActivity, UsedMemoryScope,
};
pub use environment::JobEnvironment;
pub use nvml::NvmlSource;
pub use probe::{ProbeReply, SourceProbe};
pub use report::{DeviceReport, DevicesReport, ErrorReport, LinkReport, ProcessReport};
pub use reported::Reported;
pub use source::{DeviceSource, SourceError, SourceKind, SourceState, SourceStatus};
pub use source_reading::{DetectedLink, SourceReading};
pub use tracker::{DeviceTracker, GpuIdRegistry, TrackedChange, TrackedDevice, fresh_until};
