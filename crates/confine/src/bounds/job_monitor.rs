//! State of one polled job: its bounds, its usage, the next poll, and the sums over its processes if no cgroup counts
//! them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{BoundExceeded, BoundsEnforcement, EnforcementMethod, JobBounds, JobUsage};
use crate::cgroup::{CgroupMeter, CgroupVersion};
use crate::limits::{
    LONGEST_POLL_INTERVAL, LONGEST_SNAPSHOT_AGE, MEMORY_GROWTH_PER_SECOND, OOM_KILL_POLL_INTERVAL,
    PROCESS_GROWTH_PER_SECOND, PROPORTIONAL_MEMORY_AGE, SHORTEST_POLL_INTERVAL, SHORTEST_TREE_POLL_INTERVAL,
    TREE_SCAN_COST_DIVISOR,
};
use crate::process::{ProcFs, ProcessId, ProcessSnapshot, ProcessStat, proportional_memory, resident_memory};

/// A job that is polled.
#[derive(Debug)]
pub(super) struct JobMonitor {
    job: ProcessId,
    /// Parent of the job, once known: every process of the job is below it, orphans included.
    supervisor: Option<ProcessId>,
    /// Meter of the job's cgroup, if it has one.
    meter: CgroupMeter,
    /// Bounds to poll.
    memory: Option<u64>,
    oom_kill_bound: Option<u64>,
    processes: Option<u64>,
    cpu_time: Option<Duration>,
    /// CPU time at the start of counting.
    cpu_start: Duration,
    /// Whether the last poll also exceeded the CPU time.
    exceeded_cpu_before: bool,
    tree_memory: TreeMemoryMeter,
    tree_cpu_time: TreeCpuMeter,
}

/// Result of a poll.
#[derive(Debug)]
pub(super) enum BoundsCheck {
    /// No bound is exceeded; poll again after this interval.
    Within(Duration),
    /// A bound is exceeded.
    Exceeded(BoundExceeded),
    /// The job is gone.
    JobGone,
}

/// The job's processes could not be read this time.
const PROCESSES_UNREADABLE: BoundsCheck = BoundsCheck::Within(SHORTEST_TREE_POLL_INTERVAL);

impl JobMonitor {
    /// Creates a monitor for the bounds that the kernel does not enforce.
    pub(super) fn new(job: ProcessId, meter: CgroupMeter, bounds: &JobBounds, enforcement: &BoundsEnforcement) -> Self {
        let is_polled = |method: &Option<EnforcementMethod>| matches!(method, Some(EnforcementMethod::Polling { .. }));
        // v2 kills the whole job, and its end reports everything; v1 kills one process, and the others continue.
        let kills_one = enforcement.host_memory == Some(EnforcementMethod::Kernel(CgroupVersion::V1));
        Self {
            job,
            supervisor: None,
            meter,
            memory: bounds.host_memory.filter(|_| is_polled(&enforcement.host_memory)),
            oom_kill_bound: bounds.host_memory.filter(|_| kills_one),
            processes: bounds.processes.filter(|_| is_polled(&enforcement.processes)),
            cpu_time: bounds.cpu_time,
            cpu_start: Duration::ZERO,
            exceeded_cpu_before: false,
            tree_memory: TreeMemoryMeter::default(),
            tree_cpu_time: TreeCpuMeter::default(),
        }
    }

    /// Whether any bound needs polling.
    pub(super) fn needs_polling(&self) -> bool {
        self.memory.or(self.oom_kill_bound).or(self.processes).is_some() || self.cpu_time.is_some()
    }

    /// Checks every bound.
    pub(super) fn check_bounds(&mut self, snapshots: &mut SnapshotCache) -> BoundsCheck {
        let mut interval = LONGEST_POLL_INTERVAL;
        let checks = [Self::check_oom_kills, Self::check_memory, Self::check_processes, Self::check_cpu_time];
        for check in checks {
            match check(self, snapshots) {
                Ok(again) | Err(BoundsCheck::Within(again)) => interval = interval.min(again),
                Err(other) => return other,
            }
        }
        BoundsCheck::Within(interval)
    }

    /// Restarts the count of CPU time.
    pub(super) fn restart_cpu_time(&mut self, snapshots: &mut SnapshotCache) {
        self.exceeded_cpu_before = false;
        if let Ok(used) = self.total_cpu_time(snapshots) {
            self.cpu_start = used;
        }
    }

