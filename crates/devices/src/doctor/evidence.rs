//! What was seen on a machine, as plain data. What could not be read is recorded as such and stops nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gpupool_core::Vendor;
use rustix::fs::{Access as Wanted, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::detect::SourcePaths;
use crate::kernel_log::{self, Said};
use crate::pci_bus::{self, PciGpu};
use crate::reported::{MissingReason, Reported, truncate_text};
use crate::source::{SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::{attribution, kernel_file, limits};

/// What one source answered when the caller asked it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceResult {
    /// Which source.
    pub kind: SourceKind,
    /// Its answer.
    pub result: Result<SourceReading, SourceError>,
}

/// Everything the doctor knows of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DoctorEvidence {
    /// Display adapters and accelerators on the PCI bus.
    pub gpus: Reported<Vec<PciGpu>>,
    /// Which of the kernel modules that matter are loaded, spelled with `_`.
    pub modules: Reported<BTreeSet<String>>,
    /// The versions of NVIDIA's kernel module and library.
    pub nvidia: NvidiaVersions,
    /// What the sources answered.
    pub(crate) sources: Vec<SourceResult>,
    /// The device nodes of GPUs.
    pub nodes: Reported<Vec<DeviceNode>>,
    /// Who is looking.
    pub(crate) user: User,
    /// How this process is confined.
    pub confinement: ContainerEvidence,
    /// The running kernel.
    pub kernel_release: Reported<String>,
    /// Whether NVIDIA's persistence daemon runs.
    pub persistence_daemon: Reported<bool>,
    /// What the kernel's log says went wrong since the last boot, where a log was given.
    pub(crate) kernel_log: Vec<Said>,
    /// Set variables that hide devices from programs.
    pub variables: BTreeMap<&'static str, String>,
    /// Where each tool is; `None` where it is not on the `PATH`.
    pub tools: BTreeMap<SourceKind, Option<PathBuf>>,
}

impl DoctorEvidence {
    /// Looks at the machine at `places`; `environment` looks up a variable, `sources` is what the sources answered.
    ///
    /// Opens no device node and reads only what the kernel keeps in its own memory, so no device is woken.
    pub fn gather(
        places: &SourcePaths,
        environment: &dyn Fn(&str) -> Option<String>,
        sources: Vec<SourceResult>,
    ) -> Self {
        Self {
            gpus: pci_bus::scan(&places.sys).map(|bus| bus.gpus),
            modules: modules(&places.proc, &places.sys),
            nvidia: NvidiaVersions::read(places),
            sources,
            nodes: nodes(&places.dev, &places.sys),
            user: User::current(&places.etc),
            confinement: ContainerEvidence {
                container: container_signs(places, environment),
                host_pids: attribution::has_host_pids(&places.proc),
                cgroup: cgroup(places),
            },
            kernel_release: release(&places.proc),
            persistence_daemon: persistence_daemon(places),
            kernel_log: kernel_log::troubles(&log(&places.dev)),
            variables: hiding_variables(environment),
            tools: tools(places, &environment("PATH").unwrap_or_default()),
        }
    }

    /// The same machine, with another log of its kernel.
    #[cfg(test)]
    pub(crate) fn with_kernel_log(mut self, text: &str) -> Self {
        self.kernel_log = kernel_log::troubles(text);
        self
    }

    /// The GPUs of one vendor on the bus.
    pub(crate) fn gpus_of(&self, vendor: Vendor) -> impl Iterator<Item = &PciGpu> + Clone {
        self.gpus.value().into_iter().flatten().filter(move |gpu| gpu.vendor == vendor)
    }

    /// Whether a kernel module is loaded; `false` also where that cannot be told.
    pub(crate) fn has_module(&self, name: &str) -> bool {
        self.modules.value().is_some_and(|modules| modules.contains(name))
    }

    /// The device nodes.
    pub(crate) fn nodes(&self) -> &[DeviceNode] {
        self.nodes.value().map_or(&[], Vec::as_slice)
    }

    /// Whether this process runs in a container.
    pub(crate) fn in_container(&self) -> bool {
        !self.confinement.container.is_empty()
    }

    /// Whether this process cannot see all processes of the machine.
    pub(crate) fn is_confined(&self) -> bool {
        self.in_container() || self.confinement.host_pids.value() == Some(&false)
    }

