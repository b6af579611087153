//! Detection of the machine's cgroup layout, of the parent of our cgroups in each hierarchy, and of the permitted
//! operations. Detection changes nothing.
//!
//! Root creates cgroups at the top of the hierarchy, unless systemd delegated the unit's own cgroup to us. Other users
//! create them below their own cgroup, if it is writable. In v2 a cgroup that enables controllers for its children may
//! hold no process itself. We therefore move ourselves and our descendants from a delegated cgroup into a leaf `agent`,
//! if no foreign process shares the cgroup.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use crate::bounds::BoundsEnforcement;
use crate::limits::FOREIGN_PROCESS_CHECKS;
use crate::process::ProcFs;

/// Generations of control groups that the machine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupLayout {
    /// Only v2.
    V2,
    /// v1 has the controllers, v2 tracks the processes.
    Hybrid,
    /// Only v1.
    V1,
    /// No control groups are mounted.
    None,
}

/// The machine's control groups, as far as this process may use them.
#[derive(Debug, Clone)]
pub struct CgroupManager {
    layout: CgroupLayout,
    /// Hierarchies for new cgroups, the one that tracks processes first; empty if no cgroup can be created.
    pub(super) hierarchies: Vec<UsableHierarchy>,
    /// Reason why `hierarchies` is empty.
    pub(super) unavailable_reason: String,
}

impl CgroupManager {
    /// Examines this machine. Never fails: unreadable parts cannot be used, and [`CgroupManager::describe`] gives the
    /// reason.
    pub fn detect() -> Self {
        Self::detect_in(Path::new("/proc/self"), rustix::process::geteuid().is_root())
    }

    /// Examines a machine with another directory in place of `/proc/self`, as root or not.
    pub fn detect_in(proc_self: &Path, as_root: bool) -> Self {
        let read = |file: &str| -> io::Result<String> { std::fs::read_to_string(proc_self.join(file)) };
        let (mountinfo, cgroup) = match (read("mountinfo"), read("cgroup")) {
            (Ok(mountinfo), Ok(cgroup)) => (mountinfo, cgroup),
            (Err(error), _) | (_, Err(error)) => {
                return Self::unusable(CgroupLayout::None, format!("cannot read {}: {error}", proc_self.display()));
            }
        };
        let mounts = parse_mounts(&mountinfo);
        let has = |version| mounts.iter().any(|mount| mount.version == version);
        let layout = match (has(CgroupVersion::V2), has(CgroupVersion::V1)) {
            (true, false) => CgroupLayout::V2,
            (true, true) => CgroupLayout::Hybrid,
            (false, true) => CgroupLayout::V1,
            (false, false) => return Self::unusable(CgroupLayout::None, "no cgroup file system is mounted".to_owned()),
        };
        match usable_hierarchies(&mounts, &parse_memberships(&cgroup), as_root) {
            Ok(hierarchies) => Self { layout, hierarchies, unavailable_reason: String::new() },
            Err(why) => Self::unusable(layout, why),
        }
    }

    fn unusable(layout: CgroupLayout, unavailable_reason: String) -> Self {
        Self { layout, hierarchies: Vec::new(), unavailable_reason }
    }

    /// Returns a manager without cgroups, for the given reason.
    pub fn unavailable(why: impl Into<String>) -> Self {
        Self::unusable(CgroupLayout::None, why.into())
    }

    /// Returns the generations that the machine has, usable or not.
    pub fn layout(&self) -> CgroupLayout {
        self.layout
    }

    /// Whether cgroups can be created.
    pub fn can_create(&self) -> bool {
        !self.hierarchies.is_empty()
    }

    /// Returns the reason why no cgroup can be created; empty if one can.
    pub fn unavailable_reason(&self) -> &str {
        &self.unavailable_reason
    }

    /// Whether the kernel can limit the host memory of a cgroup.
    pub fn limits_memory(&self) -> bool {
        self.hierarchies.iter().any(|hierarchy| hierarchy.memory)
    }

    /// Whether the kernel can limit the number of processes of a cgroup.
    pub fn limits_pids(&self) -> bool {
        self.hierarchies.iter().any(|hierarchy| hierarchy.pids)
    }

