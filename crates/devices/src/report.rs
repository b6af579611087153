//! Devices as JSON.
