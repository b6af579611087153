//! The bounds of this crate, in one place. What goes beyond is cut off with a warning, never followed.

/// Devices taken from one source.
pub const DEVICES: usize = 1024;
/// Bytes read of one text, tool output or captured file.
pub(crate) const TEXT_BYTES: usize = 64 << 20;
/// Bytes read of one sysfs or procfs file.
pub(crate) const SYSFS_BYTES: usize = 1 << 20;
/// How deep an XML document may nest.
pub(crate) const XML_DEPTH: usize = 128;
/// Processes taken of one device.
pub const PROCESSES: usize = 16_384;
/// Warnings kept of one reading.
pub const WARNINGS: usize = 256;
/// Characters kept of a name, a command line or an error text that came from outside.
pub const TEXT_CHARS: usize = 1024;
/// Files in a bundle for a report.
pub(crate) const BUNDLE_FILES: usize = 16_384;
/// Bytes in a bundle for a report, before it is compressed.
pub(crate) const BUNDLE_BYTES: usize = 256 << 20;
