//! Every bound of this crate, in one place.

/// Bytes read of one configuration file.
pub const FILE_BYTES: usize = 1 << 20;
/// Policies one file may hold.
pub const POLICIES: usize = 256;
/// Owners one file may give a quota.
pub const QUOTAS: usize = 10_000;
/// Entries of one list or one table of labels.
pub const ENTRIES: usize = 1_024;
/// Problems that are told one by one; a file with more is not a configuration file.
pub const PROBLEMS: usize = 100;
/// Characters of a bad value that are repeated in a message.
pub(crate) const QUOTED: usize = 120;
/// Characters of a name for which a near known name is looked for.
pub(crate) const SUGGEST_FOR: usize = 64;
/// Processes looked at to say who listens on a port.
pub(crate) const PROCESSES: usize = 65_536;