    /// What the sources that answered said, those of one vendor only.
    pub(crate) fn answers_about(&self, vendor: Vendor) -> impl Iterator<Item = &SourceReading> {
        let of_vendor = move |answer: &&SourceResult| vendor_of(answer.kind) == Some(vendor);
        self.sources.iter().filter(of_vendor).filter_map(|answer| answer.result.as_ref().ok())
    }

    /// Why sources gave nothing.
    pub(crate) fn failures(&self) -> impl Iterator<Item = (SourceKind, &SourceError)> {
        self.sources.iter().filter_map(|answer| Some((answer.kind, answer.result.as_ref().err()?)))
    }

    /// What the sources said that failed with an error of this code.
    pub(crate) fn failed_with(&self, code: &str) -> Vec<String> {
        let failed = self.failures().filter(|(_, error)| error.code() == code);
        failed.map(|(kind, error)| format!("{kind}: {error}")).collect()
    }

    /// What all sources together say of the devices.
    pub(crate) fn machine(&self) -> SourceReading {
        let mut machine = SourceReading::default();
        for snapshot in self.sources.iter().filter_map(|answer| answer.result.as_ref().ok()) {
            machine.merge(snapshot.clone());
        }
        machine
    }
}

/// Whose devices a source tells of.
pub(crate) const fn vendor_of(kind: SourceKind) -> Option<Vendor> {
    match kind {
        SourceKind::Nvml | SourceKind::NvidiaSmi => Some(Vendor::Nvidia),
        SourceKind::AmdSysfs | SourceKind::AmdSmi | SourceKind::RocmSmi => Some(Vendor::Amd),
        SourceKind::Simulated => None,
    }
}

/// The root of the file system that `/etc` belongs to.
fn root_of(places: &SourcePaths) -> &Path {
    places.etc.parent().unwrap_or(Path::new("/"))
}

/// The names in a folder, sorted; none where it cannot be listed.
pub(super) fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).take(crate::limits::PROCESSES).collect();
    names.sort_unstable();
    Ok(names)
}

// The device nodes of GPUs, and whether they may be opened, told without opening one: opening can wake a GPU.

/// Whether the current user may open a node to read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAccess {
    /// Yes.
    Granted,
    /// The mode of the node says no.
    Denied,
    /// The mode may say yes, the kernel says no: the rules of the device control group.
    Forbidden,
    /// It cannot be told, in the kernel's words.
    Unknown(MissingReason),
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Its name below `/dev`: `nvidia0`, `kfd`, `dri/renderD128`.
    pub name: String,
    /// Whose devices it leads to, where that is known.
    pub vendor: Option<Vendor>,
    /// Its permission bits.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Whether the current user may use it.
    pub access: NodeAccess,
}

impl DeviceNode {
    /// Whether its mode lets members of its group read and write.
    pub(crate) fn is_open_to_group(&self) -> bool {
        self.mode & 0o060 == 0o060
    }

    /// The number of an `nvidia<number>` node.
    pub(crate) fn nvidia_minor(&self) -> Option<u32> {
        self.name.strip_prefix("nvidia")?.parse().ok()
    }

    /// Whether it is a render node.
    pub(crate) fn is_render(&self) -> bool {
        self.name.starts_with("dri/renderD")
    }
}

/// The nodes that lead to GPUs.
pub(super) fn nodes(dev: &Path, sys: &Path) -> Reported<Vec<DeviceNode>> {
    let names = match names_in(dev) {
        Ok(names) => names,
        Err(error) => return kernel_file::from_io_error(&error),
    };
    let render = names_in(&dev.join("dri")).unwrap_or_default();
    let render = render.iter().filter(|name| name.starts_with("renderD")).map(|name| {
        let vendor = kernel_file::read_number::<u16>(&sys.join("class/drm").join(name).join("device/vendor"));
        (format!("dri/{name}"), vendor.value().map(|&id| pci_bus::maker(id).unwrap_or(Vendor::Other)))
    });
    let direct = names.into_iter().filter_map(|name| match name.as_str() {
        "kfd" => Some((name, Some(Vendor::Amd))),
        _ if is_nvidia(&name) => Some((name, Some(Vendor::Nvidia))),
        _ => None,
    });
    let seen = direct.chain(render).filter_map(|(name, vendor)| node(dev, name, vendor));
    Reported::Value(seen.take(limits::DEVICES).collect())
}

fn is_nvidia(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("nvidia") else { return false };
    matches!(rest, "ctl" | "-uvm" | "-uvm-tools") || !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())
}

