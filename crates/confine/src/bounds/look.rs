//! One job under watch: what it may use, what is known of it, and a look at it; how long it may be left alone, and what its
//! processes use together where no group counts it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{BoundExceeded, BoundsEnforcement, EnforcementMethod, JobBounds, JobUsage};
use crate::cgroup::{CgroupMeter, CgroupVersion};
use crate::limits::{
    FAIR_SHARE_AGE, KERNEL_KILLS_PAUSE, LONGEST_LOOK_PAUSE, LONGEST_TREE_AGE, MEMORY_GROWTH, PROCESS_GROWTH,
    SHORTEST_LOOK_PAUSE, SHORTEST_TREE_PAUSE, TREE_COST_SHARE,
};
use crate::process::{Census, ProcFs, ProcessId, ProcessStat, proportional, resident};

/// A job under watch.
#[derive(Debug)]
pub(super) struct Watched {
    job: ProcessId,
    /// The job's parent, once known: all of the job is below it, also what lost its own parent.
    keeper: Option<ProcessId>,
    /// Of the job's group, if it has one.
    meter: CgroupMeter,
    /// What is looked at.
    memory: Option<u64>,
    kernel_kills: Option<u64>,
    processes: Option<u64>,
    cpu_time: Option<Duration>,
    /// What was used when counting began.
    cpu_start: Duration,
    /// Whether it was over its processor time at the last look too.
    was_over_time: bool,
    tree_memory: TreeMemory,
    tree_time: TreeTime,
}

/// What a look showed.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Nothing; look again after so long.
    Fine(Duration),
    /// A bound was passed.
    Over(BoundExceeded),
    /// There is no job any more.
    Gone,
}

/// The job's processes could not be looked at this time.
const UNSEEN: Verdict = Verdict::Fine(SHORTEST_TREE_PAUSE);

impl Watched {
    /// Takes over what the kernel does not keep.
    pub(super) fn new(job: ProcessId, meter: CgroupMeter, bounds: &JobBounds, enforcement: &BoundsEnforcement) -> Self {
        let is_looked_at = |means: &Option<EnforcementMethod>| matches!(means, Some(EnforcementMethod::Polling { .. }));
        // v2 kills all of a job at once, and its end tells everything; v1 kills one process, and the rest goes on.
        let kills_one = enforcement.host_memory == Some(EnforcementMethod::Kernel(CgroupVersion::V1));
        Self {
            job,
            keeper: None,
            meter,
            memory: bounds.host_memory.filter(|_| is_looked_at(&enforcement.host_memory)),
            kernel_kills: bounds.host_memory.filter(|_| kills_one),
            processes: bounds.processes.filter(|_| is_looked_at(&enforcement.processes)),
            cpu_time: bounds.cpu_time,
            cpu_start: Duration::ZERO,
            was_over_time: false,
            tree_memory: TreeMemory::default(),
            tree_time: TreeTime::default(),
        }
    }

    /// Whether there is anything to look at.
    pub(super) fn needs_looks(&self) -> bool {
        self.memory.or(self.kernel_kills).or(self.processes).is_some() || self.cpu_time.is_some()
    }

    /// Looks at every bound.
    pub(super) fn look(&mut self, table: &mut Table) -> Verdict {
        let mut pause = LONGEST_LOOK_PAUSE;
        let looks = [Self::look_at_kills, Self::look_at_memory, Self::look_at_processes, Self::look_at_time];
        for look in looks {
            match look(self, table) {
                Ok(again) | Err(Verdict::Fine(again)) => pause = pause.min(again),
                Err(other) => return other,
            }
        }
        Verdict::Fine(pause)
    }

    /// Counts processor time from now on.
    pub(super) fn restart_time(&mut self, table: &mut Table) {
        self.was_over_time = false;
        if let Ok(used) = self.time_in_all(table) {
            self.cpu_start = used;
        }
    }

