//! How this process is confined: in a container, in a PID namespace of its own, under which control groups.

use std::collections::BTreeSet;
use std::path::Path;

use crate::doctor::evidence::{kernel, names_in, root_of};
use crate::places::Places;
use crate::told::Told;
use crate::{attribution, kernel_file};

/// How this process is confined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Confinement {
    /// What says that this is a container; empty where nothing does.
    pub container: Vec<String>,
    /// Whether the PID namespace is the host's, in which drivers number processes.
    pub host_pids: Told<bool>,
    /// The control groups.
    pub cgroup: Told<Cgroup>,
}

/// Which control groups the machine has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// How they are laid out.
    pub mode: CgroupMode,
    /// The controllers: `cpu`, `memory`, `pids`, `dmem`.
    pub controllers: BTreeSet<String>,
    /// Whether a whole group can be ended at once (`cgroup.kill`, Linux 5.14).
    pub kill: bool,
}

/// How the control groups of a machine are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupMode {
    /// One tree, version 2.
    Unified,
    /// Version 1 with a version 2 tree beside it.
    Hybrid,
    /// Version 1.
    Legacy,
}

impl CgroupMode {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unified => "cgroup v2",
            Self::Hybrid => "cgroup v1 and v2 (hybrid)",
            Self::Legacy => "cgroup v1",
        }
    }
}

impl Confinement {
    pub(super) fn look(places: &Places, environment: &dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            container: container_signs(places, environment),
            host_pids: attribution::has_host_pids(&places.proc),
            cgroup: cgroup(places),
        }
    }
}

fn container_signs(places: &Places, environment: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    const RUNTIMES: [&str; 6] = ["docker", "kubepods", "containerd", "libpod", "crio", "lxc"];
    let root = root_of(places);
    let mut signs = Vec::new();
    let files = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"];
    signs.extend(files.iter().filter(|file| root.join(&file[1..]).exists()).map(|file| format!("{file} exists")));
    let first = kernel_file::text(&places.proc.join("1/cgroup"));
    let runtime = RUNTIMES.iter().find(|runtime| first.value().is_some_and(|text| text.contains(**runtime)));
    signs.extend(runtime.map(|runtime| format!("the control group of process 1 names {runtime}")));
    for variable in ["container", "KUBERNETES_SERVICE_HOST"] {
        let set = environment(variable).filter(|value| !value.is_empty());
        signs.extend(set.map(|_| format!("the variable {variable} is set")));
    }
    signs
}

fn cgroup(places: &Places) -> Told<Cgroup> {
    let root = places.sys.join("fs/cgroup");
    let unified = kernel_file::bytes(&root.join("cgroup.controllers"));
    if let Ok(controllers) = unified {
        let controllers = String::from_utf8_lossy(&controllers).split_whitespace().map(str::to_owned).collect();
        return Told::Value(Cgroup { mode: CgroupMode::Unified, controllers, kill: has_kill(&root, places) });
    }
    // Version 1 lists its controllers as `name hierarchy groups enabled`.
    let listed = kernel_file::text(&places.proc.join("cgroups"));
    listed.map(|text| {
        let enabled = |line: &str| {
            let mut fields = line.split_whitespace();
            let name = fields.next().filter(|name| !name.starts_with('#'))?;
            (fields.next_back()? == "1").then(|| name.to_owned())
        };
        let beside = root.join("unified");
        let mode = match beside.join("cgroup.procs").exists() {
            true => CgroupMode::Hybrid,
            false => CgroupMode::Legacy,
        };
        let kill = mode == CgroupMode::Hybrid && has_kill(&beside, places);
        Cgroup { mode, controllers: text.lines().filter_map(enabled).collect(), kill }
    })
}

/// The root group itself has no `cgroup.kill`; any group below it has, where the kernel knows it. Where there is no
/// group to look at, the kernel's release decides.
fn has_kill(root: &Path, places: &Places) -> bool {
    let names = names_in(root).unwrap_or_default();
    let mut groups = names.iter().map(|name| root.join(name)).filter(|path| path.is_dir()).peekable();
    if groups.peek().is_none() {
        return kernel::release(&places.proc).value().is_some_and(|release| knows_kill(release));
    }
    // Seen from a container the root is a group like any other.
    groups.chain([root.to_owned()]).any(|group| group.join("cgroup.kill").exists())
}

/// Whether a kernel of this release has `cgroup.kill`: Linux 5.14 or newer.
fn knows_kill(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(14))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_groups_can_be_ended_from_linux_5_14_on() {
        for release in ["5.14.0-427.el9.x86_64", "5.15.167.4-microsoft-standard-WSL2", "6.8.0-45-generic", "10.0"] {
            assert!(knows_kill(release), "{release}");
        }
        for release in ["5.13.19", "4.18.0-553.el8_10.x86_64", "5", "", "unknown"] {
            assert!(!knows_kill(release), "{release}");
        }
    }
}
