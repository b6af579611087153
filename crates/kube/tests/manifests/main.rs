//! Manifests: what each means, and what holds for all of them.

mod golden;
mod properties;