    /// What is used now.
    pub(super) fn usage(&mut self, table: &mut Table) -> JobUsage {
        let by_tree = |watched: &mut Self, table: &mut Table| {
            let pids = watched.members(table, Duration::ZERO, |stat| stat.pid).ok()?;
            Some(watched.tree_memory.measure(&table.procfs, &pids, 0))
        };
        JobUsage {
            host_memory: self.meter.host_memory().or_else(|| by_tree(self, table)),
            processes: self.meter.processes().or_else(|| self.count(table).ok()),
            cpu_time: self.time_in_all(table).ok().map(|used| used.saturating_sub(self.cpu_start)),
        }
    }

    /// Whether the kernel has killed one of its processes for the memory of all, and left the others.
    pub(super) fn killed_in_part(&self) -> Option<BoundExceeded> {
        let allowed = self.kernel_kills?;
        self.meter.oom_kills().filter(|kills| *kills > 0).map(|_| BoundExceeded::HostMemory { used: None, allowed })
    }

    // Each of these says after how long to look again, or what else there is to say.

    fn look_at_kills(&mut self, _: &mut Table) -> Result<Duration, Verdict> {
        match self.killed_in_part() {
            Some(excess) => Err(Verdict::Over(excess)),
            None if self.kernel_kills.is_some() => Ok(KERNEL_KILLS_PAUSE),
            None => Ok(LONGEST_LOOK_PAUSE),
        }
    }

    fn look_at_memory(&mut self, table: &mut Table) -> Result<Duration, Verdict> {
        let Some(allowed) = self.memory else { return Ok(LONGEST_LOOK_PAUSE) };
        let pids = self.members(table, table.age_for_memory(), |stat| stat.pid)?;
        match self.tree_memory.measure(&table.procfs, &pids, allowed) {
            used if used > allowed => Err(Verdict::Over(BoundExceeded::HostMemory { used: Some(used), allowed })),
            used => Ok(pause_of_memory(allowed - used)),
        }
    }

    fn look_at_processes(&mut self, table: &mut Table) -> Result<Duration, Verdict> {
        let Some(allowed) = self.processes else { return Ok(LONGEST_LOOK_PAUSE) };
        match self.count(table)? {
            used if used > allowed => Err(Verdict::Over(BoundExceeded::Processes { used, allowed })),
            used => Ok(pause_of_processes(allowed - used)),
        }
    }

    fn look_at_time(&mut self, table: &mut Table) -> Result<Duration, Verdict> {
        let Some(allowed) = self.cpu_time else { return Ok(LONGEST_LOOK_PAUSE) };
        let used = self.time_in_all(table)?.saturating_sub(self.cpu_start);
        let by_group = self.meter.cpu_time_version().is_some();
        let shortest = if by_group { SHORTEST_LOOK_PAUSE } else { SHORTEST_TREE_PAUSE };
        let was_over = std::mem::replace(&mut self.was_over_time, used > allowed);
        match (used > allowed, was_over || by_group) {
            (true, true) => Err(Verdict::Over(BoundExceeded::CpuTime { used, allowed })),
            (true, false) => Ok(SHORTEST_LOOK_PAUSE),
            (false, _) => Ok(pause_of_cpu_time(allowed - used, processors(), shortest)),
        }
    }

    fn count(&mut self, table: &mut Table) -> Result<u64, Verdict> {
        Ok(self.members(table, SHORTEST_LOOK_PAUSE / 2, |stat| stat.threads)?.iter().sum())
    }

    /// The processor time since the job started.
    fn time_in_all(&mut self, table: &mut Table) -> Result<Duration, Verdict> {
        if self.meter.cpu_time_version().is_some() {
            return self.meter.cpu_time().ok_or(Verdict::Gone);
        }
        let root = self.root(table)?;
        let procfs = table.procfs.clone();
        let census = table.at_most(SHORTEST_LOOK_PAUSE / 2).ok_or(UNSEEN)?;
        Ok(self.tree_time.measure(&procfs, census, root.pid))
    }

