//! Replays of traces: the small ones in this repository, and the published ones if they are present.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod made_up_traces;
mod published_figures;
#[path = "../../../../tests/skipped.rs"]
mod skipped;

use std::path::Path;

use gpupool_core::PlacementStrategy;
use gpupool_sim::replay::ReplayResult;
use gpupool_sim::trace::TraceFolder;
use gpupool_sim::{NodeOrdering, Scenario, WorkloadSource};

/// Opens the small lab of `examples/traces`.
fn lab() -> TraceFolder {
    TraceFolder::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces")).unwrap()
}

fn replay(
    folder: &TraceFolder,
    trace: &str,
    seed: u64,
    strategy: PlacementStrategy,
    workload: WorkloadSource,
) -> ReplayResult {
    Scenario { folder, trace, seed, strategy, workload, node_order: NodeOrdering::Trace }.replay().unwrap()
}
