//! What a Kubernetes manifest asks for, as a [`gpupool_core::Request`].
//!
//! Pure: text in, verdicts out; no file, network or clock. The way of a manifest, file by file:
//!
//! - `manifest`: text (YAML or JSON, one document or many) to trees of `node`s, within `limits`;
//! - `pod`: a tree to the few fields of its pod that matter here, whatever kind of workload carries the pod;
//! - `annotations`: what the `kaiwo.ai/gpu-*` annotations say;
//! - `resources`: what `amd.com/gpu`, `nvidia.com/gpu`, `cpu` and `memory` add up to, in [`Quantity`]s;
//! - `check`: both put together, or why they contradict each other.

mod annotations;
mod check;
mod error;
mod limits;
mod manifest;
mod node;
mod pod;
mod quantity;
mod resources;

pub use annotations::{FRACTION, ISOLATION, MEMORY, SHARING};
pub use check::{Checked, Verdict, check};
pub use error::KubeError;
pub use limits::MANIFEST_BYTES;
pub use quantity::{NotAQuantity, Quantity};
