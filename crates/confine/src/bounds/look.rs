//! One job under watch: what it may use, what is known of it, and a look at it.

use std::time::Duration;

use super::bound::{Bounds, Usage};
use super::enforcement::{Enforcement, Means};
use super::excess::Excess;
use super::pace;
use super::processors::TreeTime;
use super::table::Table;
use super::tree_memory::TreeMemory;
use crate::cgroup::{Meter, Version};
use crate::limits::{KERNEL_KILLS_PAUSE, LONGEST_LOOK_PAUSE, SHORTEST_LOOK_PAUSE, SHORTEST_TREE_PAUSE};
use crate::process::{ProcessId, Stat};

/// A job under watch.
#[derive(Debug)]
pub(super) struct Watched {
    job: ProcessId,
    /// The job's parent, once known: all of the job is below it, also what lost its own parent.
    keeper: Option<ProcessId>,
    /// Of the job's group, if it has one.
    meter: Meter,
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
    Over(Excess),
    /// There is no job any more.
    Gone,
}

/// Why a job's processes are not known.
enum Unseen {
    Now,
    Gone,
}

impl From<Unseen> for Verdict {
    fn from(unseen: Unseen) -> Self {
        match unseen {
            Unseen::Now => Self::Fine(SHORTEST_TREE_PAUSE),
            Unseen::Gone => Self::Gone,
        }
    }
}

impl Watched {
    /// Takes over what the kernel does not keep.
    pub(super) fn new(job: ProcessId, meter: Meter, bounds: &Bounds, enforcement: &Enforcement) -> Self {
        let is_looked_at = |means: &Option<Means>| matches!(means, Some(Means::Looking { .. }));
        // v2 kills all of a job at once, and its end tells everything; v1 kills one process, and the rest goes on.
        let kills_one = enforcement.host_memory == Some(Means::Kernel(Version::V1));
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
                Verdict::Fine(again) => pause = pause.min(again),
                other => return other,
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
    pub(super) fn usage(&mut self, table: &mut Table) -> Usage {
        let by_tree = |watched: &mut Self, table: &mut Table| {
            let pids = watched.members(table, Duration::ZERO, |stat| stat.pid).ok()?;
            Some(watched.tree_memory.measure(&table.procfs, &pids, 0))
        };
        Usage {
            host_memory: self.meter.host_memory().or_else(|| by_tree(self, table)),
            processes: self.meter.processes().or_else(|| self.count(table).ok()),
            cpu_time: self.time_in_all(table).ok().map(|used| used.saturating_sub(self.cpu_start)),
        }
    }

    /// Whether the kernel has killed one of its processes for the memory of all, and left the others.
    pub(super) fn killed_in_part(&self) -> Option<Excess> {
        let allowed = self.kernel_kills?;
        self.meter.oom_kills().filter(|kills| *kills > 0).map(|_| Excess::HostMemory { used: None, allowed })
    }

    fn look_at_kills(&mut self, _: &mut Table) -> Verdict {
        match self.killed_in_part() {
            Some(excess) => Verdict::Over(excess),
            None if self.kernel_kills.is_some() => Verdict::Fine(KERNEL_KILLS_PAUSE),
            None => Verdict::Fine(LONGEST_LOOK_PAUSE),
        }
    }

    fn look_at_memory(&mut self, table: &mut Table) -> Verdict {
        let Some(allowed) = self.memory else { return Verdict::Fine(LONGEST_LOOK_PAUSE) };
        let pids = match self.members(table, table.age_for_memory(), |stat| stat.pid) {
            Ok(pids) => pids,
            Err(unseen) => return unseen.into(),
        };
        match self.tree_memory.measure(&table.procfs, &pids, allowed) {
            used if used > allowed => Verdict::Over(Excess::HostMemory { used: Some(used), allowed }),
            used => Verdict::Fine(pace::memory(allowed - used)),
        }
    }

    fn look_at_processes(&mut self, table: &mut Table) -> Verdict {
        let Some(allowed) = self.processes else { return Verdict::Fine(LONGEST_LOOK_PAUSE) };
        match self.count(table) {
            Ok(used) if used > allowed => Verdict::Over(Excess::Processes { used, allowed }),
            Ok(used) => Verdict::Fine(pace::processes(allowed - used)),
            Err(unseen) => unseen.into(),
        }
    }

    fn look_at_time(&mut self, table: &mut Table) -> Verdict {
        let Some(allowed) = self.cpu_time else { return Verdict::Fine(LONGEST_LOOK_PAUSE) };
        let used = match self.time_in_all(table) {
            Ok(used) => used.saturating_sub(self.cpu_start),
            Err(unseen) => return unseen.into(),
        };
        let by_group = self.meter.counts_cpu_time().is_some();
        let shortest = if by_group { SHORTEST_LOOK_PAUSE } else { SHORTEST_TREE_PAUSE };
        let was_over = std::mem::replace(&mut self.was_over_time, used > allowed);
        match (used > allowed, was_over || by_group) {
            (true, true) => Verdict::Over(Excess::CpuTime { used, allowed }),
            (true, false) => Verdict::Fine(SHORTEST_LOOK_PAUSE),
            (false, _) => Verdict::Fine(pace::cpu_time(allowed - used, processors(), shortest)),
        }
    }

    fn count(&mut self, table: &mut Table) -> Result<u64, Unseen> {
        Ok(self.members(table, SHORTEST_LOOK_PAUSE / 2, |stat| stat.threads)?.iter().sum())
    }

    /// The processor time since the job started.
    fn time_in_all(&mut self, table: &mut Table) -> Result<Duration, Unseen> {
        if self.meter.counts_cpu_time().is_some() {
            return self.meter.cpu_time().ok_or(Unseen::Gone);
        }
        let root = self.root(table)?;
        let procfs = table.procfs.clone();
        let census = table.at_most(SHORTEST_LOOK_PAUSE / 2).ok_or(Unseen::Now)?;
        Ok(self.tree_time.measure(&procfs, census, root.pid))
    }

    /// Something about each process of the job.
    fn members<T>(&mut self, table: &mut Table, age: Duration, of: fn(&Stat) -> T) -> Result<Vec<T>, Unseen> {
        let root = self.root(table)?;
        let census = table.at_most(age).ok_or(Unseen::Now)?;
        Ok(census.below(root.pid).into_iter().map(of).collect())
    }

    /// The keeper, if it lives.
    fn root(&mut self, table: &Table) -> Result<ProcessId, Unseen> {
        let find = |id: ProcessId| match table.procfs.stat(id.pid) {
            Ok(Some(stat)) if stat.started == id.started => Ok(stat),
            Ok(_) => Err(Unseen::Gone),
            Err(_) => Err(Unseen::Now),
        };
        match self.keeper {
            Some(keeper) => find(keeper).map(|stat| stat.id()),
            None => {
                let parent = find(self.job)?.parent;
                let keeper = table.procfs.stat(parent).map_err(|_| Unseen::Now)?.ok_or(Unseen::Gone)?.id();
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
