//! The processor time of a job's processes together, where no group counts it.
//!
//! A process that ended moves its time to the parent that takes note of it. A parent that ignores its children loses
//! theirs; what we saw of them ourselves is then the better number. Both can only be too small, except for a moment, when
//! a child's time moves while we look: who acts on it looks twice.

use std::collections::HashMap;
use std::time::Duration;

use crate::process::{Census, ProcFs, ProcessId};

/// What is known of a job's processor time.
#[derive(Debug, Default)]
pub(super) struct TreeTime {
    /// What each living process had used itself, in ticks.
    seen: HashMap<ProcessId, u64>,
    /// The same of those that have gone.
    gone: u64,
}

impl TreeTime {
    /// The time used by everything below the root, and by what the root took note of.
    pub(super) fn measure(&mut self, procfs: &ProcFs, census: &Census, root: u32) -> Duration {
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

    /// Writes processes (pid, parent, own ticks, reaped ticks) in place of those there were, and measures below 1.
    fn measure(time: &mut TreeTime, root: &std::path::Path, processes: &[(u32, u32, u64, u64)]) -> Duration {
        std::fs::remove_dir_all(root).unwrap();
        for (pid, parent, own, reaped) in processes {
            let folder = root.join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let stat = format!("{pid} (p) S {parent} 1 1 0 -1 0 0 0 0 0 {own} 0 {reaped} 0 20 0 1 0 5 0 0");
            std::fs::write(folder.join("stat"), stat).unwrap();
        }
        let procfs = ProcFs::at(root);
        time.measure(&procfs, &Census::take(&procfs).unwrap(), 1)
    }

    #[test]
    fn time_of_children_is_neither_lost_nor_counted_twice() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeTime::default(), in_time(1));
        // The root's own time is not the job's.
        assert_eq!(measure(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 0), (3, 2, 20, 0)]), tick * 30);
        // 3 ended and was reaped by 2, together with children never seen.
        assert_eq!(measure(&mut time, root, &[(1, 0, 500, 0), (2, 1, 10, 27)]), tick * 37);
        // 2 ended and was reaped by the root.
        assert_eq!(measure(&mut time, root, &[(1, 0, 500, 40)]), tick * 40);
    }

    #[test]
    fn children_nobody_takes_note_of_count_as_far_as_they_were_seen() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (mut time, tick) = (TreeTime::default(), in_time(1));
        for child in 3..8 {
            measure(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0), (child, 2, 20, 0)]);
        }
        assert_eq!(measure(&mut time, root, &[(1, 0, 0, 0), (2, 1, 1, 0)]), tick * 101);
    }
}
