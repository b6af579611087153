//! Looking at the memory of a group that somebody else made: reading only.

use std::path::{Path, PathBuf};

use super::place::own_directory;
use super::texts::{Version, memberships, mounts};

/// The group that counts a process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryGroup {
    /// The file that tells how many processes were killed for want of memory.
    kills: PathBuf,
}

impl MemoryGroup {
    /// The one a process is in now; `None` where it has gone, or no group counts memory here.
    pub fn of(pid: u32) -> Option<Self> {
        Self::of_in(&PathBuf::from(format!("/proc/{pid}")))
    }

    fn of_in(process: &Path) -> Option<Self> {
        let read = |file: &str| std::fs::read_to_string(process.join(file)).ok();
        let (mounts, memberships) = (mounts(&read("mountinfo")?), memberships(&read("cgroup")?));
        let counts = |file: PathBuf| file.is_file().then_some(Self { kills: file });
        let v1 = mounts.iter().find(|mount| mount.controllers.iter().any(|name| name == "memory"));
        if let Some(mount) = v1 {
            return counts(own_directory(mount, &memberships).join(kills_file(Version::V1)));
        }
        let v2 = mounts.iter().find(|mount| mount.version == Version::V2)?;
        counts(own_directory(v2, &memberships).join(kills_file(Version::V2)))
    }

    /// How many processes the kernel killed because the group was over its limit; `None` once the group is gone.
    pub fn oom_kills(&self) -> Option<u64> {
        kills_told(&std::fs::read_to_string(&self.kills).ok()?)
    }
}

/// Where a group tells how many of its processes were killed for want of memory.
pub(super) fn kills_file(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.oom_control",
        Version::V2 => "memory.events",
    }
}

/// The number in `memory.events` or `memory.oom_control`.
pub(super) fn kills_told(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(mountinfo: &str, cgroup: &str, file: &str, text: &str) -> (tempfile::TempDir, Option<MemoryGroup>) {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("sys").join(file);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, text).unwrap();
        let sys = root.path().join("sys").display().to_string();
        std::fs::write(root.path().join("mountinfo"), mountinfo.replace('@', &sys)).unwrap();
        std::fs::write(root.path().join("cgroup"), cgroup).unwrap();
        let found = MemoryGroup::of_in(root.path());
        (root, found)
    }

    #[test]
    fn the_group_is_found_in_both_worlds() {
        let v2 = "30 23 0:26 / @ rw - cgroup2 cgroup2 rw\n";
        let (_root, found) = machine(v2, "0::/gpupool/x\n", "gpupool/x/memory.events", "low 0\noom 3\noom_kill 2\n");
        assert_eq!(found.unwrap().oom_kills(), Some(2));

        let hybrid = "31 30 0:30 / @/memory rw - cgroup cgroup rw,memory\n35 30 0:34 / @/unified rw - cgroup2 c rw\n";
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n";
        let (_root, found) = machine(hybrid, "4:memory:/g/x\n0::/g/x\n", "memory/g/x/memory.oom_control", text);
        assert_eq!(found.unwrap().oom_kills(), Some(1));

        let (_root, found) = machine(v2, "0::/elsewhere\n", "gpupool/x/memory.events", "");
        assert_eq!(found, None);
    }
}
