//! Settings from flags, environment and a file, each with where it came from.
//!
//! - [`settings`]: the table; every setting is declared there once.
//! - [`load()`]: flags > environment > file > default, all mistakes at once. No I/O.
//! - [`Inputs::here`]: reads the environment and finds the file.
//! - [`check()`]: what is probably not meant, and what to do; [`Facts::here`] looks at files, directories and the port.
//! - [`Loaded`]: what is in effect; `as_text`, `as_json`, `servers`, `changes`.

mod check;
pub mod limits;
mod load;
mod machine;
mod policies;
mod problem;
pub mod settings;
mod show;
pub mod units;
mod value;

#[cfg(test)]
#[path = "../../../tests/skipped.rs"]
mod skipped;

pub use check::{Finding, Severity, check, findings_as_json, findings_as_text};
pub use load::{DEFAULT_ENDPOINT, Flags, Inputs, Loaded, Reader, Resolved, Servers, load};
pub use machine::{CONFIG_VARIABLE, DirectoryFact, Facts, FileFact, Machine, PortFact, SYSTEM_FILE, socket_path};
pub use problem::{Origin, Problem, Problems, Warning};
pub use settings::{Config, SECTIONS, Setting, all_settings};
pub use show::Changes;
pub use value::{BACKENDS, Balancing, FileMode, LogFormat, LogLevel, Secret, UnknownBalancing};
