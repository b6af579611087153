//! Replays of traces: the small ones that come with the repository, and the published ones where they are at hand.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod made_up_traces;
mod published_figures;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

use std::path::Path;

use gpupool_core::Strategy;
use gpupool_sim::replay::Replayed;
use gpupool_sim::trace::Folder;
use gpupool_sim::{NodeOrder, Scenario, WorkloadSource};

/// The small lab of `examples/traces`.
fn lab() -> Folder {
    Folder::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces")).unwrap()
}

fn replay(folder: &Folder, trace: &str, seed: u64, strategy: Strategy, workload: WorkloadSource) -> Replayed {
    Scenario { folder, trace, seed, strategy, workload, node_order: NodeOrder::Trace }.replay().unwrap()
}