    /// Returns the generation of the first hierarchy that matches.
    pub(crate) fn version_with(&self, has: impl Fn(&UsableHierarchy) -> bool) -> Option<CgroupVersion> {
        self.hierarchies.iter().find(|hierarchy| has(hierarchy)).map(|hierarchy| hierarchy.version)
    }

    /// Returns the directories that hold all our cgroups.
    pub fn base_paths(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchies.iter().map(UsableHierarchy::base)
    }

    /// Returns one line for the log at start-up: the enforcement in force, and the bounds that are polled.
    pub fn describe(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for CgroupManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let polling = BoundsEnforcement::for_cgroups(self).describe_polling();
        let Some(tracker) = self.hierarchies.first() else {
            return write!(f, "none: {}; {polling}", self.unavailable_reason);
        };
        let kept = [
            ("memory", self.limits_memory()),
            ("pids", self.limits_pids()),
            ("dmem", self.hierarchies.iter().any(|hierarchy| hierarchy.dmem)),
        ];
        let kept: Vec<&str> = kept.into_iter().filter_map(|(name, there)| there.then_some(name)).collect();
        let kept = if kept.is_empty() { "no limits".to_owned() } else { kept.join("+") };
        let carrier = match self.layout {
            CgroupLayout::V2 => "cgroup v2",
            _ => "cgroup v1",
        };
        let kill = match (tracker.version, tracker.freezer) {
            (CgroupVersion::V2, _) => "v2 for kill",
            (CgroupVersion::V1, true) => "kill by freezer and signals",
            (CgroupVersion::V1, false) => "kill by signals",
        };
        write!(f, "{carrier} {kept}, {kill}; {polling}; groups below {}", tracker.base().display())
    }
}

/// Directory that holds all our cgroups.
pub(super) const BASE_DIRECTORY: &str = "gpupool";

/// Leaf into which we move ourselves in a delegated v2 cgroup.
pub(super) const AGENT_LEAF: &str = "agent";

/// A hierarchy in which we may create cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UsableHierarchy {
    pub version: CgroupVersion,
    /// Cgroup that holds `gpupool/`.
    pub parent: PathBuf,
    pub memory: bool,
    pub pids: bool,
    /// Whether it counts CPU time.
    pub cpu: bool,
    /// Whether it limits device memory.
    pub dmem: bool,
    pub freezer: bool,
}

impl UsableHierarchy {
    pub fn base(&self) -> PathBuf {
        self.parent.join(BASE_DIRECTORY)
    }
}

/// Returns the hierarchies for new cgroups, the one that tracks processes first, or the reason why there are none.
fn usable_hierarchies(
    mounts: &[CgroupMount],
    memberships: &[CgroupMembership],
    as_root: bool,
) -> Result<Vec<UsableHierarchy>, String> {
    let mut refusals = Vec::new();
    let mut usable = |mount: Option<&CgroupMount>| -> Option<UsableHierarchy> {
        let mount = mount?;
        match usable_hierarchy(mount, memberships, as_root) {
            Ok(hierarchy) => Some(hierarchy),
            Err(why) => {
                refusals.push(why);
                None
            }
        }
    };
    let v1 = |controller: &str| mounts.iter().find(|mount| mount.controllers.iter().any(|name| name == controller));
    let mut hierarchies = Vec::new();
    hierarchies.extend(usable(mounts.iter().find(|mount| mount.version == CgroupVersion::V2)));
    if hierarchies.is_empty() {
        hierarchies.extend(usable(v1("freezer")));
    }
    if !hierarchies.iter().any(|hierarchy| hierarchy.memory) {
        hierarchies.extend(usable(v1("memory")));
    }
    if !hierarchies.iter().any(|hierarchy| hierarchy.pids) {
        hierarchies.extend(usable(v1("pids")));
    }
    // CPU time is only counted: no reason to create cgroups without another hierarchy.
    if !hierarchies.is_empty() && !hierarchies.iter().any(|hierarchy| hierarchy.cpu) {
        hierarchies.extend(usable(v1("cpuacct")));
    }
    if hierarchies.is_empty() {
        return Err(match refusals.first() {
            Some(why) => why.clone(),
            None => "no hierarchy with the memory, pids or freezer controller is mounted".to_owned(),
        });
    }
    Ok(hierarchies)
}

