//! Settings from flags, environment and a file, each with where it came from.
//!
//! - [`settings`]: the table; every setting is declared there once.
//! - [`load()`]: flags > environment > file > default, all mistakes at once. No I/O.
//! - [`Inputs::here`]: reads the environment and finds the file.
//! - [`check()`]: what is probably not meant, and what to do; [`Facts::here`] looks at files, directories and the port.
//! - [`Loaded`]: what is in effect; `as_text`, `as_json`, `servers`, `changes`.

mod amounts;
mod check;
mod contract;
mod fields;
mod file;
mod here;
pub mod limits;
mod load;
mod named;
mod policies;
mod problem;
mod raw;
mod reload;
mod resolve;
mod rules;
mod secret;
mod servers;
mod setting;
pub mod settings;
mod show;
mod sockets;
mod suggest;
pub mod units;
mod value;

pub use check::{
    DirectoryFact, Facts, FileFact, Finding, PortFact, Severity, check, findings_as_json, findings_as_text,
};
pub use contract::{ContractApi, ContractConfig, ContractMonitoring, ContractServer};
pub use here::{CONFIG_VARIABLE, SYSTEM_FILE};
pub use load::{Flags, Inputs, Loaded, Reader, load};
pub use named::{Balancing, LogFormat, LogLevel};
pub use problem::{Origin, Problem, Problems, Warning};
pub use reload::Changes;
pub use resolve::Resolved;
pub use rules::BACKENDS;
pub use secret::{FileMode, Secret};
pub use servers::{DEFAULT_ENDPOINT, Servers};
pub use setting::{Machine, Setting};
pub use settings::{Config, SECTIONS, all_settings};
pub use sockets::socket_path;
