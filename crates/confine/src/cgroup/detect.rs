//! Which cgroup world this machine has, where in each hierarchy our groups go, and what we may do there. Looking changes
//! nothing.
//!
//! Root: below the top of the hierarchy, unless systemd delegated our unit's own group to us. Anybody else: below their
//! own group, if they may write it. In v2 a group that hands controllers to its children may hold no process itself, so
//! a delegated group is used through a leaf `agent` that we and what we started move into, and only if no stranger is in
//! there with us.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use crate::bounds::BoundsEnforcement;
use crate::limits::STRANGER_LOOKS;
use crate::process::ProcFs;

/// Which generations of control groups the machine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupLayout {
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
pub struct CgroupManager {
    layout: CgroupLayout,
    /// Where groups go, the hierarchy that tells who is in a group first; empty if no group can be made.
    pub(super) places: Vec<Place>,
    /// Why `places` is empty.
    pub(super) unavailable_reason: String,
}

impl CgroupManager {
    /// Looks at this machine. Never fails: what cannot be read cannot be used, and [`CgroupManager::describe`] says why.
    pub fn detect() -> Self {
        Self::detect_in(Path::new("/proc/self"), rustix::process::geteuid().is_root())
    }

    /// The same with another directory in the role of `/proc/self` and as root or not.
    pub fn detect_in(proc_self: &Path, as_root: bool) -> Self {
        let read = |file: &str| -> io::Result<String> { std::fs::read_to_string(proc_self.join(file)) };
        let (mountinfo, cgroup) = match (read("mountinfo"), read("cgroup")) {
            (Ok(mountinfo), Ok(cgroup)) => (mountinfo, cgroup),
            (Err(error), _) | (_, Err(error)) => {
                return Self::unusable(CgroupLayout::None, format!("{} cannot be read: {error}", proc_self.display()));
            }
        };
        let mounts = mounts(&mountinfo);
        let has = |version| mounts.iter().any(|mount| mount.version == version);
        let layout = match (has(CgroupVersion::V2), has(CgroupVersion::V1)) {
            (true, false) => CgroupLayout::V2,
            (true, true) => CgroupLayout::Hybrid,
            (false, true) => CgroupLayout::V1,
            (false, false) => return Self::unusable(CgroupLayout::None, "no cgroup file system is mounted".to_owned()),
        };
        match places(&mounts, &memberships(&cgroup), as_root) {
            Ok(places) => Self { layout, places, unavailable_reason: String::new() },
            Err(why) => Self::unusable(layout, why),
        }
    }

    fn unusable(layout: CgroupLayout, unavailable_reason: String) -> Self {
        Self { layout, places: Vec::new(), unavailable_reason }
    }

    /// No control groups, whatever the machine has, for the reason given.
    pub fn unavailable(why: impl Into<String>) -> Self {
        Self::unusable(CgroupLayout::None, why.into())
    }

    /// Which generations the machine has, whether or not this process may use them.
    pub fn layout(&self) -> CgroupLayout {
        self.layout
    }

    /// Whether groups can be made at all.
    pub fn can_create(&self) -> bool {
        !self.places.is_empty()
    }

    /// Why no groups can be made; empty if they can.
    pub fn unavailable_reason(&self) -> &str {
        &self.unavailable_reason
    }

    /// Whether a group's host memory can be limited by the kernel.
    pub fn limits_memory(&self) -> bool {
        self.places.iter().any(|place| place.memory)
    }

    /// Whether the number of a group's processes can be limited by the kernel.
    pub fn limits_pids(&self) -> bool {
        self.places.iter().any(|place| place.pids)
    }

    /// The generation of the hierarchy that has something.
    pub(crate) fn version_with(&self, has: impl Fn(&Place) -> bool) -> Option<CgroupVersion> {
        self.places.iter().find(|place| has(place)).map(|place| place.version)
    }

    /// The directories below which all groups are made.
    pub fn base_paths(&self) -> impl Iterator<Item = PathBuf> {
        self.places.iter().map(Place::base)
    }