    /// Something about each process of the job.
    fn members<T>(&mut self, table: &mut Table, age: Duration, of: fn(&ProcessStat) -> T) -> Result<Vec<T>, Verdict> {
        let root = self.root(table)?;
        let census = table.at_most(age).ok_or(UNSEEN)?;
        Ok(census.below(root.pid).into_iter().map(of).collect())
    }

    /// The keeper, if it lives.
    fn root(&mut self, table: &Table) -> Result<ProcessId, Verdict> {
        let find = |id: ProcessId| match table.procfs.stat(id.pid) {
            Ok(Some(stat)) if stat.started == id.started => Ok(stat),
            Ok(_) => Err(Verdict::Gone),
            Err(_) => Err(UNSEEN),
        };
        match self.keeper {
            Some(keeper) => find(keeper).map(|stat| stat.id()),
            None => {
                let parent = find(self.job)?.parent;
                let keeper = table.procfs.stat(parent).map_err(|_| UNSEEN)?.ok_or(Verdict::Gone)?.id();
                self.keeper = Some(keeper);
                Ok(keeper)
            }
        }
    }
}

/// On how many processors the job can run at once.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

// How long a job may be left alone: until the earliest moment at which it could be over a bound.

/// With so many bytes left.
fn pause_of_memory(left: u64) -> Duration {
    at_rate(left, MEMORY_GROWTH).clamp(SHORTEST_LOOK_PAUSE, LONGEST_LOOK_PAUSE)
}

/// With so many processes and threads left.
fn pause_of_processes(left: u64) -> Duration {
    at_rate(left, PROCESS_GROWTH).clamp(SHORTEST_TREE_PAUSE, LONGEST_LOOK_PAUSE)
}

/// With so much processor time left, on so many processors; each look at least takes so long.
fn pause_of_cpu_time(left: Duration, processors: u32, shortest: Duration) -> Duration {
    (left / processors.max(1)).clamp(shortest, LONGEST_LOOK_PAUSE)
}

fn at_rate(left: u64, rate: u64) -> Duration {
    Duration::from_secs(left / rate) + Duration::from_micros(left % rate * 1_000_000 / rate)
}

/// The last look at all processes of the machine, taken once for all jobs that are due.
#[derive(Debug)]
pub(super) struct Table {
    procfs: ProcFs,
    census: Census,
    taken: Option<Instant>,
    /// What the last look cost.
    cost: Duration,
    has_failed: bool,
}

impl Table {
    pub(super) fn new(procfs: ProcFs) -> Self {
        Self { procfs, census: Census::default(), taken: None, cost: Duration::ZERO, has_failed: false }
    }

    /// All processes, as they were at most so long ago; `None` if they cannot be looked at now.
    fn at_most(&mut self, age: Duration) -> Option<&Census> {
        if self.taken.is_some_and(|taken| taken.elapsed() <= age) {
            return Some(&self.census);
        }
        let begun = Instant::now();
        match Census::take(&self.procfs) {
            Ok(census) => {
                self.census = census;
                self.taken = Some(begun);
                self.cost = begun.elapsed();
                self.has_failed = false;
                Some(&self.census)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(%error, "the processes cannot be looked at; jobs may pass their bounds meanwhile");
                }
                self.taken = None;
                None
            }
        }
    }

    /// How old the table may be where only memory is looked at: what keeps its cost small.
    fn age_for_memory(&self) -> Duration {
        (self.cost * TREE_COST_SHARE).clamp(SHORTEST_TREE_PAUSE, LONGEST_TREE_AGE)
    }
}

/// What is known of the memory of a job's processes together.
///
/// Cheap first: the pages each has in memory, where shared ones count for everybody who shares them. Only when that is
/// over the bound the kernel is asked for fair shares, which is slow; between two such questions the memory cannot have
/// grown by more than what each process grew by.
#[derive(Debug, Default)]
struct TreeMemory {
    fair: Option<Fair>,
}

