//! The doctor: evidence, findings and bundles; and the existence of the tests that the guide names.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod doctor_bundle;
mod doctor_gather;
mod documented;
mod machine;
mod secrets;