    /// Returns the current usage.
    pub(super) fn usage(&mut self, snapshots: &mut SnapshotCache) -> JobUsage {
        let tree_memory = |monitor: &mut Self, snapshots: &mut SnapshotCache| {
            let pids = monitor.members(snapshots, Duration::ZERO, |stat| stat.pid).ok()?;
            Some(monitor.tree_memory.measure(&snapshots.procfs, &pids, 0))
        };
        JobUsage {
            host_memory: self.meter.host_memory().or_else(|| tree_memory(self, snapshots)),
            processes: self.meter.processes().or_else(|| self.count_threads(snapshots).ok()),
            cpu_time: self.total_cpu_time(snapshots).ok().map(|used| used.saturating_sub(self.cpu_start)),
        }
    }

    /// Returns the exceeded bound if the kernel killed one process of the job for memory and left the others.
    pub(super) fn partial_oom_kill(&self) -> Option<BoundExceeded> {
        let allowed = self.oom_kill_bound?;
        self.meter.oom_kills().filter(|kills| *kills > 0).map(|_| BoundExceeded::HostMemory { used: None, allowed })
    }

    // Each check returns the next poll interval, or the result that ends the poll.

    fn check_oom_kills(&mut self, _: &mut SnapshotCache) -> Result<Duration, BoundsCheck> {
        match self.partial_oom_kill() {
            Some(excess) => Err(BoundsCheck::Exceeded(excess)),
            None if self.oom_kill_bound.is_some() => Ok(OOM_KILL_POLL_INTERVAL),
            None => Ok(LONGEST_POLL_INTERVAL),
        }
    }

    fn check_memory(&mut self, snapshots: &mut SnapshotCache) -> Result<Duration, BoundsCheck> {
        let Some(allowed) = self.memory else { return Ok(LONGEST_POLL_INTERVAL) };
        let pids = self.members(snapshots, snapshots.max_age_for_memory(), |stat| stat.pid)?;
        match self.tree_memory.measure(&snapshots.procfs, &pids, allowed) {
            used if used > allowed => {
                Err(BoundsCheck::Exceeded(BoundExceeded::HostMemory { used: Some(used), allowed }))
            }
            used => Ok(memory_interval(allowed - used)),
        }
    }

    fn check_processes(&mut self, snapshots: &mut SnapshotCache) -> Result<Duration, BoundsCheck> {
        let Some(allowed) = self.processes else { return Ok(LONGEST_POLL_INTERVAL) };
        match self.count_threads(snapshots)? {
            used if used > allowed => Err(BoundsCheck::Exceeded(BoundExceeded::Processes { used, allowed })),
            used => Ok(process_interval(allowed - used)),
        }
    }

    fn check_cpu_time(&mut self, snapshots: &mut SnapshotCache) -> Result<Duration, BoundsCheck> {
        let Some(allowed) = self.cpu_time else { return Ok(LONGEST_POLL_INTERVAL) };
        let used = self.total_cpu_time(snapshots)?.saturating_sub(self.cpu_start);
        let by_group = self.meter.cpu_time_version().is_some();
        let shortest = if by_group { SHORTEST_POLL_INTERVAL } else { SHORTEST_TREE_POLL_INTERVAL };
        let was_over = std::mem::replace(&mut self.exceeded_cpu_before, used > allowed);
        match (used > allowed, was_over || by_group) {
            (true, true) => Err(BoundsCheck::Exceeded(BoundExceeded::CpuTime { used, allowed })),
            (true, false) => Ok(SHORTEST_POLL_INTERVAL),
            (false, _) => Ok(cpu_time_interval(allowed - used, processor_count(), shortest)),
        }
    }

    fn count_threads(&mut self, snapshots: &mut SnapshotCache) -> Result<u64, BoundsCheck> {
        Ok(self.members(snapshots, SHORTEST_POLL_INTERVAL / 2, |stat| stat.threads)?.iter().sum())
    }

    /// Returns the CPU time since the job started.
    fn total_cpu_time(&mut self, snapshots: &mut SnapshotCache) -> Result<Duration, BoundsCheck> {
        if self.meter.cpu_time_version().is_some() {
            return self.meter.cpu_time().ok_or(BoundsCheck::JobGone);
        }
        let root = self.supervisor(snapshots)?;
        let procfs = snapshots.procfs.clone();
        let snapshot = snapshots.snapshot_within(SHORTEST_POLL_INTERVAL / 2).ok_or(PROCESSES_UNREADABLE)?;
        Ok(self.tree_cpu_time.measure(&procfs, snapshot, root.pid))
    }

