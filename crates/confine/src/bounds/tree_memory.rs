//! The memory of a job's processes together.
//!
//! Cheap first: the pages each has in memory, where shared ones count for everybody who shares them. Only when that is
//! over the bound the kernel is asked for fair shares, which is slow; between two such questions the memory cannot have
//! grown by more than what each process grew by.

use std::collections::HashMap;
use std::time::Instant;

use crate::limits::FAIR_SHARE_AGE;
use crate::process::{ProcFs, proportional, resident};

/// What is known of a job's memory.
#[derive(Debug, Default)]
pub(super) struct TreeMemory {
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
    pub(super) fn measure(&mut self, procfs: &ProcFs, pids: &[u32], allowed: u64) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let procfs = ProcFs::at(root.path());
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
}
