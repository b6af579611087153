//! Which cgroup world this machine has, and what we may do in it. Looking changes nothing.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::place::{Place, places};
use super::texts::{Version, memberships, mounts};
use crate::bounds::Enforcement;

/// Which generations of control groups the machine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum World {
    /// Only v2.
    V2,
    /// v1 carries the controllers, v2 knows who is in a group.
    Hybrid,
    /// Only v1.
    V1,
    /// No control groups are mounted.
    None,
}

/// The machine's control groups as this process may use them.
#[derive(Debug, Clone)]
pub struct Cgroups {
    world: World,
    /// Where groups go, the hierarchy that tells who is in a group first; empty if no group can be made.
    pub(super) places: Vec<Place>,
    /// Why `places` is empty.
    pub(super) why_not: String,
}

impl Cgroups {
    /// Looks at this machine. Never fails: what cannot be read cannot be used, and [`Cgroups::describe`] says why.
    pub fn detect() -> Self {
        Self::detect_in(Path::new("/proc/self"), rustix::process::geteuid().is_root())
    }

    /// The same with another directory in the role of `/proc/self` and as root or not.
    pub fn detect_in(proc_self: &Path, as_root: bool) -> Self {
        let read = |file: &str| -> io::Result<String> { std::fs::read_to_string(proc_self.join(file)) };
        let (mountinfo, cgroup) = match (read("mountinfo"), read("cgroup")) {
            (Ok(mountinfo), Ok(cgroup)) => (mountinfo, cgroup),
            (Err(error), _) | (_, Err(error)) => {
                return Self::unusable(World::None, format!("{} cannot be read: {error}", proc_self.display()));
            }
        };
        let mounts = mounts(&mountinfo);
        let has = |version| mounts.iter().any(|mount| mount.version == version);
        let world = match (has(Version::V2), has(Version::V1)) {
            (true, false) => World::V2,
            (true, true) => World::Hybrid,
            (false, true) => World::V1,
            (false, false) => return Self::unusable(World::None, "no cgroup file system is mounted".to_owned()),
        };
        match places(&mounts, &memberships(&cgroup), as_root) {
            Ok(places) => Self { world, places, why_not: String::new() },
            Err(why) => Self::unusable(world, why),
        }
    }

    fn unusable(world: World, why_not: String) -> Self {
        Self { world, places: Vec::new(), why_not }
    }

    /// No control groups, whatever the machine has, for the reason given.
    pub fn none(why: impl Into<String>) -> Self {
        Self::unusable(World::None, why.into())
    }

    /// Which generations the machine has, whether or not this process may use them.
    pub fn world(&self) -> World {
        self.world
    }

    /// Whether groups can be made at all.
    pub fn can_create(&self) -> bool {
        !self.places.is_empty()
    }

    /// Why no groups can be made; empty if they can.
    pub fn why_not(&self) -> &str {
        &self.why_not
    }

    /// Whether a group's host memory can be limited by the kernel.
    pub fn limits_memory(&self) -> bool {
        self.limiting_memory().is_some()
    }

    /// Whether the number of a group's processes can be limited by the kernel.
    pub fn limits_pids(&self) -> bool {
        self.limiting_pids().is_some()
    }

    pub(crate) fn limiting_memory(&self) -> Option<Version> {
        self.version_of(|place| place.memory)
    }

    pub(crate) fn limiting_pids(&self) -> Option<Version> {
        self.version_of(|place| place.pids)
    }

    pub(crate) fn counting_cpu_time(&self) -> Option<Version> {
        self.version_of(|place| place.cpu)
    }

    pub(crate) fn limiting_device_memory(&self) -> Option<Version> {
        self.version_of(|place| place.dmem)
    }

    fn version_of(&self, has: impl Fn(&Place) -> bool) -> Option<Version> {
        self.places.iter().find(|place| has(place)).map(|place| place.version)
    }

    /// The directories below which all groups are made.
    pub fn bases(&self) -> impl Iterator<Item = PathBuf> {
        self.places.iter().map(Place::base)
    }

