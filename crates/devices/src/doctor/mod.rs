//! What is wrong with the GPUs of a machine, why, and what to do about it.
//!
//! Three steps, each of its own kind: [`Evidence::gather`] looks at the machine without waking or opening a device,
//! [`examine`] is a pure function from evidence to [`Finding`]s, and [`render`] puts them into words for a terminal.
//! [`Bundle`] packs what somebody elsewhere needs to see the same machine.

mod bundle;
mod evidence;
mod findings;
mod render;

pub use crate::pci_bus::PciGpu;
pub use bundle::{Bundle, Redact, Wish};
pub use evidence::{
    Access, Cgroup, CgroupMode, Confinement, Evidence, Group, Node, NvidiaVersions, SourceResult, User,
};
pub use findings::{Finding, Severity, examine};
pub use render::render;