/// The last answer about fair shares.
#[derive(Debug)]
struct Fair {
    bytes: u64,
    /// What each process had in memory then.
    resident: HashMap<u32, u64>,
    told: Instant,
}

impl TreeMemory {
    /// Bytes in use, or an upper bound of them that is not over `allowed`.
    fn measure(&mut self, procfs: &ProcFs, pids: &[u32], allowed: u64) -> u64 {
        let now: HashMap<u32, u64> = pids.iter().map(|&pid| (pid, resident(procfs, pid))).collect();
        let counted_twice: u64 = now.values().fold(0, |sum, bytes| sum.saturating_add(*bytes));
        if counted_twice <= allowed {
            self.fair = None;
            return counted_twice;
        }
        if let Some(most) = self.fair.as_ref().and_then(|fair| fair.at_most(&now))
            && most <= allowed
        {
            return most;
        }
        let fair = |(pid, resident): (&u32, &u64)| proportional(procfs, *pid).unwrap_or(*resident);
        let bytes = now.iter().map(fair).fold(0, u64::saturating_add);
        self.fair = Some(Fair { bytes, resident: now, told: Instant::now() });
        bytes
    }
}

impl Fair {
    /// What it can be by now, if it is not too old.
    fn at_most(&self, now: &HashMap<u32, u64>) -> Option<u64> {
        let grown = |(pid, bytes): (&u32, &u64)| bytes.saturating_sub(self.resident.get(pid).copied().unwrap_or(0));
        let grown = now.iter().map(grown).fold(0, u64::saturating_add);
        (self.told.elapsed() < FAIR_SHARE_AGE).then(|| self.bytes.saturating_add(grown))
    }
}

/// What is known of the processor time of a job's processes together, where no group counts it.
///
/// A process that ended moves its time to the parent that takes note of it. A parent that ignores its children loses
/// theirs; what we saw of them ourselves is then the better number. Both can only be too small, except for a moment, when
/// a child's time moves while we look: who acts on it looks twice.
#[derive(Debug, Default)]
struct TreeTime {
    /// What each living process had used itself, in ticks.
    seen: HashMap<ProcessId, u64>,
    /// The same of those that have gone.
    gone: u64,
}

impl TreeTime {
    /// The time used by everything below the root, and by what the root took note of.
    fn measure(&mut self, procfs: &ProcFs, census: &Census, root: u32) -> Duration {
        let members = census.below(root);
        let own: u64 = members.iter().map(|stat| stat.own_ticks).sum();
        let reaped: u64 = members.iter().copied().chain(census.get(root)).map(|stat| stat.reaped_ticks).sum();
        let now = members.iter().map(|stat| (stat.id(), stat.own_ticks)).collect();
        for (id, ticks) in std::mem::replace(&mut self.seen, now) {
            if self.seen.contains_key(&id) {
                continue;
            }
            // One that was only missed this time is not gone.
            let has_gone = procfs.stat(id.pid).is_ok_and(|stat| stat.is_none_or(|stat| stat.id() != id));
            if has_gone {
                self.gone += ticks;
            } else {
                self.seen.insert(id, ticks);
            }
        }
        let seen = self.gone + self.seen.values().sum::<u64>();
        in_time((own + reaped).max(seen))
    }
}

