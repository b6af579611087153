//! The doctor: evidence, findings, bundles; and that the tests the guide names exist.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod doctor_bundle;
mod doctor_gather;
mod documented;
mod machine;
mod secrets;