fn node(dev: &Path, name: String, vendor: Option<Vendor>) -> Option<DeviceNode> {
    let path = dev.join(&name);
    let facts = std::fs::metadata(&path).ok()?;
    let mode = facts.permissions().mode() & 0o7777;
    Some(DeviceNode { name, vendor, mode, uid: facts.uid(), gid: facts.gid(), access: access(&path) })
}

fn access(path: &Path) -> NodeAccess {
    match accessat(CWD, path, Wanted::READ_OK | Wanted::WRITE_OK, AtFlags::EACCESS) {
        Ok(()) => NodeAccess::Granted,
        Err(Errno::ACCESS) => NodeAccess::Denied,
        Err(Errno::PERM) => NodeAccess::Forbidden,
        Err(error) => NodeAccess::Unknown(error.to_string().into()),
    }
}

// What the kernel and the files of its drivers say: modules, versions, the persistence daemon, log lines.

/// The modules that matter to GPUs.
const WATCHED: [&str; 8] = ["nvidia", "nvidia_uvm", "nouveau", "amdgpu", "radeon", "vfio_pci", "i915", "xe"];

/// Bytes read of the kernel's log, and of one message in it, which the kernel bounds at 8 KiB.
const LOG_BYTES: usize = 8 << 20;
const LOG_MESSAGE_BYTES: usize = 16 << 10;

/// The versions of NVIDIA's kernel module and of its management library; they must be equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaVersions {
    /// What `/proc/driver/nvidia/version` says.
    pub kernel_text: Reported<String>,
    /// Version of the loaded kernel module.
    pub kernel: Reported<String>,
    /// Version of the library, by the name of its file.
    pub library: Reported<String>,
}

impl NvidiaVersions {
    pub(super) fn read(places: &SourcePaths) -> Self {
        let kernel_text = kernel_file::read_text(&places.proc.join("driver/nvidia/version"));
        let by_text = pci_bus::nvidia_driver_version(&places.proc);
        let kernel = by_text.or(kernel_file::read_text(&places.sys.join("module/nvidia/version")));
        Self { kernel_text, kernel, library: library_version(places) }
    }

    /// Whether the two are known and differ; tools shorten versions, so `535.171` equals `535.171.04`.
    pub(crate) fn differ(&self) -> bool {
        match (self.kernel.value(), self.library.value()) {
            (Some(kernel), Some(library)) => kernel.split('.').zip(library.split('.')).any(|(a, b)| a != b),
            _ => false,
        }
    }
}

/// What the kernel still has of its log. Empty where the user may not read it.
///
/// Each read gives one message, and waiting for the next is refused; a message that was overwritten meanwhile is passed
/// over.
pub(super) fn log(dev: &Path) -> String {
    let without_waiting = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let opened = File::options().read(true).custom_flags(without_waiting).open(dev.join("kmsg"));
    let Ok(mut file) = opened else { return String::new() };
    let (mut text, mut message) = (Vec::new(), vec![0; LOG_MESSAGE_BYTES]);
    while text.len() < LOG_BYTES {
        match file.read(&mut message) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&message[..length]),
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// `libnvidia-ml.so.1` is a link to a file whose name ends in the version; the library itself is not opened.
fn library_version(places: &SourcePaths) -> Reported<String> {
    const FOLDERS: [&str; 6] = [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib/powerpc64le-linux-gnu",
        "usr/lib64",
        "usr/lib",
        "run/opengl-driver/lib",
    ];
    let root = root_of(places);
    let given = places.nvml.is_absolute().then(|| places.nvml.clone());
    let usual = FOLDERS.iter().map(|folder| root.join(folder).join("libnvidia-ml.so.1"));
    let version = |link: PathBuf| {
        let file = std::fs::canonicalize(link).ok()?;
        let version = file.file_name()?.to_str()?.strip_prefix("libnvidia-ml.so.")?.to_owned();
        version.contains('.').then_some(version)
    };
    given.into_iter().chain(usual).find_map(version).map_or(Reported::ABSENT, Reported::Value)
}

/// Which of the watched modules are loaded or built in.
pub(super) fn modules(proc: &Path, sys: &Path) -> Reported<BTreeSet<String>> {
    let listed = kernel_file::read_text(&proc.join("modules"));
    let in_sys = sys.join("module");
    if listed.value().is_none() && !in_sys.is_dir() {
        return listed.map(|_| BTreeSet::new());
    }
    let is_listed = |name: &str| {
        listed.value().is_some_and(|text| text.lines().any(|line| line.split_whitespace().next() == Some(name)))
    };
    let loaded = WATCHED.iter().filter(|name| is_listed(name) || in_sys.join(name).is_dir());
    Reported::Value(loaded.map(|name| (*name).to_owned()).collect())
}

/// The release of the running kernel.
pub(super) fn release(proc: &Path) -> Reported<String> {
    let version = || {
        let text = kernel_file::read_text(&proc.join("version"));
        text.map(|text| text.split_whitespace().nth(2).unwrap_or_default().to_owned())
    };
    kernel_file::read_text(&proc.join("sys/kernel/osrelease")).or(version())
}

/// Whether NVIDIA's persistence daemon runs: by the socket it keeps, or by its name among the processes.
pub(super) fn persistence_daemon(places: &SourcePaths) -> Reported<bool> {
    if root_of(places).join("run/nvidia-persistenced/socket").exists() {
        return Reported::Value(true);
    }
    // The kernel cuts names of tasks at 15 characters.
    const NAME: &str = "nvidia-persiste";
    match names_in(&places.proc) {
        Ok(names) => {
            let is_process = |name: &&String| name.bytes().all(|byte| byte.is_ascii_digit());
            let is_daemon = |pid: &String| {
                kernel_file::read_text(&places.proc.join(pid).join("comm")).value().is_some_and(|name| name == NAME)
            };
            Reported::Value(names.iter().filter(is_process).any(is_daemon))
        }
        Err(error) => kernel_file::from_io_error(&error),
    }
}

// How this process is confined: in a container, in a PID namespace of its own, under which control groups.

/// How this process is confined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerEvidence {
    /// What says that this is a container; empty where nothing does.
    pub container: Vec<String>,
    /// Whether the PID namespace is the host's, in which drivers number processes.
    pub host_pids: Reported<bool>,
    /// The control groups.
    pub cgroup: Reported<CgroupSupport>,
}