fn usable_hierarchy(
    mount: &CgroupMount,
    memberships: &[CgroupMembership],
    as_root: bool,
) -> Result<UsableHierarchy, String> {
    if mount.read_only {
        return Err(format!("{} is mounted read-only", mount.point.display()));
    }
    let own = own_directory(mount, memberships);
    let parent = match mount.version {
        CgroupVersion::V1 if as_root => mount.point.clone(),
        CgroupVersion::V1 => own,
        CgroupVersion::V2 => v2_parent(&mount.point, own, as_root),
    };
    if !is_writable(&parent) {
        return Err(format!(
            "{} is not writable (run as root, in a systemd unit with Delegate=yes, or by systemd-run --user --scope -p Delegate=yes)",
            parent.display()
        ));
    }
    let controllers = match mount.version {
        CgroupVersion::V1 => mount.controllers.clone(),
        CgroupVersion::V2 => available_controllers(&parent),
    };
    let has = |controller: &str| controllers.iter().any(|name| name == controller);
    let is_v2 = mount.version == CgroupVersion::V2;
    Ok(UsableHierarchy {
        version: mount.version,
        memory: has("memory"),
        pids: has("pids"),
        // Every v2 cgroup counts CPU time and can be frozen, without any controller.
        cpu: is_v2 || has("cpuacct"),
        dmem: is_v2 && has("dmem"),
        freezer: is_v2 || has("freezer"),
        parent,
    })
}

/// Returns the directory of our own cgroup; the mount point if the cgroup lies outside of the mount.
pub(super) fn own_directory(mount: &CgroupMount, memberships: &[CgroupMembership]) -> PathBuf {
    let own = memberships.iter().find(|membership| {
        membership.controllers == mount.controllers || {
            let shared = |name: &String| mount.controllers.contains(name);
            !membership.controllers.is_empty() && membership.controllers.iter().all(shared)
        }
    });
    let inside = own.and_then(|membership| membership.path.strip_prefix(&mount.root).ok());
    match inside {
        Some(path) if !path.components().any(|part| part.as_os_str() == "..") => {
            mount.point.iter().chain(path.iter()).collect()
        }
        _ => mount.point.clone(),
    }
}

fn v2_parent(point: &Path, own: PathBuf, as_root: bool) -> PathBuf {
    // In the leaf (moved earlier, or started there by DelegateSubgroup=agent), the cgroup above is the delegated one.
    let own = match own.parent() {
        Some(above) if own != point && own.ends_with(AGENT_LEAF) && (is_delegated(above) || !as_root) => {
            above.to_owned()
        }
        _ => own,
    };
    if as_root && !is_delegated(&own) { point.to_owned() } else { own }
}

/// Whether systemd delegated the cgroup: it marks delegated cgroups and does not touch their children.
fn is_delegated(group: &Path) -> bool {
    ["trusted.delegate", "user.delegate"].iter().any(|name| {
        let mut value = [0_u8; 8];
        rustix::fs::getxattr(group, *name, &mut value).is_ok_and(|length| value.get(..length) == Some(b"1"))
    })
}

fn is_writable(group: &Path) -> bool {
    may_write(group) && may_write(&group.join("cgroup.procs"))
}

