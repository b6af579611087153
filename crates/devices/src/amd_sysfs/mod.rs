//! The kernel's own files about AMD devices as a source: live ([`AmdSysfs`]), or a captured tree ([`read`]).
//!
//! Two drivers tell of a card. The graphics driver has an entry `cardN` with the files of its device and sensors
//! (`drm`, `card`, `hwmon`, `gpu_metrics`); the compute driver has a topology of nodes with memory, links and
//! partitions (`kfd`, `links`, `partitions`). `inventory` joins the two, `processes` finds who uses a device.
//!
//! A sleeping card is never woken: reading its sensors would.

mod captured;
mod card;
mod drm;
pub mod fdinfo;
mod gpu_metrics;
mod hwmon;
mod inventory;
mod kfd;
pub(crate) mod links;
mod partitions;
mod processes;
mod source;
#[cfg(test)]
mod tree;

pub use captured::{looks_like, read};
pub use source::AmdSysfs;
