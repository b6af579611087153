//! A stand-in for NVIDIA's management library, for machines without a GPU. For tests only.
//!
//! Built as a dynamic library it answers as the `scenario.json` next to it says; so each test that copies it into a
//! folder of its own has a machine of its own. The scenario is read again whenever the devices are counted or the
//! library is initialised: a test changes the world by writing the file anew.
//!
//! Built as a Rust library it is the vocabulary of scenarios ([`NvmlScenario`]) and the way to put a copy somewhere
//! ([`install`]).

mod ffi;
mod install;
pub mod machines;
mod scenario;
mod world;

pub use install::{install_library, write_scenario};
pub use scenario::{
    MigLayout, NOT_AVAILABLE, NvLink, NvLinkPeer, NvmlScenario, RemappedRows, StandInDevice, StandInMemory,
    StandInMigInstance, StandInProcess, StandInXidEvent,
};
