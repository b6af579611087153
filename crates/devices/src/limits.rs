//! Limits of this crate. Anything beyond a limit is dropped with a warning.

/// Maximum number of devices of one source.
pub const DEVICES: usize = 1024;
/// Maximum size of one text, tool output or captured file.
pub(crate) const TEXT_BYTES: usize = 64 << 20;
/// Maximum size of one sysfs or procfs file.
pub(crate) const SYSFS_BYTES: usize = 1 << 20;
/// Maximum nesting depth of an XML document.
pub(crate) const XML_DEPTH: usize = 128;
/// Maximum number of processes of one device.
pub const PROCESSES: usize = 16_384;
/// Maximum number of warnings of one reading.
pub const WARNINGS: usize = 256;
/// Maximum number of characters of a name, command line or error text from outside.
pub const TEXT_CHARS: usize = 1024;
/// Maximum number of files in a doctor bundle.
pub(crate) const BUNDLE_FILES: usize = 16_384;
/// Maximum uncompressed size of a doctor bundle.
pub(crate) const BUNDLE_BYTES: usize = 256 << 20;
