//! The kernel's own files about AMD devices as a source.