fn may_write(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Returns the controllers that children of this v2 cgroup can have: the enabled ones, or all if more can be enabled.
fn available_controllers(group: &Path) -> Vec<String> {
    let read_words = |file: &str| -> Vec<String> {
        let text = std::fs::read_to_string(group.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().map(str::to_owned).collect()
    };
    // The real top of the hierarchy has no type and may hold processes next to cgroups with controllers.
    let is_top = !group.join("cgroup.type").exists();
    let may = is_writable(group) && may_write(&group.join("cgroup.subtree_control"));
    if may && (is_top || foreign_processes(group).is_ok_and(|count| count == 0)) {
        return read_words("cgroup.controllers");
    }
    read_words("cgroup.subtree_control")
}

/// Counts the processes in the cgroup itself that are not descendants of this process.
///
/// The processes in the cgroup and our descendants cannot be read at one moment, and other threads may start and lose
/// processes meanwhile. Only a process that every check finds in the cgroup and not among our descendants is foreign.
pub(super) fn foreign_processes(group: &Path) -> io::Result<usize> {
    let inside = || std::fs::read_to_string(group.join("cgroup.procs"));
    let mut suspects: Vec<String> = inside()?.lines().map(str::to_owned).collect();
    for _ in 0..FOREIGN_PROCESS_CHECKS {
        let ours: Vec<String> = own_processes()?.iter().map(u32::to_string).collect();
        suspects.retain(|pid| !ours.contains(pid));
        if suspects.is_empty() {
            break;
        }
        let still: Vec<String> = inside()?.lines().map(str::to_owned).collect();
        suspects.retain(|pid| still.contains(pid));
    }
    Ok(suspects.len())
}

/// Returns this process and its descendants.
pub(super) fn own_processes() -> io::Result<Vec<u32>> {
    let own = std::process::id();
    let descendants = ProcFs::system().descendants(own)?;
    Ok(std::iter::once(own).chain(descendants.iter().map(|id| id.pid)).collect())
}

/// Generation of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// A mounted cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CgroupMount {
    pub version: CgroupVersion,
    /// Controllers bound to it (v1 only; v2 lists them in a file).
    pub controllers: Vec<String>,
    /// Part of the hierarchy visible at the mount point: `/`, or deeper inside containers.
    root: PathBuf,
    point: PathBuf,
    read_only: bool,
}

/// Membership of a process in a cgroup of one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CgroupMembership {
    /// v1 controllers of the hierarchy; empty for v2.
    controllers: Vec<String>,
    /// Path of the cgroup inside the hierarchy.
    path: PathBuf,
}

/// Parses the cgroup hierarchies of a `/proc/PID/mountinfo` text, in its order. Other lines are skipped here and below,
/// because both files hold more than cgroups.
pub(super) fn parse_mounts(mountinfo: &str) -> Vec<CgroupMount> {
    mountinfo.lines().filter_map(parse_mount).collect()
}

/// Parses the memberships of a `/proc/PID/cgroup` text.
pub(super) fn parse_memberships(cgroup: &str) -> Vec<CgroupMembership> {
    cgroup.lines().filter_map(parse_membership).collect()
}

fn parse_mount(line: &str) -> Option<CgroupMount> {
    // "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [tags…] - TYPE SOURCE SUPEROPTIONS"
    let (own, filesystem) = line.split_once(" - ")?;
    let own: Vec<&str> = own.split(' ').collect();
    let mut filesystem = filesystem.split(' ');
    let version = match filesystem.next()? {
        "cgroup" => CgroupVersion::V1,
        "cgroup2" => CgroupVersion::V2,
        _ => return None,
    };
    let super_options: Vec<&str> = filesystem.nth(1)?.split(',').collect();
    let read_only = own.get(5)?.split(',').any(|option| option == "ro") || super_options.contains(&"ro");
    let controllers = match version {
        CgroupVersion::V2 => Vec::new(),
        CgroupVersion::V1 => {
            super_options.iter().filter(|&&option| option != "rw" && option != "ro").map(|s| s.to_string()).collect()
        }
    };
    Some(CgroupMount { version, controllers, root: unescape(own.get(3)?), point: unescape(own.get(4)?), read_only })
}

fn parse_membership(line: &str) -> Option<CgroupMembership> {
    let mut parts = line.splitn(3, ':');
    parts.next()?.parse::<u32>().ok()?;
    let controllers = parts.next()?.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let path = Path::new(parts.next()?);
    path.is_absolute().then(|| CgroupMembership { controllers, path: path.to_owned() })
}

