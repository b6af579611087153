//! Pools of odd workers, and their processes.

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gpupool_confine::process::{ProcFs, ProcessHandle, ProcessId};
use gpupool_dispatch::WorkerProgram;
use gpupool_dispatch::resource_pool::{
    HeldWorkerError, ResourcePool, ResourcePoolConfig, ResourcePoolStatus, WorkerHoldEndReason,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::odd_worker;

pub const PATIENCE: Duration = Duration::from_secs(60);

/// Environment variable that identifies the processes of a pool.
const POOL_VARIABLE: &str = "GPUPOOL_TEST_STORY";

/// Configuration of one pool under test.
pub struct TestPool {
    name: String,
    pub config: ResourcePoolConfig,
}

impl TestPool {
    /// Creates a pool of odd workers with a long time limit.
    pub fn with_workers(workers: u32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let program = WorkerProgram::native(odd_worker()).env(POOL_VARIABLE, &name);
        let mut config = ResourcePoolConfig::new(program, workers, PATIENCE);
        config.helper = Some(odd_worker());
        Self { name, config }
    }

    pub fn configure(mut self, change: impl FnOnce(&mut ResourcePoolConfig)) -> Self {
        change(&mut self.config);
        self
    }

    pub fn start(&self) -> ResourcePool {
        ResourcePool::start(self.config.clone()).unwrap()
    }

    /// Returns the processes of workers, without their supervisors.
    pub fn workers(&self) -> Vec<u32> {
        let is_keeper = |pid: &u32| {
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.split('\0').nth(1).is_some_and(|argument| argument.contains("keeper"))
        };
        self.processes().into_iter().filter(|pid| !is_keeper(pid)).collect()
    }

    /// Returns all processes of the pool.
    pub fn processes(&self) -> Vec<u32> {
        let ours = format!("{POOL_VARIABLE}={}", self.name);
        let is_ours = |pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == ours.as_bytes())
        };
        let all = ProcFs::system().processes().unwrap().into_iter().filter(|stat| !stat.has_exited());
        all.map(|stat| stat.pid).filter(is_ours).collect()
    }

    pub fn assert_nothing_left(&self) {
        let left = self.processes();
        assert!(left.is_empty(), "processes of {} are left: {left:?}", self.name);
    }
}

/// Waits for a limited time.
pub async fn within_patience<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what} did not come in time"))
}

/// Waits until the status satisfies the condition.
pub async fn wait_for_status(pool: &ResourcePool, what: &str, condition: impl Fn(&ResourcePoolStatus) -> bool) {
    let mut status = pool.watch_status();
    within_patience(what, status.wait_for(condition)).await.unwrap();
}

/// Returns the ends of a pool's holds, in the order they began.
pub fn hold_ends(pool: &ResourcePool) -> Vec<Option<WorkerHoldEndReason>> {
    pool.audit_entries().into_iter().map(|entry| entry.ended.map(|ended| ended.how)).collect()
}

pub fn text(result: Result<Bytes, HeldWorkerError>) -> String {
    String::from_utf8_lossy(&result.unwrap()).into_owned()
}

pub fn process_handle(pid: u32) -> ProcessHandle {
    let id = ProcessId::of_pid(pid).unwrap().unwrap_or_else(|| panic!("process {pid} has gone"));
    ProcessHandle::open(id).unwrap().unwrap_or_else(|| panic!("process {id} has gone"))
}

/// Blocks until a process exits.
pub fn wait_for_exit(process: &ProcessHandle) {
    let patience = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(ended, 1, "{} is still there", process.id());
}
