//! Adding and removing bounded jobs, and the thread that polls each of them when it is due.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use super::job_monitor::{BoundsCheck, JobMonitor, SnapshotCache};
use super::{BoundExceeded, BoundsEnforcement, EnforcementMethod, JobBounds, JobUsage};
use crate::cgroup::{CgroupError, CgroupLimits, CgroupManager, CgroupMeter, OrphanedCgroups};
use crate::lock;
use crate::process::ProcFs;
use crate::spawn::{Job, StagedJob};

/// A thread that polls many jobs; ends when dropped.
#[derive(Debug)]
pub struct BoundsWatcher {
    cgroups: CgroupManager,
    queue: Arc<WatchQueue>,
    thread: Option<JoinHandle<()>>,
}

impl BoundsWatcher {
    /// Starts the thread. `cgroups` creates the cgroups of jobs, if it can ([`CgroupManager::unavailable`]: none).
    /// Empty cgroups of jobs whose program was killed are removed a moment later.
    pub fn start(cgroups: CgroupManager) -> io::Result<Self> {
        let queue = Arc::new(WatchQueue::default());
        let (for_thread, cleanup_cgroups) = (Arc::clone(&queue), cgroups.clone());
        let watch = move || watch_jobs(&for_thread, &cleanup_cgroups);
        let thread = std::thread::Builder::new().name("gpupool-bounds".into()).spawn(watch)?;
        Ok(Self { cgroups, queue, thread: Some(thread) })
    }
}

impl Drop for BoundsWatcher {
    fn drop(&mut self) {
        lock(&self.queue.state).has_ended = true;
        self.queue.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // A callback may drop the watcher: the thread must not wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

/// A job with bounds. Dropping it stops the polling (a running call of `on_excess` continues); bounds enforced by the
/// kernel stay until the job ends.
#[derive(Debug)]
pub struct BoundedJob {
    queue: Arc<WatchQueue>,
    /// Key in the watch queue, if the job is polled.
    key: Option<u64>,
    monitor: Arc<Mutex<JobMonitor>>,
    enforcement: BoundsEnforcement,
    reported: Arc<OnceLock<BoundExceeded>>,
    host_memory: Option<u64>,
}

impl BoundsWatcher {
    /// Applies bounds to a prepared job, in a cgroup of its own if one can be created. The name is that of the cgroup
    /// and must be unique.
    ///
    /// The watcher's thread calls `on_excess` at most once, when the job exceeds a bound and still runs; the caller
    /// then kills the job. The call must be short, because no job is polled meanwhile.
    pub fn enforce_bounds(
        &self,
        prepared: &mut StagedJob,
        name: &str,
        bounds: &JobBounds,
        on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
    ) -> BoundedJob {
        let (meter, enforcement) = confine_job(&self.cgroups, prepared, name, bounds);
        let monitor = JobMonitor::new(prepared.id(), meter, bounds, &enforcement);
        let needs_polling = monitor.needs_polling();
        let monitor = Arc::new(Mutex::new(monitor));
        let reported = Arc::new(OnceLock::new());
        let on_excess = {
            let reported = Arc::clone(&reported);
            Box::new(move |excess: BoundExceeded| {
                let _ = reported.set(excess.clone());
                on_excess(excess);
            })
        };
        let key = needs_polling.then(|| self.queue.add(Arc::clone(&monitor), on_excess));
        BoundedJob {
            queue: Arc::clone(&self.queue),
            key,
            monitor,
            enforcement,
            reported,
            host_memory: bounds.host_memory,
        }
    }
}

impl BoundedJob {
    /// Returns the method that enforces each bound.
    pub fn enforcement(&self) -> &BoundsEnforcement {
        &self.enforcement
    }

    /// Returns the job's current usage. Without a cgroup this scans `/proc`, which takes about a millisecond, and
    /// longer the more memory the job has.
    pub fn usage(&self) -> JobUsage {
        lock(&self.monitor).usage(&mut SnapshotCache::new(ProcFs::system()))
    }

    /// Restarts the count of CPU time, so that the bound applies from now on. Without a cgroup this scans `/proc`.
    pub fn restart_cpu_time(&self) {
        lock(&self.monitor).restart_cpu_time(&mut SnapshotCache::new(ProcFs::system()));
    }

    /// Returns the bound that the running job has exceeded so far: reported by the watcher, or about to be reported
    /// because the kernel killed one of the job's processes.
    pub fn exceeded_bound(&self) -> Option<BoundExceeded> {
        self.reported.get().cloned().or_else(|| lock(&self.monitor).partial_oom_kill())
    }

    /// Returns the bound that the ended job exceeded: reported by the watcher, or because the kernel killed the job.
    pub fn exceeded_bound_at_end(&self, job: &Job) -> Option<BoundExceeded> {
        if let Some(excess) = self.reported.get() {
            return Some(excess.clone());
        }
        let allowed = self.host_memory.filter(|_| job.oom_kills() > 0)?;
        Some(BoundExceeded::HostMemory { used: None, allowed })
    }
}

impl Drop for BoundedJob {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.queue.remove(key);
        }
    }
}

