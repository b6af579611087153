//! The truth about the GPUs of a node: which there are, how they are, who uses them, from every source there is.
//!
//! A [`Source`] gives a [`Snapshot`] each time it is read. Sources differ in what they can tell; all of them say so in
//! the same words: a field is a value, unsupported, or failed ([`Told`]), and one bad device, field or file never
//! loses another.

pub mod address;
mod amd_names;
pub mod amd_sysfs;
pub mod amd_tools;
pub mod attribution;
mod bounded;
pub mod capture;
pub mod detect;
pub mod doctor;
pub mod environment;
pub mod facts;
pub mod found;
pub mod gpu_ids;
pub mod kernel_file;
pub mod kernel_log;
pub mod limits;
pub mod nvidia_smi;
pub mod nvml;
pub mod pci_bus;
pub mod places;
pub mod probe;
pub mod report;
pub mod simulated;
pub mod snapshot;
pub mod source;
pub mod told;
pub mod tool;
pub mod topology;
pub mod watch;
pub mod xml;

pub use found::{Found, Memory, Partition, Process, UsedMeans, Watts};
pub use places::Places;
pub use snapshot::{FoundLink, Snapshot};
pub use source::{Source, SourceError, SourceKind};
pub use told::Told;