    /// One line for the log at start-up: which path is in force, and what is done about limits the kernel does not keep.
    pub fn describe(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for CgroupManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let looked_at = BoundsEnforcement::for_cgroups(self).looked_at();
        let Some(tracker) = self.places.first() else {
            return write!(f, "none: {}; {looked_at}", self.unavailable_reason);
        };
        let kept = [
            ("memory", self.limits_memory()),
            ("pids", self.limits_pids()),
            ("dmem", self.places.iter().any(|place| place.dmem)),
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
        write!(f, "{carrier} {kept}, {kill}; {looked_at}; groups below {}", tracker.base().display())
    }
}

/// The directory below which all groups are made.
pub(super) const OURS: &str = "gpupool";

/// The leaf we move ourselves into in a delegated v2 group.
pub(super) const LEAF: &str = "agent";

/// Our place in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub version: CgroupVersion,
    /// The group that holds `gpupool/`.
    pub parent: PathBuf,
    pub memory: bool,
    pub pids: bool,
    /// Whether it counts processor time.
    pub cpu: bool,
    /// Whether it limits the memory of devices.
    pub dmem: bool,
    pub freezer: bool,
}

impl Place {
    pub fn base(&self) -> PathBuf {
        self.parent.join(OURS)
    }
}

/// The hierarchies a group is made in, the one that tracks its processes first; or why there are none.
fn places(mounts: &[Mount], memberships: &[Membership], as_root: bool) -> Result<Vec<Place>, String> {
    let mut refusals = Vec::new();
    let mut usable = |mount: Option<&Mount>| -> Option<Place> {
        let mount = mount?;
        match place(mount, memberships, as_root) {
            Ok(place) => Some(place),
            Err(why) => {
                refusals.push(why);
                None
            }
        }
    };
    let v1 = |controller: &str| mounts.iter().find(|mount| mount.controllers.iter().any(|name| name == controller));
    let mut places = Vec::new();
    places.extend(usable(mounts.iter().find(|mount| mount.version == CgroupVersion::V2)));
    if places.is_empty() {
        places.extend(usable(v1("freezer")));
    }
    if !places.iter().any(|place| place.memory) {
        places.extend(usable(v1("memory")));
    }
    if !places.iter().any(|place| place.pids) {
        places.extend(usable(v1("pids")));
    }
    // Only to count: no reason to make groups where there is no other.
    if !places.is_empty() && !places.iter().any(|place| place.cpu) {
        places.extend(usable(v1("cpuacct")));
    }
    if places.is_empty() {
        return Err(match refusals.first() {
            Some(why) => why.clone(),
            None => "no hierarchy with the memory, pids or freezer controller is mounted".to_owned(),
        });
    }
    Ok(places)
}

fn place(mount: &Mount, memberships: &[Membership], as_root: bool) -> Result<Place, String> {
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
        CgroupVersion::V2 => grantable(&parent),
    };
    let has = |controller: &str| controllers.iter().any(|name| name == controller);
    let is_v2 = mount.version == CgroupVersion::V2;
    Ok(Place {
        version: mount.version,
        memory: has("memory"),
        pids: has("pids"),
        // Every group of v2 counts processor time and can be frozen, without any controller.
        cpu: is_v2 || has("cpuacct"),
        dmem: is_v2 && has("dmem"),
        freezer: is_v2 || has("freezer"),
        parent,
    })
}

/// Our own group as a directory; the mount point where it lies outside of what is mounted.
pub(super) fn own_directory(mount: &Mount, memberships: &[Membership]) -> PathBuf {
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
    // Moved into the leaf before (or started there by DelegateSubgroup=agent): the group above is the delegated one.
    let own = match own.parent() {
        Some(above) if own != point && own.ends_with(LEAF) && (is_delegated(above) || !as_root) => above.to_owned(),
        _ => own,
    };
    if as_root && !is_delegated(&own) { point.to_owned() } else { own }
}

/// systemd marks the groups it hands over, and will not touch what is below them.
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

