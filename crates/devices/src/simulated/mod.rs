//! Devices that do not exist and behave as if they did: a [`crate::Source`] like any other.
//!
//! A [`Spec`] says which devices there are (`--simulate 4xH100`, or a TOML file). A [`World`] is their state: pure,
//! time is an argument. [`Simulated`] is the source that reads it by a clock, and [`SimulatedControl`] the handle by
//! which an agent puts the load of its leases on them and a person makes them fail.

mod clock;
mod faults;
mod heat;
mod identity;
mod layout;
mod links;
mod load;
mod model_table;
mod models;
mod physics;
mod reading;
mod source;
mod spec;
mod spec_file;
mod target;

pub use clock::{ManualClock, real_clock};
pub use faults::{Fault, FaultError, Field, Remap};
pub use load::Load;
pub use models::{Fabric, MODELS, MigProfile, Mode, Model, UnknownModel};
pub use physics::{ControlError, DeviceFault, LoadError, World};
pub use source::{Simulated, SimulatedControl, SimulatedDevice};
pub use spec::{Spec, SpecError};
pub use target::{NoSuchDevice, Place, Target};