    /// One line for the log at start-up: which path is in force, and what is done about limits the kernel does not keep.
    pub fn describe(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Cgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let looked_at = Enforcement::of(self).looked_at();
        let Some(tracker) = self.places.first() else {
            return write!(f, "none: {}; {looked_at}", self.why_not);
        };
        let kept = [
            ("memory", self.limits_memory()),
            ("pids", self.limits_pids()),
            ("dmem", self.limiting_device_memory().is_some()),
        ];
        let kept: Vec<&str> = kept.into_iter().filter_map(|(name, there)| there.then_some(name)).collect();
        let kept = if kept.is_empty() { "no limits".to_owned() } else { kept.join("+") };
        let carrier = match self.world {
            World::V2 => "cgroup v2",
            _ => "cgroup v1",
        };
        let kill = match (tracker.version, tracker.freezer) {
            (Version::V2, _) => "v2 for kill",
            (Version::V1, true) => "kill by freezer and signals",
            (Version::V1, false) => "kill by signals",
        };
        write!(f, "{carrier} {kept}, {kill}; {looked_at}; groups below {}", tracker.base().display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with the two texts of a machine; `@` stands for a directory that plays `/sys/fs/cgroup`.
    fn machine(mountinfo: &str, cgroup: &str, directories: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        for directory in directories {
            let path = sys.join(directory);
            std::fs::create_dir_all(&path).unwrap();
            for file in ["cgroup.procs", "cgroup.subtree_control", "cgroup.type"] {
                std::fs::write(path.join(file), "").unwrap();
            }
        }
        std::fs::write(root.path().join("mountinfo"), mountinfo.replace('@', sys.to_str().unwrap())).unwrap();
        std::fs::write(root.path().join("cgroup"), cgroup).unwrap();
        (root, sys)
    }

    const V2: &str = "30 23 0:26 / @ rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "31 30 0:30 / @/memory rw - cgroup cgroup rw,memory\n\
        32 30 0:31 / @/pids rw - cgroup cgroup rw,pids\n\
        33 30 0:32 / @/freezer rw - cgroup cgroup rw,freezer\n\
        34 30 0:33 / @/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
    const HYBRID_V2: &str = "35 30 0:34 / @/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn v2_alone_is_told_with_its_controllers_and_place() {
        let (root, sys) = machine(V2, "0::/system.slice/gpupool.service\n", &["", "system.slice/gpupool.service"]);
        std::fs::write(sys.join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert_eq!(cgroups.world(), World::V2);
        assert!(cgroups.limits_memory() && cgroups.limits_pids(), "{cgroups:?}");
        let expected = format!(
            "cgroup v2 memory+pids, v2 for kill; CPU time looked at every 10 ms to 1 s; groups below {}/gpupool",
            sys.display()
        );
        assert_eq!(cgroups.describe(), expected);

        std::fs::write(sys.join("cgroup.controllers"), "cpu memory pids dmem\n").unwrap();
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert!(cgroups.describe().starts_with("cgroup v2 memory+pids+dmem, v2 for kill"), "{cgroups}");
    }

    #[test]
    fn the_memory_of_devices_is_limited_where_the_kernel_can() {
        let (root, sys) = machine(V2, "0::/\n", &["", "gpupool"]);
        std::fs::write(sys.join("cgroup.controllers"), "dmem\n").unwrap();
        let group = Cgroups::detect_in(root.path(), true).create("job", &Default::default()).unwrap();
        for directory in [&sys, &sys.join("gpupool")] {
            assert_eq!(std::fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap(), "+dmem");
        }
        let file = sys.join("gpupool/job/dmem.max");
        std::fs::write(&file, "drm/0000:03:00.0/vram0 max\n").unwrap();
        let limit = |address: &str| [super::super::DeviceMemory { pci_address: address.into(), bytes: 5 << 30 }];
        group.limit_device_memory(&limit("0000:03:00.0")).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("drm/0000:03:00.0/vram0 5368709120\n"));
        let refused = group.limit_device_memory(&limit("0000:04:00.0")).unwrap_err().to_string();
        assert!(refused.contains("the driver of 0000:04:00.0 does not take part"), "{refused}");
    }

    #[test]
    fn hybrid_takes_limits_from_v1_and_the_kill_from_v2() {
        let text = format!("{V1}{HYBRID_V2}");
        let cgroup = "4:memory:/some/where\n3:pids:/\n2:freezer:/\n0::/\n";
        let (root, sys) = machine(&text, cgroup, &["memory/some/where", "memory", "pids", "freezer", "unified"]);
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert_eq!(cgroups.world(), World::Hybrid);
        let bases: Vec<PathBuf> = cgroups.bases().collect();
        let expected = ["unified", "memory", "pids"].map(|name| sys.join(name).join("gpupool"));
        assert_eq!(bases, expected);
        assert!(cgroups.describe().starts_with("cgroup v1 memory+pids, v2 for kill"), "{cgroups}");
    }

    #[test]
    fn v1_alone_is_tracked_by_its_freezer() {
        let (root, sys) = machine(V1, "4:memory:/\n3:pids:/\n2:freezer:/\n", &["memory", "pids", "freezer"]);
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert_eq!(cgroups.world(), World::V1);
        assert_eq!(cgroups.bases().next().unwrap(), sys.join("freezer/gpupool"));
        assert!(cgroups.describe().starts_with("cgroup v1 memory+pids, kill by freezer"), "{cgroups}");
    }

    #[test]
    fn machines_without_usable_groups_say_why() {
        let (root, _) = machine("22 1 0:20 / /proc rw - proc proc rw\n", "0::/\n", &[]);
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert_eq!(cgroups.world(), World::None);
        assert_eq!(
            cgroups.describe(),
            "none: no cgroup file system is mounted; host memory looked at every 10 ms to 1 s, \
             processes looked at every 50 ms to 1 s, CPU time looked at every 50 ms to 1 s"
        );

        let (root, sys) = machine(&V2.replace(" rw,", " ro,"), "0::/\n", &[""]);
        let cgroups = Cgroups::detect_in(root.path(), true);
        assert_eq!(cgroups.world(), World::V2);
        assert!(cgroups.describe().contains(&format!("{} is mounted read-only", sys.display())), "{cgroups}");

        let gone = Cgroups::detect_in(Path::new("/nonexistent"), true);
        assert!(gone.describe().starts_with("none: /nonexistent cannot be read"), "{gone}");
    }

    #[test]
    fn controllers_are_not_promised_where_strangers_sit_in_the_group() {
        let (root, sys) = machine(V2, "0::/app.scope\n", &["app.scope"]);
        let scope = sys.join("app.scope");
        std::fs::write(scope.join("cgroup.controllers"), "memory pids\n").unwrap();
        let ours = std::process::id().to_string();
        std::fs::write(scope.join("cgroup.procs"), format!("{ours}\n")).unwrap();
        assert!(Cgroups::detect_in(root.path(), false).limits_memory());

        std::fs::write(scope.join("cgroup.procs"), format!("1\n{ours}\n")).unwrap();
        let cgroups = Cgroups::detect_in(root.path(), false);
        assert!(cgroups.can_create() && !cgroups.limits_memory() && !cgroups.limits_pids());
        assert!(cgroups.describe().starts_with("cgroup v2 no limits, v2 for kill"), "{cgroups}");

        // Handed down before: strangers do no harm any more.
        std::fs::write(scope.join("cgroup.subtree_control"), "pids\n").unwrap();
        assert!(Cgroups::detect_in(root.path(), false).limits_pids());
    }

    #[test]
    fn in_the_leaf_of_a_delegated_group_the_groups_stay_beside_it() {
        let (root, sys) = machine(V2, "0::/unit.service/agent\n", &["unit.service", "unit.service/agent"]);
        let cgroups = Cgroups::detect_in(root.path(), false);
        assert_eq!(cgroups.bases().next().unwrap(), sys.join("unit.service/gpupool"));
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_hierarchy() {
        let text = V2.replace("0:26 / @", "0:26 /docker/abc @");
        let (root, sys) = machine(&text, "0::/docker/abc/leaf\n", &["", "leaf"]);
        std::fs::write(sys.join("leaf/cgroup.controllers"), "memory\n").unwrap();
        // An ordinary user gets groups below his own, and only because it is writable.
        let cgroups = Cgroups::detect_in(root.path(), false);
        assert_eq!(cgroups.bases().next().unwrap(), sys.join("leaf/gpupool"));
        assert!(cgroups.limits_memory() && !cgroups.limits_pids());
    }
}