/// The controllers children of this v2 group can have: those it hands down already, and, if nothing stands in the way
/// of handing down more, all it has.
fn grantable(group: &Path) -> Vec<String> {
    let words = |file: &str| -> Vec<String> {
        let text = std::fs::read_to_string(group.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().map(str::to_owned).collect()
    };
    // The true top of the hierarchy has no type, and may hold processes next to groups with controllers.
    let is_top = !group.join("cgroup.type").exists();
    let may = is_writable(group) && may_write(&group.join("cgroup.subtree_control"));
    if may && (is_top || strangers(group).is_ok_and(|strangers| strangers == 0)) {
        return words("cgroup.controllers");
    }
    words("cgroup.subtree_control")
}

/// How many processes the group itself holds beside us and what we started.
///
/// Who is inside and who is ours cannot be asked at one moment, and other threads may start and lose processes meanwhile: a
/// stranger is one that is there and not ours each time we look.
pub(super) fn strangers(group: &Path) -> io::Result<usize> {
    let inside = || std::fs::read_to_string(group.join("cgroup.procs"));
    let mut suspects: Vec<String> = inside()?.lines().map(str::to_owned).collect();
    for _ in 0..STRANGER_LOOKS {
        let ours: Vec<String> = ours()?.iter().map(u32::to_string).collect();
        suspects.retain(|pid| !ours.contains(pid));
        if suspects.is_empty() {
            break;
        }
        let still: Vec<String> = inside()?.lines().map(str::to_owned).collect();
        suspects.retain(|pid| still.contains(pid));
    }
    Ok(suspects.len())
}

/// This process and its descendants.
pub(super) fn ours() -> io::Result<Vec<u32>> {
    let own = std::process::id();
    let descendants = ProcFs::system().descendants(own)?;
    Ok(std::iter::once(own).chain(descendants.iter().map(|id| id.pid)).collect())
}

/// The two generations of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy for all.
    V2,
}

/// A mounted control group hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    pub version: CgroupVersion,
    /// The controllers bound to it (v1 only; v2 tells them in a file).
    pub controllers: Vec<String>,
    /// Which part of the hierarchy is seen at the mount point: `/`, or deeper inside containers.
    root: PathBuf,
    point: PathBuf,
    read_only: bool,
}

/// In which group of which hierarchy a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Membership {
    /// The v1 controllers of the hierarchy; empty for v2.
    controllers: Vec<String>,
    /// The group's path inside the hierarchy.
    path: PathBuf,
}

/// The control group hierarchies in a `/proc/PID/mountinfo` text, in its order. Lines that make no sense are skipped here
/// and below, as both files hold much that is not about control groups.
pub(super) fn mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo.lines().filter_map(mount).collect()
}

/// The memberships in a `/proc/PID/cgroup` text.
pub(super) fn memberships(cgroup: &str) -> Vec<Membership> {
    cgroup.lines().filter_map(membership).collect()
}

fn mount(line: &str) -> Option<Mount> {
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
    Some(Mount { version, controllers, root: unescaped(own.get(3)?), point: unescaped(own.get(4)?), read_only })
}

fn membership(line: &str) -> Option<Membership> {
    let mut parts = line.splitn(3, ':');
    parts.next()?.parse::<u32>().ok()?;
    let controllers = parts.next()?.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let path = Path::new(parts.next()?);
    path.is_absolute().then(|| Membership { controllers, path: path.to_owned() })
}