/// Which control groups the machine has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupSupport {
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
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unified => "cgroup v2",
            Self::Hybrid => "cgroup v1 and v2 (hybrid)",
            Self::Legacy => "cgroup v1",
        }
    }
}

fn container_signs(places: &SourcePaths, environment: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    const RUNTIMES: [&str; 6] = ["docker", "kubepods", "containerd", "libpod", "crio", "lxc"];
    let root = root_of(places);
    let mut signs = Vec::new();
    let files = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"];
    signs.extend(files.iter().filter(|file| root.join(&file[1..]).exists()).map(|file| format!("{file} exists")));
    let first = kernel_file::read_text(&places.proc.join("1/cgroup"));
    let runtime = RUNTIMES.iter().find(|runtime| first.value().is_some_and(|text| text.contains(**runtime)));
    signs.extend(runtime.map(|runtime| format!("the control group of process 1 names {runtime}")));
    for variable in ["container", "KUBERNETES_SERVICE_HOST"] {
        let set = environment(variable).filter(|value| !value.is_empty());
        signs.extend(set.map(|_| format!("the variable {variable} is set")));
    }
    signs
}

fn cgroup(places: &SourcePaths) -> Reported<CgroupSupport> {
    let root = places.sys.join("fs/cgroup");
    let unified = kernel_file::read_bytes(&root.join("cgroup.controllers"));
    if let Ok(controllers) = unified {
        let controllers = String::from_utf8_lossy(&controllers).split_whitespace().map(str::to_owned).collect();
        return Reported::Value(CgroupSupport {
            mode: CgroupMode::Unified,
            controllers,
            kill: has_kill(&root, places),
        });
    }
    // Version 1 lists its controllers as `name hierarchy groups enabled`.
    let listed = kernel_file::read_text(&places.proc.join("cgroups"));
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
        CgroupSupport { mode, controllers: text.lines().filter_map(enabled).collect(), kill }
    })
}

/// The root group itself has no `cgroup.kill`; any group below it has, where the kernel knows it. Where there is no
/// group to look at, the kernel's release decides.
fn has_kill(root: &Path, places: &SourcePaths) -> bool {
    let names = names_in(root).unwrap_or_default();
    let mut groups = names.iter().map(|name| root.join(name)).filter(|path| path.is_dir()).peekable();
    if groups.peek().is_none() {
        return release(&places.proc).value().is_some_and(|release| knows_kill(release));
    }
    // Seen from a container the root is a group like any other.
    groups.chain([root.to_owned()]).any(|group| group.join("cgroup.kill").exists())
}

