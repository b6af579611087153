//! How a run stands.

use std::time::Instant;

use serde::Serialize;

use crate::{TaskId, WorkerId};

/// How many tasks are where, and what each worker does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Taken in and with no worker.
    pub pending: u64,
    /// With workers.
    pub running: u64,
    /// Done.
    pub completed: u64,
    /// Failed, those lost with their workers included.
    pub failed: u64,
    /// Of those that failed, lost with their workers.
    pub lost: u64,
    /// Took too long.
    pub timeouts: u64,
    /// Given up because nobody wanted them any more.
    pub cancelled: u64,
    /// Failures after which a task was tried again.
    pub retried: u64,
    /// The workers, in the order of their ids.
    pub workers: Vec<WorkerStats>,
}

/// What a worker does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerStats {
    /// Who.
    pub id: WorkerId,
    /// Its GPUs.
    pub gpu_ids: Vec<u32>,
    /// How it stands.
    pub state: WorkerState,
    /// Its process, where there is one.
    pub pid: Option<u32>,
    /// What it works on.
    pub task: Option<TaskId>,
    /// Since when.
    #[serde(skip)]
    pub task_since: Option<Instant>,
    /// Tasks it did.
    pub completed: u64,
    /// Tasks that failed in its hands.
    pub failed: u64,
    /// Tasks that took too long in its hands.
    pub timeouts: u64,
    /// How often its process was replaced.
    pub replaced: u64,
}

/// How a worker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerState {
    /// Its process is being started, or waits to be.
    Starting,
    /// It is being set up.
    SettingUp,
    /// It has nothing to do.
    Idle,
    /// It works.
    Busy,
    /// It cleans up, or is being killed.
    Ending,
    /// It is gone for good.
    Gone,
}
