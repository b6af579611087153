//! Devices that do not exist and behave as if they did.