    /// Maps each process of the job.
    fn members<T>(
        &mut self,
        snapshots: &mut SnapshotCache,
        age: Duration,
        of: fn(&ProcessStat) -> T,
    ) -> Result<Vec<T>, BoundsCheck> {
        let root = self.supervisor(snapshots)?;
        let snapshot = snapshots.snapshot_within(age).ok_or(PROCESSES_UNREADABLE)?;
        Ok(snapshot.descendants(root.pid).into_iter().map(of).collect())
    }

    /// Finds the supervisor, if it lives.
    fn supervisor(&mut self, snapshots: &SnapshotCache) -> Result<ProcessId, BoundsCheck> {
        let find = |id: ProcessId| match snapshots.procfs.stat(id.pid) {
            Ok(Some(stat)) if stat.started == id.started => Ok(stat),
            Ok(_) => Err(BoundsCheck::JobGone),
            Err(_) => Err(PROCESSES_UNREADABLE),
        };
        match self.supervisor {
            Some(supervisor) => find(supervisor).map(|stat| stat.id()),
            None => {
                let parent = find(self.job)?.parent;
                let supervisor =
                    snapshots.procfs.stat(parent).map_err(|_| PROCESSES_UNREADABLE)?.ok_or(BoundsCheck::JobGone)?.id();
                self.supervisor = Some(supervisor);
                Ok(supervisor)
            }
        }
    }
}

/// Returns the number of processors on which the job can run at once.
fn processor_count() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

// Poll intervals: the earliest moment at which a job could exceed a bound.

/// Returns the interval for this many remaining bytes.
fn memory_interval(left: u64) -> Duration {
    time_at_rate(left, MEMORY_GROWTH_PER_SECOND).clamp(SHORTEST_POLL_INTERVAL, LONGEST_POLL_INTERVAL)
}

/// Returns the interval for this many remaining processes and threads.
fn process_interval(left: u64) -> Duration {
    time_at_rate(left, PROCESS_GROWTH_PER_SECOND).clamp(SHORTEST_TREE_POLL_INTERVAL, LONGEST_POLL_INTERVAL)
}

/// Returns the interval for this much remaining CPU time, but at least `shortest`.
fn cpu_time_interval(left: Duration, processors: u32, shortest: Duration) -> Duration {
    (left / processors.max(1)).clamp(shortest, LONGEST_POLL_INTERVAL)
}

fn time_at_rate(left: u64, rate: u64) -> Duration {
    Duration::from_secs(left / rate) + Duration::from_micros(left % rate * 1_000_000 / rate)
}

/// Latest snapshot of all processes, shared by all jobs that are due.
#[derive(Debug)]
pub(super) struct SnapshotCache {
    procfs: ProcFs,
    snapshot: ProcessSnapshot,
    taken: Option<Instant>,
    /// Duration of the last scan.
    cost: Duration,
    has_failed: bool,
}

impl SnapshotCache {
    pub(super) fn new(procfs: ProcFs) -> Self {
        Self { procfs, snapshot: ProcessSnapshot::default(), taken: None, cost: Duration::ZERO, has_failed: false }
    }

    /// Returns a snapshot at most this old; `None` if the processes cannot be read now.
    fn snapshot_within(&mut self, age: Duration) -> Option<&ProcessSnapshot> {
        if self.taken.is_some_and(|taken| taken.elapsed() <= age) {
            return Some(&self.snapshot);
        }
        let begun = Instant::now();
        match ProcessSnapshot::read(&self.procfs) {
            Ok(snapshot) => {
                self.snapshot = snapshot;
                self.taken = Some(begun);
                self.cost = begun.elapsed();
                self.has_failed = false;
                Some(&self.snapshot)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(%error, "cannot read the process table; jobs may exceed their bounds meanwhile");
                }
                self.taken = None;
                None
            }
        }
    }

    /// Returns the maximum age of a snapshot for polls of memory alone, which keeps the cost of scans small.
    fn max_age_for_memory(&self) -> Duration {
        (self.cost * TREE_SCAN_COST_DIVISOR).clamp(SHORTEST_TREE_POLL_INTERVAL, LONGEST_SNAPSHOT_AGE)
    }
}

