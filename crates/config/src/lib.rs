//! Settings from flags, environment and a file, each with where it came from.
//!
//! - [`settings`]: the table; every setting is declared there once.
//! - [`load_config()`]: flags > environment > file > default, all mistakes at once. No I/O.
//! - [`ConfigInputs::from_system`]: reads the environment and finds the file.
//! - [`check_config()`]: what is probably not meant, and what to do; [`MachineFacts::gather`] looks at files, directories and the port.
//! - [`LoadedConfig`]: what is in effect; `as_text`, `as_json`, `servers`, `changes`.

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

pub use check::{ConfigFinding, ConfigSeverity, check_config, findings_as_json, findings_as_text};
pub use load::{
    ConfigConsumer, ConfigInputs, ConfiguredEndpoints, DEFAULT_ENDPOINT, FlagValues, LoadedConfig, ResolvedSetting,
    load_config,
};
pub use machine::{
    CONFIG_VARIABLE, DirectoryFact, FileFact, HostContext, MachineFacts, PortFact, SYSTEM_FILE, socket_path,
};
pub use problem::{ConfigProblem, ConfigProblems, ConfigWarning, SettingOrigin};
pub use settings::{Config, SECTIONS, Setting, all_settings};
pub use show::ConfigChanges;
pub use value::{BACKENDS, Balancing, FileMode, LogFormat, LogLevel, SecretString, UnknownBalancing};
