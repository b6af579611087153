//! Taking jobs under watch and letting go of them, and the thread that looks after all of them, each when it is due.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use super::look::{Table, Verdict, Watched};
use super::{BoundExceeded, BoundsEnforcement, EnforcementMethod, JobBounds, JobUsage};
use crate::cgroup::{CgroupError, CgroupLimits, CgroupManager, CgroupMeter, Leftovers};
use crate::lock;
use crate::process::ProcFs;
use crate::spawn::{Job, StagedJob};

/// One thread that looks after many jobs; ends when dropped.
#[derive(Debug)]
pub struct BoundsWatcher {
    cgroups: CgroupManager,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl BoundsWatcher {
    /// Starts the thread. Groups for jobs are made by `cgroups`, where it can ([`CgroupManager::unavailable`]: none are made). Empty
    /// groups of jobs whose program was killed are removed, a moment later.
    pub fn start(cgroups: CgroupManager) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (for_thread, left_by_others) = (Arc::clone(&shared), cgroups.clone());
        let watch = move || watch(&for_thread, &left_by_others);
        let thread = std::thread::Builder::new().name("gpupool-bounds".into()).spawn(watch)?;
        Ok(Self { cgroups, shared, thread: Some(thread) })
    }
}

impl Drop for BoundsWatcher {
    fn drop(&mut self) {
        lock(&self.shared.state).has_ended = true;
        self.shared.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // Dropped by a callback, it must not wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

/// A job that is held to its bounds. Dropping it stops the looking (a call of `on_excess` that has begun goes on); what
/// the kernel keeps, it keeps until the job's end.
#[derive(Debug)]
pub struct BoundedJob {
    shared: Arc<Shared>,
    /// Under which number it is looked at, if it is.
    key: Option<u64>,
    watched: Arc<Mutex<Watched>>,
    enforcement: BoundsEnforcement,
    told: Arc<OnceLock<BoundExceeded>>,
    host_memory: Option<u64>,
}

impl BoundsWatcher {
    /// Takes a job that does not run yet under watch, in a group of its own where one can be made. The name is that of
    /// the group, and must be no other's.
    ///
    /// `on_excess` is called at most once, on the watcher's thread, when the job passed a bound and still runs; the caller
    /// then kills it. It must not take long, as no job is looked at meanwhile.
    pub fn enforce_bounds(
        &self,
        prepared: &mut StagedJob,
        name: &str,
        bounds: &JobBounds,
        on_excess: Box<dyn FnOnce(BoundExceeded) + Send>,
    ) -> BoundedJob {
        let (meter, enforcement) = place(&self.cgroups, prepared, name, bounds);
        let watched = Watched::new(prepared.id(), meter, bounds, &enforcement);
        let needs_looks = watched.needs_looks();
        let watched = Arc::new(Mutex::new(watched));
        let told = Arc::new(OnceLock::new());
        let tell = {
            let told = Arc::clone(&told);
            Box::new(move |excess: BoundExceeded| {
                let _ = told.set(excess.clone());
                on_excess(excess);
            })
        };
        let key = needs_looks.then(|| self.shared.add(Arc::clone(&watched), tell));
        BoundedJob {
            shared: Arc::clone(&self.shared),
            key,
            watched,
            enforcement,
            told,
            host_memory: bounds.host_memory,
        }
    }
}

impl BoundedJob {
    /// How each of its bounds is kept.
    pub fn enforcement(&self) -> &BoundsEnforcement {
        &self.enforcement
    }

    /// What the job uses now. Without a group this looks through `/proc`, which takes about a millisecond, and longer the
    /// more memory the job has.
    pub fn usage(&self) -> JobUsage {
        lock(&self.watched).usage(&mut Table::new(ProcFs::system()))
    }

    /// Counts processor time from now on, so that the bound is for what comes. Without a group this looks through
    /// `/proc`.
    pub fn restart_cpu_time(&self) {
        lock(&self.watched).restart_time(&mut Table::new(ProcFs::system()));
    }

    /// Which bound the job has passed so far, while it runs: what the watcher told, or will tell at its next look because
    /// the kernel has killed one of its processes.
    pub fn exceeded_bound(&self) -> Option<BoundExceeded> {
        self.told.get().cloned().or_else(|| lock(&self.watched).killed_in_part())
    }

    /// Which bound the job passed, to be asked after its end: what the watcher told, or that the kernel killed it.
    pub fn exceeded_bound_at_end(&self, job: &Job) -> Option<BoundExceeded> {
        if let Some(excess) = self.told.get() {
            return Some(excess.clone());
        }
        let allowed = self.host_memory.filter(|_| job.oom_kills() > 0)?;
        Some(BoundExceeded::HostMemory { used: None, allowed })
    }
}

impl Drop for BoundedJob {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.shared.remove(key);
        }
    }
}

