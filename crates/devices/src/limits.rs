//! Bounds of this crate. Anything beyond a bound is dropped with a warning.

/// Devices of one source.
pub const DEVICES: usize = 1024;
/// Bytes of one text, tool output or captured file.
pub(crate) const TEXT_BYTES: usize = 64 << 20;
/// Bytes of one sysfs or procfs file.
pub(crate) const SYSFS_BYTES: usize = 1 << 20;
/// Nesting depth of an XML document.
pub(crate) const XML_DEPTH: usize = 128;
/// Processes of one device.
pub const PROCESSES: usize = 16_384;
/// Warnings of one reading.
pub const WARNINGS: usize = 256;
/// Characters of a name, command line or error text from outside.
pub const TEXT_CHARS: usize = 1024;
/// Files in a doctor bundle.
pub(crate) const BUNDLE_FILES: usize = 16_384;
/// Uncompressed bytes in a doctor bundle.
pub(crate) const BUNDLE_BYTES: usize = 256 << 20;