/// Memory of a job's processes together.
///
/// The cheap sum comes first: the resident pages of each process, shared pages counted for each. Only if that sum
/// exceeds the bound, the kernel computes proportional shares, which is slow. Between two such readings the memory
/// cannot grow by more than the resident growth of each process.
#[derive(Debug, Default)]
struct TreeMemoryMeter {
    proportional: Option<ProportionalMemory>,
}

/// Latest reading of proportional memory.
#[derive(Debug)]
struct ProportionalMemory {
    bytes: u64,
    /// Resident bytes of each process at that time.
    resident: HashMap<u32, u64>,
    read_at: Instant,
}

impl TreeMemoryMeter {
    /// Returns the bytes in use, or an upper bound of them that is within `allowed`.
    fn measure(&mut self, procfs: &ProcFs, pids: &[u32], allowed: u64) -> u64 {
        let now: HashMap<u32, u64> = pids.iter().map(|&pid| (pid, resident_memory(procfs, pid))).collect();
        let resident_sum: u64 = now.values().fold(0, |sum, bytes| sum.saturating_add(*bytes));
        if resident_sum <= allowed {
            self.proportional = None;
            return resident_sum;
        }
        if let Some(most) = self.proportional.as_ref().and_then(|proportional| proportional.upper_bound(&now))
            && most <= allowed
        {
            return most;
        }
        let proportional = |(pid, resident): (&u32, &u64)| proportional_memory(procfs, *pid).unwrap_or(*resident);
        let bytes = now.iter().map(proportional).fold(0, u64::saturating_add);
        self.proportional = Some(ProportionalMemory { bytes, resident: now, read_at: Instant::now() });
        bytes
    }
}

impl ProportionalMemory {
    /// Returns the upper bound for now, unless the reading is too old.
    fn upper_bound(&self, now: &HashMap<u32, u64>) -> Option<u64> {
        let grown = |(pid, bytes): (&u32, &u64)| bytes.saturating_sub(self.resident.get(pid).copied().unwrap_or(0));
        let grown = now.iter().map(grown).fold(0, u64::saturating_add);
        (self.read_at.elapsed() < PROPORTIONAL_MEMORY_AGE).then(|| self.bytes.saturating_add(grown))
    }
}

/// CPU time of a job's processes together, if no cgroup counts it.
///
/// The kernel adds the time of a reaped process to its parent. If a parent ignores its children, their time is lost;
/// then the last observed sum is better. Both values can only be too small, except for a moment while a child's time
/// moves during the scan. Callers therefore act only on two readings in a row.
#[derive(Debug, Default)]
struct TreeCpuMeter {
    /// Own ticks of each living process at the last reading.
    live_ticks: HashMap<ProcessId, u64>,
    /// Own ticks of processes that are gone.
    exited_ticks: u64,
}

impl TreeCpuMeter {
    /// Returns the CPU time of all processes below the root and of those that the root reaped.
    fn measure(&mut self, procfs: &ProcFs, snapshot: &ProcessSnapshot, root: u32) -> Duration {
        let members = snapshot.descendants(root);
        let own: u64 = members.iter().map(|stat| stat.own_ticks).sum();
        let reaped: u64 = members.iter().copied().chain(snapshot.get(root)).map(|stat| stat.reaped_ticks).sum();
        let now = members.iter().map(|stat| (stat.id(), stat.own_ticks)).collect();
        for (id, ticks) in std::mem::replace(&mut self.live_ticks, now) {
            if self.live_ticks.contains_key(&id) {
                continue;
            }
            // A process that this scan missed is not gone.
            let has_gone = procfs.stat(id.pid).is_ok_and(|stat| stat.is_none_or(|stat| stat.id() != id));
            if has_gone {
                self.exited_ticks += ticks;
            } else {
                self.live_ticks.insert(id, ticks);
            }
        }
        let observed = self.exited_ticks + self.live_ticks.values().sum::<u64>();
        ticks_to_duration((own + reaped).max(observed))
    }
}

