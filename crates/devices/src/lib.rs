//! The truth about the GPUs of a node: which there are, how they are, who uses them, from every source there is.
//!
//! A [`Source`] gives a [`Snapshot`] each time it is read. Sources differ in what they can tell; all of them say so in
//! the same words: a field is a value, unsupported, or failed ([`Told`]), and one bad device, field or file never
//! loses another.
//!
//! - The words: [`told`], [`found`], [`snapshot`], [`source`], [`address`].
//! - Sources: [`nvml`], [`nvidia_smi`], [`amd_sysfs`], [`amd_tools`] and [`simulated`] devices; [`detect`] chooses, and
//!   knows where things are on a machine.
//! - What only tells of devices: [`pci_bus`], [`kernel_log`]; and [`capture`], which reads the output of a source from a
//!   file, a folder or an archive.
//! - Around a source: [`probe`] keeps a hung driver away from the caller, [`watch`] keeps the books over many readings,
//!   [`gpu_ids`] numbers devices, [`attribution`] finds whose a process is, [`environment`] shows a job its devices.
//! - Answers: [`report`] for programs, [`doctor`] for people whose devices do not work.

pub mod address;
mod amd_names;
pub mod amd_sysfs;
pub mod amd_tools;
mod amounts;
pub mod attribution;
pub mod capture;
pub mod detect;
pub mod doctor;
pub mod environment;
pub mod found;
pub mod gpu_ids;
mod kernel_file;
pub mod kernel_log;
pub mod limits;
pub mod nvidia_smi;
pub mod nvml;
pub mod pci_bus;
pub mod probe;
pub mod report;
pub mod simulated;
pub mod snapshot;
pub mod source;
pub mod told;
mod tool;
pub mod watch;

pub use detect::Places;
pub use found::{Found, Memory, Partition, Process, UsedMeans, Watts};
pub use snapshot::{FoundLink, Snapshot};
pub use source::{Source, SourceError, SourceKind};
pub use told::Told;
