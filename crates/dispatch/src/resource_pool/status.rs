//! How a resource pool stands.

use std::sync::Arc;
use std::time::Duration;

/// How a resource pool stands.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PoolStatus {
    /// Workers there are, those that are being started or replaced included.
    pub total_workers: usize,
    /// Workers that could be had at once.
    pub available_workers: usize,
    /// Workers somebody has.
    pub active_tasks: usize,
    /// Those who wait for one.
    pub waiting_tasks: usize,
    /// How long a worker may be held.
    pub worker_timeout: Duration,
    /// Bytes of host memory a worker may use.
    pub worker_memory: Option<u64>,
    /// Who has a worker, in the order they got it.
    pub active_task_ids: Vec<Arc<str>>,
    /// Why no worker can be had: there is none, and none could be started for a while. It is tried again.
    pub failure: Option<Arc<str>>,
    /// What the last worker that could not clean up said.
    pub clean_up_failure: Option<Arc<str>>,
    /// Why the file of the audit trail is not complete.
    pub audit_failure: Option<Arc<str>>,
}