/// `mountinfo` writes blanks, tabs, line ends and backslashes as three octal digits.
fn unescaped(field: &str) -> PathBuf {
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
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V2);
        assert!(cgroups.limits_memory() && cgroups.limits_pids(), "{cgroups:?}");
        let expected = format!(
            "cgroup v2 memory+pids, v2 for kill; CPU time looked at every 10 ms to 1 s; groups below {}/gpupool",
            sys.display()
        );
        assert_eq!(cgroups.describe(), expected);

        std::fs::write(sys.join("cgroup.controllers"), "cpu memory pids dmem\n").unwrap();
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert!(cgroups.describe().starts_with("cgroup v2 memory+pids+dmem, v2 for kill"), "{cgroups}");
    }

    #[test]
    fn the_memory_of_devices_is_limited_where_the_kernel_can() {
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
        assert!(refused.contains("the driver of 0000:04:00.0 does not take part"), "{refused}");
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
    fn v1_alone_is_tracked_by_its_freezer() {
        let (root, sys) = machine(V1, "4:memory:/\n3:pids:/\n2:freezer:/\n", &["memory", "pids", "freezer"]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V1);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("freezer/gpupool"));
        assert!(cgroups.describe().starts_with("cgroup v1 memory+pids, kill by freezer"), "{cgroups}");
    }

    #[test]
    fn machines_without_usable_groups_say_why() {
        let (root, _) = machine("22 1 0:20 / /proc rw - proc proc rw\n", "0::/\n", &[]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::None);
        assert_eq!(
            cgroups.describe(),
            "none: no cgroup file system is mounted; host memory looked at every 10 ms to 1 s, \
             processes looked at every 50 ms to 1 s, CPU time looked at every 50 ms to 1 s"
        );

        let (root, sys) = machine(&V2.replace(" rw,", " ro,"), "0::/\n", &[""]);
        let cgroups = CgroupManager::detect_in(root.path(), true);
        assert_eq!(cgroups.layout(), CgroupLayout::V2);
        assert!(cgroups.describe().contains(&format!("{} is mounted read-only", sys.display())), "{cgroups}");

        let gone = CgroupManager::detect_in(Path::new("/nonexistent"), true);
        assert!(gone.describe().starts_with("none: /nonexistent cannot be read"), "{gone}");
    }

    #[test]
    fn controllers_are_not_promised_where_strangers_sit_in_the_group() {
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

        // Handed down before: strangers do no harm any more.
        std::fs::write(scope.join("cgroup.subtree_control"), "pids\n").unwrap();
        assert!(CgroupManager::detect_in(root.path(), false).limits_pids());
    }

    #[test]
    fn in_the_leaf_of_a_delegated_group_the_groups_stay_beside_it() {
        let (root, sys) = machine(V2, "0::/unit.service/agent\n", &["unit.service", "unit.service/agent"]);
        let cgroups = CgroupManager::detect_in(root.path(), false);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("unit.service/gpupool"));
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_hierarchy() {
        let text = V2.replace("0:26 / @", "0:26 /docker/abc @");
        let (root, sys) = machine(&text, "0::/docker/abc/leaf\n", &["", "leaf"]);
        std::fs::write(sys.join("leaf/cgroup.controllers"), "memory\n").unwrap();
        // An ordinary user gets groups below his own, and only because it is writable.
        let cgroups = CgroupManager::detect_in(root.path(), false);
        assert_eq!(cgroups.base_paths().next().unwrap(), sys.join("leaf/gpupool"));
        assert!(cgroups.limits_memory() && !cgroups.limits_pids());
    }

    #[test]
    fn what_another_thread_starts_meanwhile_is_no_stranger() {
        let group = tempfile::tempdir().unwrap();
        let procs = group.path().join("cgroup.procs");
        let own = std::process::id();
        std::fs::write(&procs, format!("{own}\n")).unwrap();
        let is_over = AtomicBool::new(false);
        let most = std::thread::scope(|scope| {
            // One after the other, each listed only while it is there, as the kernel does.
            scope.spawn(|| {
                let mut before: Option<Child> = None;
                while !is_over.load(Ordering::SeqCst) {
                    let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
                    std::fs::write(&procs, format!("{own}\n{}\n", child.id())).unwrap();
                    before.replace(child).map(|mut before| before.wait().unwrap());
                }
                before.map(|mut last| last.wait().unwrap());
            });
            let most = (0..200).map(|_| strangers(group.path()).unwrap()).max();
            is_over.store(true, Ordering::SeqCst);
            most
        });
        assert_eq!(most, Some(0));
        std::fs::write(&procs, format!("1\n{own}\n")).unwrap();
        assert_eq!(strangers(group.path()).unwrap(), 1);
    }

    #[test]
    fn v2_mounts_are_read_with_tags_escapes_and_roots() {
        let text = "22 1 0:20 / /proc rw shared:12 - proc proc rw\n\
            30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n\
            31 23 0:26 /docker/abc /mnt/with\\040blank ro,nosuid - cgroup2 cgroup rw\n";
        let found = mounts(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].point, Path::new("/sys/fs/cgroup"));
        assert!(!found[0].read_only && found[0].controllers.is_empty() && found[0].version == CgroupVersion::V2);
        assert_eq!(found[1].point, Path::new("/mnt/with blank"));
        assert_eq!(found[1].root, Path::new("/docker/abc"));
        assert!(found[1].read_only);
    }

    #[test]
    fn v1_mounts_tell_their_controllers() {
        let found = mounts("33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n");
        assert_eq!(found[0].controllers, ["cpu", "cpuacct"]);
        assert_eq!(found[0].version, CgroupVersion::V1);
    }

    #[test]
    fn memberships_keep_colons_in_paths() {
        let found = memberships(
            "4:memory:/a:b/c\n3:cpu,cpuacct:/\n1:name=systemd:/x\n0::/user.slice\nnonsense\n7:x:relative\n",
        );
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], Membership { controllers: vec!["memory".into()], path: "/a:b/c".into() });
        assert_eq!(found[3], Membership { controllers: vec![], path: "/user.slice".into() });
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[ -~\\n\\\\é]{0,300}") {
            let _ = (mounts(&text), memberships(&text), mounts(&format!("1 2 0:1 {text} - cgroup2 c {text}")));
        }
    }
}
