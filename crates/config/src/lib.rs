//! Settings from flags, environment and a file, each with its origin.
//!
//! - [`settings`]: table of all settings.
//! - [`load_config()`]: resolves flags > environment > file > default and reports all mistakes at once. No I/O.
//! - [`ConfigInputs::from_system`]: reads the environment and finds the file.
//! - [`check_config()`]: errors and likely mistakes with remedies; [`MachineFacts::gather`] inspects files, directories
//!   and the port.
//! - [`LoadedConfig`]: the configuration in effect; `as_text`, `as_json`, `client_endpoints`, `changes`.

mod check;
mod display;
pub mod limits;
mod load;
mod machine;
mod policies;
mod problem;
pub mod settings;
pub mod units;
mod value;

#[cfg(test)]
#[path = "../../../tests/skipped.rs"]
mod skipped;

pub use check::{ConfigFinding, ConfigSeverity, check_config, findings_as_json, findings_as_text};
pub use display::ConfigChanges;
pub use load::{
    ConfigConsumer, ConfigInputs, ConfiguredEndpoints, DEFAULT_ENDPOINT, FlagValues, LoadedConfig, ResolvedSetting,
    load_config,
};
pub use machine::{
    CONFIG_VARIABLE, DirectoryFact, FileFact, HostContext, MachineFacts, PortFact, SYSTEM_FILE, socket_path,
};
pub use problem::{ConfigProblem, ConfigProblems, ConfigWarning, SettingOrigin};
pub use settings::{Config, SECTIONS, Setting, all_settings};
pub use value::{BACKENDS, Balancing, FileMode, LogFormat, LogLevel, SecretString, UnknownBalancing};