/// Whether a kernel of this release has `cgroup.kill`: Linux 5.14 or newer.
fn knows_kill(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(14))
}

// Who is looking, and which groups there are.

/// The current user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct User {
    /// Their number.
    pub uid: u32,
    /// The groups this process is in.
    pub gids: Vec<u32>,
    /// The groups of the machine.
    pub groups: Reported<Vec<Group>>,
}

/// A group of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub gid: u32,
    pub name: String,
    /// Whether it lists the current user; the process may be older than that.
    pub lists_user: bool,
}

impl User {
    pub(super) fn current(etc: &Path) -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let mut gids = vec![rustix::process::getegid().as_raw()];
        gids.extend(rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()));
        gids.sort_unstable();
        gids.dedup();
        let passwd = kernel_file::read_text(&etc.join("passwd"));
        let name = passwd.value().and_then(|passwd| attribution::user_name(passwd, uid));
        let groups = kernel_file::read_text(&etc.join("group"));
        Self { uid, gids, groups: groups.map(|text| parse_groups(&text, name)) }
    }

    /// The group with this number, where the machine names it.
    pub(crate) fn group(&self, gid: u32) -> Option<&Group> {
        self.groups.value()?.iter().find(|group| group.gid == gid)
    }
}

fn parse_groups(text: &str, user: Option<&str>) -> Vec<Group> {
    let group = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let gid = fields.nth(1)?.parse().ok()?;
        let mut members = fields.next().unwrap_or_default().split(',').map(str::trim);
        Some(Group { gid, name, lists_user: user.is_some_and(|user| members.any(|member| member == user)) })
    };
    text.lines().filter_map(group).collect()
}

// What surrounds a program that looks for GPUs: variables that hide devices, and tools on the `PATH`.

/// Variables that hide devices from the programs that see them.
const HIDING: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// Those that are set. An empty one is set too: it hides all.
pub(super) fn hiding_variables(environment: &dyn Fn(&str) -> Option<String>) -> BTreeMap<&'static str, String> {
    let set = |name: &'static str| Some((name, truncate_text(&environment(name)?).into_owned()));
    HIDING.into_iter().filter_map(set).collect()
}

/// Where the tools of `places` are.
fn tools(places: &SourcePaths, path: &str) -> BTreeMap<SourceKind, Option<PathBuf>> {
    let tools = [
        (SourceKind::NvidiaSmi, &places.nvidia_smi),
        (SourceKind::AmdSmi, &places.amd_smi),
        (SourceKind::RocmSmi, &places.rocm_smi),
    ];
    tools.into_iter().map(|(kind, tool)| (kind, found_on(path, tool))).collect()
}

fn found_on(path: &str, tool: &Path) -> Option<PathBuf> {
    let is_bare = tool.components().count() == 1 && tool.is_relative();
    if !is_bare {
        return tool.is_file().then(|| tool.to_owned());
    }
    std::env::split_paths(path).map(|folder| folder.join(tool)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortened_version_is_the_same_version() {
        let versions = |kernel: &str, library: &str| NvidiaVersions {
            kernel: Reported::Value(kernel.to_owned()),
            library: Reported::Value(library.to_owned()),
            ..NvidiaVersions::default()
        };
        assert!(!versions("535.171.04", "535.171").differ());
        assert!(versions("535.171.04", "535.183.01").differ());
        assert!(!NvidiaVersions::default().differ());
    }

    #[test]
    fn whole_groups_can_be_ended_from_linux_5_14_on() {
        for release in ["5.14.0-427.el9.x86_64", "5.15.167.4-microsoft-standard-WSL2", "6.8.0-45-generic", "10.0"] {
            assert!(knows_kill(release), "{release}");
        }
        for release in ["5.13.19", "4.18.0-553.el8_10.x86_64", "5", "", "unknown"] {
            assert!(!knows_kill(release), "{release}");
        }
    }

    #[test]
    fn groups_are_read_with_whether_they_list_the_user() {
        assert_eq!(
            attribution::user_name("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh", 1000),
            Some("ada")
        );
        let groups = parse_groups("video:x:44:ada,bob\nrender:x:110:bob\nbroken\nworse:x:y:z\n", Some("ada"));
        let seen: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.gid, group.lists_user)).collect();
        assert_eq!(seen, [("video", 44, true), ("render", 110, false)]);
    }
}