/// Puts the job into a cgroup if possible, and returns the enforcement in force.
fn confine_job(
    cgroups: &CgroupManager,
    prepared: &mut StagedJob,
    name: &str,
    bounds: &JobBounds,
) -> (CgroupMeter, BoundsEnforcement) {
    let (meter, mut enforcement, device_memory) = match join_new_cgroup(cgroups, prepared, name, bounds) {
        Ok((meter, device_memory)) => (meter, BoundsEnforcement::for_cgroups(cgroups), device_memory),
        Err(why) => (CgroupMeter::default(), BoundsEnforcement::for_cgroups(&CgroupManager::unavailable(why)), Ok(())),
    };
    enforcement.cpu_time = Some(EnforcementMethod::cpu_time(meter.cpu_time_version()));
    if let Err(error) = device_memory {
        enforcement.device_memory = Some(EnforcementMethod::Unenforced { why: error });
    }
    (meter, enforcement.retain_bounds(bounds))
}

/// Returns the cgroup's meter and whether device memory is limited, or the reason why there is no cgroup.
fn join_new_cgroup(
    cgroups: &CgroupManager,
    prepared: &mut StagedJob,
    name: &str,
    bounds: &JobBounds,
) -> Result<(CgroupMeter, Result<(), String>), String> {
    if !cgroups.can_create() {
        return Err(cgroups.unavailable_reason().to_owned());
    }
    let limits = CgroupLimits {
        host_memory: bounds.host_memory.filter(|_| cgroups.limits_memory()),
        pids: bounds.processes.filter(|_| cgroups.limits_pids()),
    };
    let group = cgroups.create(name, &limits).map_err(|error| error.to_string())?;
    let device_memory = group.limit_device_memory(&bounds.device_memory).map_err(|error| match error {
        CgroupError::NotEnforceable { why, .. } => why,
        other => other.to_string(),
    });
    let meter = group.usage_meter();
    if let Err(error) = prepared.join_cgroup(group) {
        if let Ok(Some(group)) = cgroups.open(name) {
            // An empty cgroup is harmless if it stays.
            let _ = group.remove();
        }
        return Err(error.to_string());
    }
    Ok((meter, device_memory))
}

/// State shared by the thread and the users of the watcher: both sides only add, take or remove a job.
#[derive(Debug, Default)]
struct WatchQueue {
    state: Mutex<WatchQueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WatchQueueState {
    jobs: HashMap<u64, WatchedJob>,
    next_key: u64,
    has_ended: bool,
}

struct WatchedJob {
    due: Instant,
    /// Time by which the poll may come earlier, so that several jobs share one scan.
    slack: Duration,
    monitor: Arc<Mutex<JobMonitor>>,
    on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
}

impl fmt::Debug for WatchedJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedJob").field("due", &self.due).finish_non_exhaustive()
    }
}

impl WatchQueue {
    /// Starts polling a job and returns its key.
    fn add(&self, monitor: Arc<Mutex<JobMonitor>>, on_excess: Box<dyn FnOnce(BoundExceeded) + Send>) -> u64 {
        let mut state = lock(&self.state);
        let key = state.next_key;
        state.next_key += 1;
        state.jobs.insert(key, WatchedJob { due: Instant::now(), slack: Duration::ZERO, monitor, on_excess });
        self.changed.notify_all();
        key
    }

    /// Stops polling a job.
    fn remove(&self, key: u64) {
        // Dropped without the lock: the drop of a callback's captures may do anything.
        let removed = lock(&self.state).jobs.remove(&key);
        drop(removed);
    }

    /// Waits until jobs are due, or `other_due` has passed; `None` when the watcher has ended.
    fn wait_until_due(&self, other_due: Option<Instant>) -> Option<Vec<(u64, Arc<Mutex<JobMonitor>>)>> {
        let mut state = lock(&self.state);
        loop {
            if state.has_ended {
                return None;
            }
            let now = Instant::now();
            let first = state.jobs.values().map(|job| job.due).chain(other_due).min();
            match first {
                Some(first) if first <= now => break,
                Some(first) => {
                    let woken = self.changed.wait_timeout(state, first - now);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
        let now = Instant::now();
        let due = state.jobs.iter().filter(|(_, job)| job.due <= now + job.slack);
        Some(due.map(|(key, job)| (*key, Arc::clone(&job.monitor))).collect())
    }

    fn reschedule(&self, key: u64, interval: Duration) {
        if let Some(job) = lock(&self.state).jobs.get_mut(&key) {
            job.due = Instant::now() + interval;
            job.slack = interval / 4;
        }
    }

    fn report_excess(&self, key: u64, excess: BoundExceeded) {
        let Some(job) = lock(&self.state).jobs.remove(&key) else { return };
        // A panic in one callback must not stop the watch over the other jobs.
        if catch_unwind(AssertUnwindSafe(move || (job.on_excess)(excess))).is_err() {
            tracing::error!("the callback for an exceeded bound panicked");
        }
    }
}

fn watch_jobs(queue: &WatchQueue, cgroups: &CgroupManager) {
    let mut snapshots = SnapshotCache::new(ProcFs::system());
    let mut orphaned = Some(OrphanedCgroups::find(cgroups));
    while let Some(due) = queue.wait_until_due(orphaned.as_ref().and_then(OrphanedCgroups::due)) {
        let is_due = |orphaned: &mut OrphanedCgroups| orphaned.due().is_some_and(|due| due <= Instant::now());
        if let Some(orphaned) = orphaned.take_if(is_due) {
            orphaned.remove();
        }
        for (key, monitor) in due {
            // Bound to a name, so that the job's lock is released before the callback.
            let check = lock(&monitor).check_bounds(&mut snapshots);
            match check {
                BoundsCheck::Within(interval) => queue.reschedule(key, interval),
                BoundsCheck::Exceeded(excess) => queue.report_excess(key, excess),
                BoundsCheck::JobGone => queue.remove(key),
            }
        }
    }
}
