//! How much memory a process tree uses: the watch where no memory cgroup can be had.
//!
//! Measures only; how often ([`crate::limits::TREE_MEMORY_INTERVAL`]) and what to do about it is the caller's.

use std::io;

use super::ProcFs;

/// What a process and its descendants use right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeMemory {
    /// Bytes in use; memory shared between processes is counted once where the kernel tells the shares.
    pub bytes: u64,
    /// How many processes were counted.
    pub processes: usize,
}

impl TreeMemory {
    /// Measures the process and all its descendants; no bytes and no processes if it has gone.
    pub fn measure(pid: u32) -> io::Result<Self> {
        Self::measure_in(&ProcFs::here(), pid)
    }

    /// The same in a directory laid out like `/proc`.
    pub fn measure_in(procfs: &ProcFs, pid: u32) -> io::Result<Self> {
        let mut sum = Self { bytes: 0, processes: 0 };
        let descendants = procfs.tree(pid)?.into_iter().map(|id| id.pid);
        for pid in std::iter::once(pid).chain(descendants) {
            let Some(bytes) = memory_of(procfs, pid)? else {
                continue;
            };
            sum.bytes = sum.bytes.saturating_add(bytes);
            sum.processes += 1;
        }
        Ok(sum)
    }
}

/// The proportional share of one process, or its resident pages where the share may not be read (another user's
/// process) or is not told (old kernels).
fn memory_of(procfs: &ProcFs, pid: u32) -> io::Result<Option<u64>> {
    if let Ok(Some(text)) = procfs.read(pid, "smaps_rollup")
        && let Some(bytes) = kibibytes(&text, "Pss:")
    {
        return Ok(Some(bytes));
    }
    // A process that has ended, or belongs to the kernel, has no such line: it uses nothing.
    let status = procfs.read(pid, "status")?;
    Ok(status.map(|text| kibibytes(&text, "VmRSS:").unwrap_or(0)))
}

fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;

    use rustix::process::Signal;

    use super::super::ProcessHandle;
    use super::*;

    #[test]
    fn shares_are_read_and_nonsense_is_not() {
        assert_eq!(
            kibibytes("5600-7ff ---p 00 00:00 0 [rollup]\nRss: 900 kB\nPss:    123 kB\n", "Pss:"),
            Some(123 * 1024)
        );
        assert_eq!(kibibytes("Rss: 900 kB\n", "Pss:"), None);
        assert_eq!(kibibytes("Pss: 99999999999999999999 kB\n", "Pss:"), None);
    }

    #[test]
    fn a_tree_counts_the_memory_of_children() {
        let hog = "b = b'x' * (64 << 20); import os, time; os.write(1, b'ready\\n'); time.sleep(600)";
        let mut child = std::process::Command::new("sh")
            .args(["-c", r#"python3 -c "$0" & python3 -c "$0" & wait"#, hog])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let ready: Vec<String> = lines.take(2).map(Result::unwrap).collect();
        let measured = TreeMemory::measure(child.id()).unwrap();
        for id in ProcFs::here().tree(child.id()).unwrap() {
            let handle = ProcessHandle::open(id).unwrap();
            handle.map(|handle| handle.signal(Signal::KILL).unwrap());
        }
        child.wait().unwrap();
        assert_eq!(ready, ["ready", "ready"]);
        assert!(measured.processes >= 3, "the shell and two children: {measured:?}");
        assert!(measured.bytes > 128 << 20 && measured.bytes < 400 << 20, "{measured:?}");
        assert_eq!(TreeMemory::measure(child.id()).unwrap(), TreeMemory { bytes: 0, processes: 0 });
    }
}
