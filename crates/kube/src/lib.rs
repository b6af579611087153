//! Turns the pods of a Kubernetes manifest into [`gpupool_core::Request`]s.
//!
//! Pure: no file, network or clock. Modules, in the order of processing:
//!
//! - `manifest`: parses text (YAML or JSON, one document or many) into trees of nodes, within `limits`;
//! - `pod`: extracts the relevant fields of the pod, for every kind of workload;
//! - `resources`: adds up `amd.com/gpu`, `nvidia.com/gpu`, `cpu` and `memory` in [`Quantity`]s;
//! - `check`: combines the resources with the `kaiwo.ai/gpu-*` annotations, or reports contradictions.

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
