//! Where in each hierarchy our groups go.
//!
//! Root: below the top of the hierarchy, unless systemd delegated our unit's own group to us. Anybody else: below their
//! own group, if they may write it. In v2 a group that hands controllers to its children may hold no process itself, so
//! a delegated group is used through a leaf `agent` that we and what we started move into, and only if no stranger is in
//! there with us.

use std::io;
use std::path::{Path, PathBuf};

use super::texts::{Membership, Mount, Version};
use crate::limits::STRANGER_LOOKS;
use crate::process::ProcFs;

/// The directory below which all groups are made.
pub(super) const OURS: &str = "gpupool";

/// The leaf we move ourselves into in a delegated v2 group.
pub(super) const LEAF: &str = "agent";

/// Our place in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) version: Version,
    /// The group that holds `gpupool/`.
    pub(super) parent: PathBuf,
    pub(super) memory: bool,
    pub(super) pids: bool,
    /// Whether it counts processor time.
    pub(super) cpu: bool,
    /// Whether it limits the memory of devices.
    pub(super) dmem: bool,
    pub(super) freezer: bool,
}

impl Place {
    pub(super) fn base(&self) -> PathBuf {
        self.parent.join(OURS)
    }
}

/// The hierarchies a group is made in, the one that tracks its processes first; or why there are none.
pub(super) fn places(mounts: &[Mount], memberships: &[Membership], as_root: bool) -> Result<Vec<Place>, String> {
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
    places.extend(usable(mounts.iter().find(|mount| mount.version == Version::V2)));
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
        Version::V1 if as_root => mount.point.clone(),
        Version::V1 => own,
        Version::V2 => v2_parent(&mount.point, own, as_root),
    };
    if !is_writable(&parent) {
        return Err(format!(
            "{} is not writable (run as root, in a systemd unit with Delegate=yes, or by systemd-run --user --scope -p Delegate=yes)",
            parent.display()
        ));
    }
    let controllers = match mount.version {
        Version::V1 => mount.controllers.clone(),
        Version::V2 => grantable(&parent),
    };
    let has = |controller: &str| controllers.iter().any(|name| name == controller);
    let is_v2 = mount.version == Version::V2;
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
    let descendants = ProcFs::here().tree(own)?;
    Ok(std::iter::once(own).chain(descendants.iter().map(|id| id.pid)).collect())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

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
}
