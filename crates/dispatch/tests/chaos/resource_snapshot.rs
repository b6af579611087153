//! Processes, threads and descriptors that a run could leave behind.

use std::time::{Duration, Instant};

use gpupool_confine::process::ProcFs;

/// Counts before a run.
#[derive(Debug, PartialEq, Eq)]
pub struct ResourceSnapshot {
    processes: usize,
    threads: usize,
    descriptors: usize,
}

impl ResourceSnapshot {
    pub fn now() -> Self {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        Self {
            processes: ProcFs::system().descendants(std::process::id()).unwrap().len(),
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
        }
    }

    /// Waits, because ended threads and processes of a killed supervisor may still be exiting.
    pub fn assert_nothing_left(&self) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let now = Self::now();
            if now.is_at_most(self) {
                return;
            }
            assert!(Instant::now() < until, "left behind: {now:?}, before: {self:?}; {}", details());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn is_at_most(&self, before: &Self) -> bool {
        self.processes <= before.processes && self.threads <= before.threads && self.descriptors <= before.descriptors
    }
}

/// Names of the threads and targets of the descriptors.
fn details() -> String {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    let threads: Vec<String> =
        entries("/proc/self/task").iter().filter_map(|path| std::fs::read_to_string(path.join("comm")).ok()).collect();
    let descriptors: Vec<_> =
        entries("/proc/self/fd").iter().filter_map(|path| std::fs::read_link(path).ok()).collect();
    format!("threads {threads:?}, descriptors {descriptors:?}")
}
