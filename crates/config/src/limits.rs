//! Limits of this crate.

/// Maximum size of a configuration file.
pub const FILE_BYTES: usize = 1 << 20;
/// Maximum number of policies in a file.
pub const POLICIES: usize = 256;
/// Maximum number of owners with a quota in a file.
pub const QUOTAS: usize = 10_000;
/// Maximum number of entries of a list or a table of labels.
pub const ENTRIES: usize = 1_024;
/// Maximum number of reported problems.
pub const PROBLEMS: usize = 100;
/// Maximum number of characters of a bad value that a message repeats.
pub(crate) const QUOTED: usize = 120;
/// Maximum length of a name for which a similar known name is searched.
pub(crate) const SUGGEST_FOR: usize = 64;
/// Maximum number of processes inspected to find the listener of a port.
pub(crate) const PROCESSES: usize = 65_536;