/// Decodes the three octal digits that `mountinfo` writes for blanks, tabs, line ends and backslashes.
fn unescape(field: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if bytes[at] == b'\\' => {
                plain.push(byte);
                at += 4;
            }
            _ => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Creates a directory with the two texts of a machine; `@` stands for a directory in place of `/sys/fs/cgroup`.
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
    fn v2_is_described_with_its_controllers_and_base_path() {
        let (root, sys) = machine(V2, "0::/system.slice/gpupool.service\n", &["", "system.slice/gpupool.service"]);
        std::fs::write(sys.join("cgroup.controllers"), "cpu memory pids\n").unwrap();
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V2);
        assert!(cgroups.limits_memory() && cgroups.limits_pids(), "{cgroups:?}");
        let expected = format!(
            "cgroup v2 memory+pids, v2 for kill; CPU time polled every 10 ms to 1 s; groups below {}/gpupool",
            sys.display()
        );
        assert_eq!(cgroups.describe(), expected);

        std::fs::write(sys.join("cgroup.controllers"), "cpu memory pids dmem\n").unwrap();
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert!(cgroups.describe().starts_with("cgroup v2 memory+pids+dmem, v2 for kill"), "{cgroups}");
    }

    #[test]
    fn device_memory_is_limited_through_dmem() {
        let (root, sys) = machine(V2, "0::/\n", &["", "gpupool"]);
        std::fs::write(sys.join("cgroup.controllers"), "dmem\n").unwrap();
        let group = CgroupManager::detect_in(root.path(), true).create("job", &Default::default()).unwrap();
        for directory in [&sys, &sys.join("gpupool")] {
            assert_eq!(std::fs::read_to_string(directory.join("cgroup.subtree_control")).unwrap(), "+dmem");
        }
        let file = sys.join("gpupool/job/dmem.max");
        std::fs::write(&file, "drm/0000:03:00.0/vram0 max\n").unwrap();
        let limit = |address: &str| [crate::cgroup::DeviceMemoryLimit { pci_address: address.into(), bytes: 5 << 30 }];
        group.limit_device_memory(&limit("0000:03:00.0")).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("drm/0000:03:00.0/vram0 5368709120\n"));
        let refused = group.limit_device_memory(&limit("0000:04:00.0")).unwrap_err().to_string();
        assert!(refused.contains("the driver of 0000:04:00.0 does not support it"), "{refused}");
    }

    #[test]
    fn hybrid_takes_limits_from_v1_and_the_kill_from_v2() {
        let text = format!("{V1}{HYBRID_V2}");
        let cgroup = "4:memory:/some/where\n3:pids:/\n2:freezer:/\n0::/\n";
        let (root, sys) = machine(&text, cgroup, &["memory/some/where", "memory", "pids", "freezer", "unified"]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::Hybrid);
        let bases: Vec<PathBuf> = cgroups.base_paths().collect();
        let expected = ["unified", "memory", "pids"].map(|name| sys.join(name).join("gpupool"));
        assert_eq!(bases, expected);
        assert!(cgroups.describe().starts_with("cgroup v1 memory+pids, v2 for kill"), "{cgroups}");
    }

    #[test]
    fn v1_is_tracked_by_its_freezer() {
        let (root, sys) = machine(V1, "4:memory:/\n3:pids:/\n2:freezer:/\n", &["memory", "pids", "freezer"]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V1);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("freezer/gpupool"));
        assert!(cgroups.describe().starts_with("cgroup v1 memory+pids, kill by freezer"), "{cgroups}");
    }

    #[test]
    fn machines_without_usable_cgroups_give_the_reason() {
        let (root, _) = machine("22 1 0:20 / /proc rw - proc proc rw\n", "0::/\n", &[]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::None);
        assert_eq!(
            cgroups.describe(),
            "none: no cgroup file system is mounted; host memory polled every 10 ms to 1 s, \
             processes polled every 50 ms to 1 s, CPU time polled every 50 ms to 1 s"
        );

        let (root, sys) = machine(&V2.replace(" rw,", " ro,"), "0::/\n", &[""]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V2);
        assert!(cgroups.describe().contains(&format!("{} is mounted read-only", sys.display())), "{cgroups}");

        let missing = CgroupManager::detect_in(Path::new("/nonexistent"), true);
        assert!(missing.describe().starts_with("none: cannot read /nonexistent"), "{missing}");
    }

    #[test]
    fn controllers_are_unavailable_while_foreign_processes_are_in_the_cgroup() {
        let (root, sys) = machine(V2, "0::/app.scope\n", &["app.scope"]);
        let scope = sys.join("app.scope");
        std::fs::write(scope.join("cgroup.controllers"), "memory pids\n").unwrap();
        let ours = std::process::id().to_string();
        std::fs::write(scope.join("cgroup.procs"), format!("{ours}\n")).unwrap();
        assert!(CgroupManager::detect_in(root.path(), false).limits_memory());

        std::fs::write(scope.join("cgroup.procs"), format!("1\n{ours}\n")).unwrap();
        let cgroups = CgroupManager::detect_in(root.path(), false);
        assert!(cgroups.can_create() && !cgroups.limits_memory() && !cgroups.limits_pids());
        assert!(cgroups.describe().starts_with("cgroup v2 no limits, v2 for kill"), "{cgroups}");

        // The controller was enabled before: foreign processes do not matter then.
        std::fs::write(scope.join("cgroup.subtree_control"), "pids\n").unwrap();
        assert!(CgroupManager::detect_in(root.path(), false).limits_pids());
    }

    #[test]
    fn in_the_leaf_of_a_delegated_cgroup_new_cgroups_are_created_beside_it() {
        let (root, sys) = machine(V2, "0::/unit.service/agent\n", &["unit.service", "unit.service/agent"]);
        let cgroups = CgroupManager::detect_in(root.path(), false);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("unit.service/gpupool"));
    }

    #[test]
    fn a_container_uses_its_own_part_of_the_hierarchy() {
        let text = V2.replace("0:26 / @", "0:26 /docker/abc @");
        let (root, sys) = machine(&text, "0::/docker/abc/leaf\n", &["", "leaf"]);
        std::fs::write(sys.join("leaf/cgroup.controllers"), "memory\n").unwrap();
        // An unprivileged user gets cgroups below their own, and only because it is writable.
        let cgroups = CgroupManager::detect_in(root.path(), false);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("leaf/gpupool"));
        assert!(cgroups.limits_memory() && !cgroups.limits_pids());
    }

    #[test]
    fn children_of_other_threads_are_not_foreign_processes() {
        let group = tempfile::tempdir().unwrap();
        let procs = group.path().join("cgroup.procs");
        let own = std::process::id();
        std::fs::write(&procs, format!("{own}\n")).unwrap();
        let is_over = AtomicBool::new(false);
        let most = std::thread::scope(|scope| {
            // One child after the other, each listed only while it exists, as the kernel does.
            scope.spawn(|| {
                let mut before: Option<Child> = None;
                while !is_over.load(Ordering::SeqCst) {
                    let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
                    std::fs::write(&procs, format!("{own}\n{}\n", child.id())).unwrap();
                    before.replace(child).map(|mut before| before.wait().unwrap());
                }
                before.map(|mut last| last.wait().unwrap());
            });
            let most = (0..200).map(|_| foreign_processes(group.path()).unwrap()).max();
            is_over.store(true, Ordering::SeqCst);
            most
        });
        assert_eq!(most, Some(0));
        std::fs::write(&procs, format!("1\n{own}\n")).unwrap();
        assert_eq!(foreign_processes(group.path()).unwrap(), 1);
    }

    #[test]
    fn v2_mounts_are_parsed_with_tags_escapes_and_roots() {
        let text = "22 1 0:20 / /proc rw shared:12 - proc proc rw\n\
            30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n\
            31 23 0:26 /docker/abc /mnt/with\\040blank ro,nosuid - cgroup2 cgroup rw\n";
        let found = parse_mounts(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].point, Path::new("/sys/fs/cgroup"));
        assert!(!found[0].read_only && found[0].controllers.is_empty() && found[0].version == CgroupVersion::V2);
        assert_eq!(found[1].point, Path::new("/mnt/with blank"));
        assert_eq!(found[1].root, Path::new("/docker/abc"));
        assert!(found[1].read_only);
    }

    #[test]
    fn v1_mounts_list_their_controllers() {
        let found =
            parse_mounts("33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n");
        assert_eq!(found[0].controllers, ["cpu", "cpuacct"]);
        assert_eq!(found[0].version, CgroupVersion::V1);
    }

    #[test]
    fn memberships_keep_colons_in_paths() {
        let found = parse_memberships(
            "4:memory:/a:b/c\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/user.slice\nnonsense\n7:x:relative\n",
        );
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], CgroupMembership { controllers: vec!["memory".into()], path: "/a:b/c".into() });
        assert_eq!(found[3], CgroupMembership { controllers: vec![], path: "/user.slice".into() });
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[ -~\\n\\\\é]{0,300}") {
            let _ = (parse_mounts(&text), parse_memberships(&text), parse_mounts(&format!("1 2 0:1 {text} - cgroup2 c {text}")));
        }
    }
}
