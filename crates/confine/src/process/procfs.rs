//! Looking at processes through `/proc`. Processes may vanish at any moment while we look; that is never an error.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::limits::PROC_FILE_LENGTH;

use super::{Census, ProcessId, Stat};

/// Where processes are looked up: `/proc`, or a directory like it in tests.
#[derive(Debug, Clone)]
pub struct ProcFs {
    root: PathBuf,
}

impl ProcFs {
    /// The machine's own `/proc`.
    pub fn here() -> Self {
        Self::at("/proc")
    }

    /// A directory laid out like `/proc`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// All descendants of a process, parents before children, without the process itself.
    pub fn tree(&self, pid: u32) -> io::Result<Vec<ProcessId>> {
        if self.stat(pid)?.is_none() {
            return Ok(Vec::new());
        }
        Ok(Census::take(self)?.below(pid).into_iter().map(Stat::id).collect())
    }

    /// Every process this user can see right now.
    pub fn all(&self) -> io::Result<Vec<Stat>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.root)? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.stat(pid) {
                Ok(stat) => found.extend(stat),
                // To take this for "there are none" would let processes out of sight.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return Err(error);
                }
                // One that may not be looked at must not hide all others.
                Err(_) => {}
            }
        }
        Ok(found)
    }

    /// A process's `stat` line; `None` if there is no such process (or this user may not see it).
    pub fn stat(&self, pid: u32) -> io::Result<Option<Stat>> {
        let Some(text) = self.read(pid, "stat")? else {
            return Ok(None);
        };
        match Stat::parse(&text) {
            Some(stat) => Ok(Some(stat)),
            None => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}/{pid}/stat does not hold a process: {text:?}", self.root.display()),
            )),
        }
    }

    /// The lines of `/proc/PID/cgroup`: in which control groups a process is.
    pub fn cgroup_of(&self, pid: u32) -> io::Result<Option<String>> {
        self.read(pid, "cgroup")
    }

    /// The real user id of a process.
    pub fn uid(&self, pid: u32) -> io::Result<Option<u32>> {
        let Some(text) = self.read(pid, "status")? else {
            return Ok(None);
        };
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
        Ok(line.and_then(|ids| ids.split_ascii_whitespace().next()?.parse().ok()))
    }

    /// One file of a process; `None` if the process has gone.
    pub(crate) fn read(&self, pid: u32, file: &str) -> io::Result<Option<String>> {
        match read_short(&self.root.join(format!("{pid}/{file}"))) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A file as the kernel writes them, of a few hundred bytes: without asking for its length first, which it does not have.
fn read_short(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(1024);
    File::open(path)?.take(PROC_FILE_LENGTH).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proc_with(processes: &[(u32, u32, u64)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (pid, parent, started) in processes {
            let directory = root.path().join(pid.to_string());
            std::fs::create_dir(&directory).unwrap();
            let stat = format!("{pid} (p) S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0");
            std::fs::write(directory.join("stat"), stat).unwrap();
        }
        // What /proc also holds: things that are no process, and a process that went away between listing and reading.
        std::fs::create_dir(root.path().join("sys")).unwrap();
        std::fs::create_dir(root.path().join("4000")).unwrap();
        std::fs::create_dir(root.path().join("4001")).unwrap();
        std::fs::write(root.path().join("4001/stat"), "nonsense").unwrap();
        root
    }

    fn tree_of(pid: u32, processes: &[(u32, u32, u64)]) -> Vec<u32> {
        let root = proc_with(processes);
        let mut pids: Vec<u32> = ProcFs::at(root.path()).tree(pid).unwrap().iter().map(|id| id.pid).collect();
        pids.sort_unstable();
        pids
    }

    #[test]
    fn a_tree_holds_all_descendants_and_nobody_else() {
        let processes = [(1, 0, 0), (10, 1, 5), (11, 10, 6), (12, 11, 7), (13, 10, 7), (20, 1, 5), (21, 20, 9)];
        assert_eq!(tree_of(10, &processes), [11, 12, 13]);
        assert_eq!(tree_of(12, &processes), []);
        assert_eq!(tree_of(99, &processes), []);
    }

    #[test]
    fn a_child_older_than_its_parent_is_not_its_child() {
        assert_eq!(tree_of(10, &[(10, 1, 50), (11, 10, 49), (12, 11, 60)]), []);
    }

    #[test]
    fn a_circle_ends() {
        assert_eq!(tree_of(10, &[(10, 11, 5), (11, 10, 5)]), [11]);
    }
}
