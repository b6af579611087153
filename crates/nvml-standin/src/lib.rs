//! A stand-in for NVIDIA's management library, for machines without a GPU. For tests only.
//!
//! The dynamic library responds according to the `scenario.json` next to it; a test that copies the library into a
//! directory of its own has a machine of its own. The scenario is read again when the devices are counted or the
//! library is initialized, so a test changes the machine by writing the file again.
//!
//! The Rust library has the types of scenarios ([`NvmlScenario`]) and installs copies (`install`).

mod ffi;
mod install;
mod library_state;
pub mod machines;
mod scenario;

pub use install::{install_library, write_scenario};
pub use scenario::{
    MigLayout, NOT_AVAILABLE, NvLink, NvLinkPeer, NvmlScenario, RemappedRows, StandInDevice, StandInMemory,
    StandInMigInstance, StandInProcess, StandInXidEvent,
};
