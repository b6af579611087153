//! The truth about the GPUs of a node: which there are, how they are, who uses them, from every source there is.
//!
//! A [`Source`] gives a [`Snapshot`] each time it is read. Sources differ in what they can tell; all of them say so in
//! the same words: a field is a value, unsupported, or failed ([`Told`]), and one bad device, field or file never
//! loses another.
//!
//! - Words: a device as one source read it once is [`Found`]; a [`Snapshot`] is all that a source said at one time.
//! - Sources: NVIDIA's library and tool, AMD's kernel files and tools, and [`simulated`] devices. [`SourceChoice`] opens
//!   those that a machine has, [`Places`] knows where they are on it, and [`capture`] reads what a source once said from
//!   a file, a folder or an archive.
//! - Reading: a [`Probe`] keeps a hung driver away from its caller, and an [`Attributor`] finds the processes that a
//!   driver names by number.
//! - Tracking: a [`DeviceTracker`] recognises devices over many readings. A [`TrackedDevice`] has a number that stays,
//!   facts, a judged health, and the last reading.
//! - Answers: [`Report`] for programs, [`JobEnvironment`] for jobs, and [`doctor`] for people whose devices do not work.

#![warn(unreachable_pub)]

mod address;
mod amd_names;
mod amd_sysfs;
mod amd_tools;
mod amounts;
mod attribution;
pub mod capture;
mod detect;
pub mod doctor;
mod environment;
mod found;
mod kernel_file;
mod kernel_log;
pub mod limits;
mod nvidia_smi;
mod nvml;
mod pci_bus;
mod probe;
mod report;
pub mod simulated;
mod snapshot;
mod source;
mod told;
mod tool;
mod tracker;

pub use address::parse_pci_address;
pub use amd_sysfs::AmdSysfs;
pub use attribution::{Attributor, HostProcess, ProcessFacts};
pub use detect::{Places, SourceChoice, UnknownBackend};
pub use environment::JobEnvironment;
pub use found::{Doing, Found, Memory, Partition, Process, UsedMeans, Watts};
pub use nvml::Nvml;
pub use probe::{Probe, ProbeAnswer};
pub use report::{DeviceReport, ErrorReport, LinkReport, ProcessReport, Report};
pub use snapshot::{FoundLink, Snapshot};
pub use source::{Source, SourceError, SourceKind, SourceState, SourceStatus};
pub use told::Told;
pub use tracker::{DeviceTracker, GpuIds, TrackedChange, TrackedDevice, fresh_until};