fn ticks_to_duration(ticks: u64) -> Duration {
    let rate = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_secs(ticks / rate) + Duration::from_nanos(ticks % rate * 1_000_000_000 / rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_poll_interval_shortens_near_a_bound() {
        let millis = Duration::from_millis;
        assert_eq!(memory_interval(0), millis(10));
        assert_eq!(memory_interval(1 << 20), millis(10));
        assert_eq!(memory_interval(512 << 20), millis(250));
        assert_eq!(memory_interval(u64::MAX), millis(1000));
        assert_eq!(process_interval(0), millis(50));
        assert_eq!(process_interval(50), millis(200));
        assert_eq!(process_interval(u64::MAX), millis(1000));
        assert_eq!(cpu_time_interval(millis(300), 2, millis(10)), millis(150));
        assert_eq!(cpu_time_interval(Duration::ZERO, 0, millis(50)), millis(50));
        assert_eq!(cpu_time_interval(Duration::MAX, 64, millis(10)), millis(1000));
    }

    /// Creates processes with this resident and proportional memory in MiB.
    fn fake_procfs(processes: &[(u32, u64, Option<u64>)]) -> (tempfile::TempDir, ProcFs) {
        let root = tempfile::tempdir().unwrap();
        for (pid, resident, proportional) in processes {
            let folder = root.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let pages = (resident << 20) / rustix::param::page_size() as u64;
            std::fs::write(folder.join("statm"), format!("99999 {pages} 0 0 0 0 0\n")).unwrap();
            if let Some(proportional) = proportional {
                std::fs::write(folder.join("smaps_rollup"), format!("x\nPss: {} kB\n", proportional << 10)).unwrap();
            }
        }
        let procfs = ProcFs::with_root(root.path());
        (root, procfs)
    }

    #[test]
    fn shared_memory_is_counted_once_and_read_only_near_the_bound() {
        let (root, procfs) = fake_procfs(&[(1, 90, Some(50)), (2, 90, Some(50))]);
        let mut memory = TreeMemoryMeter::default();
        assert_eq!(memory.measure(&procfs, &[1, 2], 300 << 20), 180 << 20, "far below: no shares were read");
        assert_eq!(memory.measure(&procfs, &[1, 2], 120 << 20), 100 << 20);

        // A new reading would exceed the bound: the known growth shows that none is needed.
        std::fs::write(root.path().join("1/smaps_rollup"), "Pss: 999999 kB\n").unwrap();
        assert_eq!(memory.measure(&procfs, &[1, 2], 120 << 20), 100 << 20);
        let (_other, grown) = fake_procfs(&[(1, 120, Some(80)), (2, 90, Some(50))]);
        assert_eq!(memory.measure(&grown, &[1, 2], 120 << 20), 130 << 20, "grown by 30: read again");
    }

    #[test]
    fn a_process_without_readable_shares_counts_in_full() {
        let (_root, procfs) = fake_procfs(&[(1, 90, None), (2, 90, Some(20))]);
        assert_eq!(TreeMemoryMeter::default().measure(&procfs, &[1, 2, 3], 100 << 20), 110 << 20);
    }

    /// Replaces all processes by these (pid, parent, own ticks, reaped ticks) and measures below 1.
    fn measure_time(time: &mut TreeCpuMeter, root: &std::path::Path, processes: &[(u32, u32, u64, u64)]) -> Duration {
        std::fs::remove_dir_all(root).unwrap();
        for (pid, parent, own, reaped) in processes {
            let folder = root.join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let stat = format!("{pid} (p) S {parent} 1 1 0 -1 0 0 0 0 0 {own} 0 {reaped} 0 20 0 1 0 5 0 0");
            std::fs::write(folder.join("stat"), stat).unwrap();
        }
        let procfs = ProcFs::with_root(root);
        time.measure(&procfs, &ProcessSnapshot::read(&procfs).unwrap(), 1)
    }

    #[test]
    fn time_of_children_is_neither_lost_nor_resident_sum() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeCpuMeter::default(), ticks_to_duration(1));
        // The root's own time does not belong to the job.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 0), (3, 2, 20, 0)]), tick * 30);
        // 3 exited and was reaped by 2, together with children that no scan saw.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 27)]), tick * 37);
        // 2 exited and was reaped by the root.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 40)]), tick * 40);
    }

    #[test]
    fn ignored_children_count_with_their_last_observed_cpu_time() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeCpuMeter::default(), ticks_to_duration(1));
        for child in 3..8 {
            measure_time(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0), (child, 2, 20, 0)]);
        }
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0)]), tick * 101);
    }
}
