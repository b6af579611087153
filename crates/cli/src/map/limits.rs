//! The bounds of `gpupool map`, each with its reason.

use std::time::Duration;

/// Longest line of a source: far more than a command takes, and no endless one is held.
pub(super) const LINE_BYTES: usize = 16 << 20;
/// What sources other than the first may hold.
pub(super) const HELD_BYTES: usize = 256 << 20;
/// Larger files are not read through to know how many lines they have.
pub(super) const COUNTED_BYTES: u64 = 1 << 30;
/// How long a task that was told to end may take before it is killed, unless `--kill-after` says otherwise.
pub(super) const KILL_AFTER: Duration = Duration::from_secs(10);
/// Tasks that are read ahead, unless `--queue-size` says otherwise.
pub(super) const QUEUE_SIZE: usize = 1_024;
/// Most that `--queue-size` can ask for: all of them are held.
pub(super) const QUEUE_MOST: usize = 1_000_000;
/// Most workers of a run.
pub(super) const WORKERS_MOST: u32 = 4_096;
/// How often progress is drawn at a terminal.
pub(super) const DRAW_EVERY: Duration = Duration::from_millis(100);
/// How often a line tells of progress where there is no terminal.
pub(super) const LINE_EVERY: Duration = Duration::from_secs(10);
/// Failures that are told at the end; the rest is counted.
pub(super) const FAILURES_TOLD: usize = 5;
/// Of what a failed task wrote last to its standard error, this much is told.
pub(super) const TAIL_BYTES: u64 = 2_048;
/// The same in lines.
pub(super) const TAIL_LINES: usize = 5;
/// Of what a task wrote, this much stands in an event of `--json`.
pub(super) const EVENT_BYTES: usize = 64 << 10;
/// How often it is looked at what workers use of their GPUs; the agent reads no more often unless it was told to.
pub(super) const GPU_LOOK: Duration = Duration::from_secs(1);