/// Puts the job into a group where that is possible, and says what is in force.
fn place(
    cgroups: &CgroupManager,
    prepared: &mut StagedJob,
    name: &str,
    bounds: &JobBounds,
) -> (CgroupMeter, BoundsEnforcement) {
    let (meter, mut enforcement, device_memory) = match into_group(cgroups, prepared, name, bounds) {
        Ok((meter, device_memory)) => (meter, BoundsEnforcement::for_cgroups(cgroups), device_memory),
        Err(why) => (CgroupMeter::default(), BoundsEnforcement::for_cgroups(&CgroupManager::unavailable(why)), Ok(())),
    };
    enforcement.cpu_time = Some(EnforcementMethod::cpu_time(meter.cpu_time_version()));
    if let Err(error) = device_memory {
        enforcement.device_memory = Some(EnforcementMethod::Unenforced { why: error });
    }
    (meter, enforcement.of_bounds(bounds))
}

/// The group's meter and whether it limits the memory of devices; or why there is no group.
fn into_group(
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
            // Empty, and harmless where it stays.
            let _ = group.remove();
        }
        return Err(error.to_string());
    }
    Ok((meter, device_memory))
}

/// What the thread and those who add and remove jobs share: both sides only ever add, take or remove an entry.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    next_key: u64,
    has_ended: bool,
}

struct Entry {
    due: Instant,
    /// How much earlier it may be looked at, to look at several at once.
    early: Duration,
    watched: Arc<Mutex<Watched>>,
    tell: Box<dyn FnOnce(BoundExceeded) + Send>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("due", &self.due).finish_non_exhaustive()
    }
}

impl Shared {
    /// Has a job looked at from now on; gives its number.
    fn add(&self, watched: Arc<Mutex<Watched>>, tell: Box<dyn FnOnce(BoundExceeded) + Send>) -> u64 {
        let mut state = lock(&self.state);
        let key = state.next_key;
        state.next_key += 1;
        state.entries.insert(key, Entry { due: Instant::now(), early: Duration::ZERO, watched, tell });
        self.changed.notify_all();
        key
    }

    /// Has it looked at no longer.
    fn remove(&self, key: u64) {
        // Dropped without the lock: what a callback holds may do anything when it is dropped.
        let removed = lock(&self.state).entries.remove(&key);
        drop(removed);
    }

    /// Waits until jobs are due, or something else is; `None` when the watcher has ended.
    fn next_due(&self, else_due: Option<Instant>) -> Option<Vec<(u64, Arc<Mutex<Watched>>)>> {
        let mut state = lock(&self.state);
        loop {
            if state.has_ended {
                return None;
            }
            let now = Instant::now();
            let first = state.entries.values().map(|entry| entry.due).chain(else_due).min();
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
        let due = state.entries.iter().filter(|(_, entry)| entry.due <= now + entry.early);
        Some(due.map(|(key, entry)| (*key, Arc::clone(&entry.watched))).collect())
    }

    fn put_off(&self, key: u64, pause: Duration) {
        if let Some(entry) = lock(&self.state).entries.get_mut(&key) {
            entry.due = Instant::now() + pause;
            entry.early = pause / 4;
        }
    }

    fn tell(&self, key: u64, excess: BoundExceeded) {
        let Some(entry) = lock(&self.state).entries.remove(&key) else { return };
        // One caller's mistake must not end the watch over all other jobs.
        if catch_unwind(AssertUnwindSafe(move || (entry.tell)(excess))).is_err() {
            tracing::error!("what is done about a job over its bounds panicked");
        }
    }
}

fn watch(shared: &Shared, cgroups: &CgroupManager) {
    let mut table = Table::new(ProcFs::system());
    let mut leftovers = Some(Leftovers::look(cgroups));
    while let Some(due) = shared.next_due(leftovers.as_ref().and_then(Leftovers::due)) {
        let is_due = |leftovers: &mut Leftovers| leftovers.due().is_some_and(|due| due <= Instant::now());
        if let Some(leftovers) = leftovers.take_if(is_due) {
            leftovers.remove();
        }
        for (key, watched) in due {
            // Bound to a name, so that the job is let go of before anybody is told.
            let verdict = lock(&watched).look(&mut table);
            match verdict {
                Verdict::Fine(pause) => shared.put_off(key, pause),
                Verdict::Over(excess) => shared.tell(key, excess),
                Verdict::Gone => shared.remove(key),
            }
        }
    }
}