fn in_time(ticks: u64) -> Duration {
    let rate = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_secs(ticks / rate) + Duration::from_nanos(ticks % rate * 1_000_000_000 / rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closer_the_shorter() {
        let millis = Duration::from_millis;
        assert_eq!(pause_of_memory(0), millis(10));
        assert_eq!(pause_of_memory(1 << 20), millis(10));
        assert_eq!(pause_of_memory(512 << 20), millis(250));
        assert_eq!(pause_of_memory(u64::MAX), millis(1000));
        assert_eq!(pause_of_processes(0), millis(50));
        assert_eq!(pause_of_processes(50), millis(200));
        assert_eq!(pause_of_processes(u64::MAX), millis(1000));
        assert_eq!(pause_of_cpu_time(millis(300), 2, millis(10)), millis(150));
        assert_eq!(pause_of_cpu_time(Duration::ZERO, 0, millis(50)), millis(50));
        assert_eq!(pause_of_cpu_time(Duration::MAX, 64, millis(10)), millis(1000));
    }

    /// A machine whose processes have so many MiB in memory, and so many in fair shares.
    fn machine(processes: &[(u32, u64, Option<u64>)]) -> (tempfile::TempDir, ProcFs) {
        let root = tempfile::tempdir().unwrap();
        for (pid, resident, fair) in processes {
            let folder = root.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let pages = (resident << 20) / rustix::param::page_size() as u64;
            std::fs::write(folder.join("statm"), format!("99999 {pages} 0 0 0 0 0\n")).unwrap();
            if let Some(fair) = fair {
                std::fs::write(folder.join("smaps_rollup"), format!("x\nPss: {} kB\n", fair << 10)).unwrap();
            }
        }
        let procfs = ProcFs::with_root(root.path());
        (root, procfs)
    }

    #[test]
    fn shared_memory_is_counted_once_and_asked_for_only_when_it_matters() {
        let (root, procfs) = machine(&[(1, 90, Some(50)), (2, 90, Some(50))]);
        let mut memory = TreeMemory::default();
        assert_eq!(memory.measure(&procfs, &[1, 2], 300 << 20), 180 << 20, "far below: no shares were asked for");
        assert_eq!(memory.measure(&procfs, &[1, 2], 120 << 20), 100 << 20);

        // Were it asked again, these shares would be too much: known growth is enough to say that it is not.
        std::fs::write(root.path().join("1/smaps_rollup"), "Pss: 999999 kB\n").unwrap();
        assert_eq!(memory.measure(&procfs, &[1, 2], 120 << 20), 100 << 20);
        let (_other, grown) = machine(&[(1, 120, Some(80)), (2, 90, Some(50))]);
        assert_eq!(memory.measure(&grown, &[1, 2], 120 << 20), 130 << 20, "grown by 30: asked again");
    }

    #[test]
    fn a_process_that_does_not_tell_its_share_counts_in_full() {
        let (_root, procfs) = machine(&[(1, 90, None), (2, 90, Some(20))]);
        assert_eq!(TreeMemory::default().measure(&procfs, &[1, 2, 3], 100 << 20), 110 << 20);
    }

    /// Writes processes (pid, parent, own ticks, reaped ticks) in place of those there were, and measures below 1.
    fn measure_time(time: &mut TreeTime, root: &std::path::Path, processes: &[(u32, u32, u64, u64)]) -> Duration {
        std::fs::remove_dir_all(root).unwrap();
        for (pid, parent, own, reaped) in processes {
            let folder = root.join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let stat = format!("{pid} (p) S {parent} 1 1 0 -1 0 0 0 0 0 {own} 0 {reaped} 0 20 0 1 0 5 0 0");
            std::fs::write(folder.join("stat"), stat).unwrap();
        }
        let procfs = ProcFs::with_root(root);
        time.measure(&procfs, &Census::take(&procfs).unwrap(), 1)
    }

    #[test]
    fn time_of_children_is_neither_lost_nor_counted_twice() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeTime::default(), in_time(1));
        // The root's own time is not the job's.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 0), (3, 2, 20, 0)]), tick * 30);
        // 3 ended and was reaped by 2, together with children never seen.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 27)]), tick * 37);
        // 2 ended and was reaped by the root.
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 500, 40)]), tick * 40);
    }

    #[test]
    fn children_nobody_takes_note_of_count_as_far_as_they_were_seen() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeTime::default(), in_time(1));
        for child in 3..8 {
            measure_time(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0), (child, 2, 20, 0)]);
        }
        assert_eq!(measure_time(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0)]), tick * 101);
    }
}
