//! What a Kubernetes manifest asks for, as a [`gpupool_core::Request`].
//!
//! Pure: text in, verdicts out; no file, network or clock. The way of a manifest, file by file:
//!
//! - `manifest`: text (YAML or JSON, one document or many) to trees of nodes, within `limits`;
//! - `pod`: a tree to the few fields of its pod that matter here, whatever kind of workload carries the pod;
//! - `resources`: what `amd.com/gpu`, `nvidia.com/gpu`, `cpu` and `memory` add up to, in [`Quantity`]s;
//! - `check`: what the `kaiwo.ai/gpu-*` annotations say, put together with the resources, or why they contradict each
//!   other.

mod check;
mod error;
mod limits;
mod manifest;
mod pod;
mod resources;

pub use check::{
    CheckedPod, FRACTION_ANNOTATION, ISOLATION_ANNOTATION, MEMORY_ANNOTATION, PodVerdict, SHARING_ANNOTATION,
    check_manifest,
};
pub use error::KubeError;
pub use limits::MAX_MANIFEST_BYTES;
pub use resources::{InvalidQuantity, Quantity};
