//! State of a machine as plain data. Unreadable parts are recorded as unreadable, and the others are still gathered.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gpupool_core::Vendor;
use rustix::fs::{Access as AccessMode, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::detect::SourcePaths;
use crate::kernel_log::{self, FaultCount};
use crate::pci_bus::{self, PciGpu};
use crate::reported::{MissingReason, Reported, truncate_text};
use crate::source::{SourceError, SourceKind};
use crate::source_reading::SourceReading;
use crate::{host_process, kernel_file, limits};

/// Outcome of reading one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceResult {
    pub kind: SourceKind,
    pub result: Result<SourceReading, SourceError>,
}

/// Everything that the doctor evaluates about a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DoctorEvidence {
    /// Display adapters and accelerators on the PCI bus.
    pub gpus: Reported<Vec<PciGpu>>,
    /// Loaded kernel modules among the relevant ones, spelled with `_`.
    pub modules: Reported<BTreeSet<String>>,
    /// Versions of NVIDIA's kernel module and library.
    pub nvidia: NvidiaVersions,
    /// Outcome of reading each source.
    pub(crate) sources: Vec<SourceResult>,
    /// Device nodes of GPUs.
    pub nodes: Reported<Vec<DeviceNode>>,
    /// User that runs the doctor.
    pub(crate) user: CurrentUser,
    /// Confinement of this process.
    pub confinement: ContainerEvidence,
    /// Release of the running kernel.
    pub kernel_release: Reported<String>,
    /// Whether NVIDIA's persistence daemon runs.
    pub persistence_daemon: Reported<bool>,
    /// Faults in the kernel's log since the last boot; empty without a log.
    pub(crate) kernel_log: Vec<FaultCount>,
    /// Variables that are set and hide devices from programs.
    pub variables: BTreeMap<&'static str, String>,
    /// Path of each tool; `None` if the tool is not on the `PATH`.
    pub tools: BTreeMap<SourceKind, Option<PathBuf>>,
}

impl DoctorEvidence {
    /// Gathers evidence on the machine at `paths`. `environment` looks up a variable, `sources` holds the outcome of
    /// each source.
    ///
    /// Opens no device node and reads only files that the kernel serves from memory, so no device wakes.
    pub fn gather(
        paths: &SourcePaths,
        environment: &dyn Fn(&str) -> Option<String>,
        sources: Vec<SourceResult>,
    ) -> Self {
        Self {
            gpus: pci_bus::scan(&paths.sys).map(|bus| bus.gpus),
            modules: loaded_modules(&paths.proc, &paths.sys),
            nvidia: NvidiaVersions::read(paths),
            sources,
            nodes: device_nodes(&paths.dev, &paths.sys),
            user: CurrentUser::current(&paths.etc),
            confinement: ContainerEvidence {
                container: container_signs(paths, environment),
                host_pids: host_process::has_host_pids(&paths.proc),
                cgroup: cgroup_support(paths),
            },
            kernel_release: kernel_release(&paths.proc),
            persistence_daemon: persistence_daemon(paths),
            kernel_log: kernel_log::count_faults(&read_kernel_log(&paths.dev)),
            variables: hiding_variables(environment),
            tools: find_tools(paths, &environment("PATH").unwrap_or_default()),
        }
    }

    /// Replaces the faults by those in another kernel log.
    #[cfg(test)]
    pub(crate) fn with_kernel_log(mut self, text: &str) -> Self {
        self.kernel_log = kernel_log::count_faults(text);
        self
    }

    /// Returns the GPUs of one vendor on the bus.
    pub(crate) fn gpus_of(&self, vendor: Vendor) -> impl Iterator<Item = &PciGpu> + Clone {
        self.gpus.value().into_iter().flatten().filter(move |gpu| gpu.vendor == vendor)
    }

    /// Whether a kernel module is loaded; `false` also if unknown.
    pub(crate) fn has_module(&self, name: &str) -> bool {
        self.modules.value().is_some_and(|modules| modules.contains(name))
    }

    /// Returns the device nodes, or none if they are unknown.
    pub(crate) fn nodes(&self) -> &[DeviceNode] {
        self.nodes.value().map_or(&[], Vec::as_slice)
    }

    /// Whether this process runs in a container.
    pub(crate) fn in_container(&self) -> bool {
        !self.confinement.container.is_empty()
    }

    /// Whether some processes of the machine are invisible to this process.
    pub(crate) fn is_confined(&self) -> bool {
        self.in_container() || self.confinement.host_pids.value() == Some(&false)
    }

    /// Returns the successful readings of one vendor's sources.
    pub(crate) fn readings_of(&self, vendor: Vendor) -> impl Iterator<Item = &SourceReading> {
        let of_vendor = move |source: &&SourceResult| vendor_of(source.kind) == Some(vendor);
        self.sources.iter().filter(of_vendor).filter_map(|source| source.result.as_ref().ok())
    }

    /// Returns the sources that failed, with their errors.
    pub(crate) fn failures(&self) -> impl Iterator<Item = (SourceKind, &SourceError)> {
        self.sources.iter().filter_map(|source| Some((source.kind, source.result.as_ref().err()?)))
    }

    /// Describes the sources that failed with this error code.
    pub(crate) fn errors_with_code(&self, code: &str) -> Vec<String> {
        let failed = self.failures().filter(|(_, error)| error.code() == code);
        failed.map(|(kind, error)| format!("{kind}: {error}")).collect()
    }

    /// Merges the readings of all sources.
    pub(crate) fn merged_reading(&self) -> SourceReading {
        let mut merged = SourceReading::default();
        for reading in self.sources.iter().filter_map(|source| source.result.as_ref().ok()) {
            merged.merge(reading.clone());
        }
        merged
    }
}

/// Returns the vendor whose devices a source reports.
pub(crate) const fn vendor_of(kind: SourceKind) -> Option<Vendor> {
    match kind {
        SourceKind::Nvml | SourceKind::NvidiaSmi => Some(Vendor::Nvidia),
        SourceKind::AmdSysfs | SourceKind::AmdSmi | SourceKind::RocmSmi => Some(Vendor::Amd),
        SourceKind::Simulated => None,
    }
}

/// Returns the root of the file system that contains `/etc`.
fn root_folder(paths: &SourcePaths) -> &Path {
    paths.etc.parent().unwrap_or(Path::new("/"))
}

/// Lists the names in a folder, sorted.
pub(super) fn sorted_names(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).take(crate::limits::PROCESSES).collect();
    names.sort_unstable();
    Ok(names)
}

// Device nodes and access to them, determined without opening a node: opening can wake a GPU.

/// Read and write access of the current user to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAccess {
    /// The user may open the node.
    Granted,
    /// The permission bits of the node deny access.
    Denied,
    /// The permission bits may allow access, but the rules of the device control group deny it.
    Forbidden,
    /// Unknown, with the kernel's error text.
    Unknown(MissingReason),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Name below `/dev`: `nvidia0`, `kfd`, `dri/renderD128`.
    pub name: String,
    /// Vendor of the device, if known.
    pub vendor: Option<Vendor>,
    /// Permission bits.
    pub mode: u32,
    /// Number of the owning user.
    pub uid: u32,
    /// Number of the owning group.
    pub gid: u32,
    /// Access of the current user.
    pub access: NodeAccess,
}

impl DeviceNode {
    /// Whether the permission bits let group members read and write.
    pub(crate) fn is_open_to_group(&self) -> bool {
        self.mode & 0o060 == 0o060
    }

    /// Returns the number of an `nvidia<number>` node.
    pub(crate) fn nvidia_minor(&self) -> Option<u32> {
        self.name.strip_prefix("nvidia")?.parse().ok()
    }

    pub(crate) fn is_render(&self) -> bool {
        self.name.starts_with("dri/renderD")
    }
}

/// Lists the device nodes of GPUs.
pub(super) fn device_nodes(dev: &Path, sys: &Path) -> Reported<Vec<DeviceNode>> {
    let names = match sorted_names(dev) {
        Ok(names) => names,
        Err(error) => return kernel_file::from_io_error(&error),
    };
    let render = sorted_names(&dev.join("dri")).unwrap_or_default();
    let render = render.iter().filter(|name| name.starts_with("renderD")).map(|name| {
        let vendor = kernel_file::read_number::<u16>(&sys.join("class/drm").join(name).join("device/vendor"));
        (format!("dri/{name}"), vendor.value().map(|&id| pci_bus::vendor_of_id(id).unwrap_or(Vendor::Other)))
    });
    let direct = names.into_iter().filter_map(|name| match name.as_str() {
        "kfd" => Some((name, Some(Vendor::Amd))),
        _ if is_nvidia_node(&name) => Some((name, Some(Vendor::Nvidia))),
        _ => None,
    });
    let seen = direct.chain(render).filter_map(|(name, vendor)| read_node(dev, name, vendor));
    Reported::Value(seen.take(limits::DEVICES).collect())
}

fn is_nvidia_node(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("nvidia") else { return false };
    matches!(rest, "ctl" | "-uvm" | "-uvm-tools") || !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())
}

fn read_node(dev: &Path, name: String, vendor: Option<Vendor>) -> Option<DeviceNode> {
    let path = dev.join(&name);
    let facts = std::fs::metadata(&path).ok()?;
    let mode = facts.permissions().mode() & 0o7777;
    Some(DeviceNode { name, vendor, mode, uid: facts.uid(), gid: facts.gid(), access: node_access(&path) })
}

fn node_access(path: &Path) -> NodeAccess {
    match accessat(CWD, path, AccessMode::READ_OK | AccessMode::WRITE_OK, AtFlags::EACCESS) {
        Ok(()) => NodeAccess::Granted,
        Err(Errno::ACCESS) => NodeAccess::Denied,
        Err(Errno::PERM) => NodeAccess::Forbidden,
        Err(error) => NodeAccess::Unknown(error.to_string().into()),
    }
}

// State of the kernel and its drivers: modules, versions, the persistence daemon, the log.

/// Kernel modules that matter to GPUs.
const RELEVANT_MODULES: [&str; 8] = ["nvidia", "nvidia_uvm", "nouveau", "amdgpu", "radeon", "vfio_pci", "i915", "xe"];

/// Maximum bytes read of the kernel's log, and of one of its messages, which the kernel bounds at 8 KiB.
const MAX_LOG_BYTES: usize = 8 << 20;
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// Versions of NVIDIA's kernel module and management library, which must be equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaVersions {
    /// Content of `/proc/driver/nvidia/version`.
    pub kernel_text: Reported<String>,
    /// Version of the loaded kernel module.
    pub kernel: Reported<String>,
    /// Version of the library, from its file name.
    pub library: Reported<String>,
}

impl NvidiaVersions {
    pub(super) fn read(paths: &SourcePaths) -> Self {
        let kernel_text = kernel_file::read_text(&paths.proc.join("driver/nvidia/version"));
        let by_text = pci_bus::nvidia_driver_version(&paths.proc);
        let kernel = by_text.or(kernel_file::read_text(&paths.sys.join("module/nvidia/version")));
        Self { kernel_text, kernel, library: library_version(paths) }
    }

    /// Whether both versions are known and differ. Tools shorten versions, so `535.171` equals `535.171.04`.
    pub(crate) fn differ(&self) -> bool {
        match (self.kernel.value(), self.library.value()) {
            (Some(kernel), Some(library)) => kernel.split('.').zip(library.split('.')).any(|(a, b)| a != b),
            _ => false,
        }
    }
}

/// Reads the kernel's log; empty if the user may not read it.
///
/// Each read returns one message, and the log does not block at its end. A message that was overwritten meanwhile is
/// skipped.
pub(super) fn read_kernel_log(dev: &Path) -> String {
    let without_waiting = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let opened = File::options().read(true).custom_flags(without_waiting).open(dev.join("kmsg"));
    let Ok(mut file) = opened else { return String::new() };
    let (mut text, mut message) = (Vec::new(), vec![0; MAX_MESSAGE_BYTES]);
    while text.len() < MAX_LOG_BYTES {
        match file.read(&mut message) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&message[..length]),
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Returns the version in the file name behind the link `libnvidia-ml.so.1`, without opening the library.
fn library_version(paths: &SourcePaths) -> Reported<String> {
    const FOLDERS: [&str; 6] = [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib/powerpc64le-linux-gnu",
        "usr/lib64",
        "usr/lib",
        "run/opengl-driver/lib",
    ];
    let root = root_folder(paths);
    let given = paths.nvml.is_absolute().then(|| paths.nvml.clone());
    let usual = FOLDERS.iter().map(|folder| root.join(folder).join("libnvidia-ml.so.1"));
    let version = |link: PathBuf| {
        let file = std::fs::canonicalize(link).ok()?;
        let version = file.file_name()?.to_str()?.strip_prefix("libnvidia-ml.so.")?.to_owned();
        version.contains('.').then_some(version)
    };
    given.into_iter().chain(usual).find_map(version).map_or(Reported::ABSENT, Reported::Value)
}

/// Returns the relevant modules that are loaded or built in.
pub(super) fn loaded_modules(proc: &Path, sys: &Path) -> Reported<BTreeSet<String>> {
    let listed = kernel_file::read_text(&proc.join("modules"));
    let in_sys = sys.join("module");
    if listed.value().is_none() && !in_sys.is_dir() {
        return listed.map(|_| BTreeSet::new());
    }
    let is_listed = |name: &str| {
        listed.value().is_some_and(|text| text.lines().any(|line| line.split_whitespace().next() == Some(name)))
    };
    let loaded = RELEVANT_MODULES.iter().filter(|name| is_listed(name) || in_sys.join(name).is_dir());
    Reported::Value(loaded.map(|name| (*name).to_owned()).collect())
}

/// Returns the release of the running kernel.
pub(super) fn kernel_release(proc: &Path) -> Reported<String> {
    let version = || {
        let text = kernel_file::read_text(&proc.join("version"));
        text.map(|text| text.split_whitespace().nth(2).unwrap_or_default().to_owned())
    };
    kernel_file::read_text(&proc.join("sys/kernel/osrelease")).or(version())
}

/// Whether NVIDIA's persistence daemon runs, by its socket or its process name.
pub(super) fn persistence_daemon(paths: &SourcePaths) -> Reported<bool> {
    if root_folder(paths).join("run/nvidia-persistenced/socket").exists() {
        return Reported::Value(true);
    }
    // The kernel cuts process names at 15 characters.
    const NAME: &str = "nvidia-persiste";
    match sorted_names(&paths.proc) {
        Ok(names) => {
            let is_process = |name: &&String| name.bytes().all(|byte| byte.is_ascii_digit());
            let is_daemon = |pid: &String| {
                kernel_file::read_text(&paths.proc.join(pid).join("comm")).value().is_some_and(|name| name == NAME)
            };
            Reported::Value(names.iter().filter(is_process).any(is_daemon))
        }
        Err(error) => kernel_file::from_io_error(&error),
    }
}

// Confinement of this process: container, PID namespace, control groups.

/// Confinement of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerEvidence {
    /// Signs of a container; empty outside of one.
    pub container: Vec<String>,
    /// Whether the PID namespace is the host's, whose numbers drivers use.
    pub host_pids: Reported<bool>,
    /// Support for control groups.
    pub cgroup: Reported<CgroupSupport>,
}

/// Control group support of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupSupport {
    /// Layout of the control groups.
    pub mode: CgroupMode,
    /// Available controllers: `cpu`, `memory`, `pids`, `dmem`.
    pub controllers: BTreeSet<String>,
    /// Whether a whole group can be killed at once (`cgroup.kill`, Linux 5.14).
    pub has_kill: bool,
}

/// Layout of the control groups of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupMode {
    /// One tree, version 2.
    Unified,
    /// Version 1 with a version 2 tree beside it.
    Hybrid,
    /// Version 1 alone.
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

fn container_signs(paths: &SourcePaths, environment: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    const RUNTIMES: [&str; 6] = ["docker", "kubepods", "containerd", "libpod", "crio", "lxc"];
    let root = root_folder(paths);
    let mut signs = Vec::new();
    let files = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"];
    signs.extend(files.iter().filter(|file| root.join(&file[1..]).exists()).map(|file| format!("{file} exists")));
    let first = kernel_file::read_text(&paths.proc.join("1/cgroup"));
    let runtime = RUNTIMES.iter().find(|runtime| first.value().is_some_and(|text| text.contains(**runtime)));
    signs.extend(runtime.map(|runtime| format!("the control group of process 1 names {runtime}")));
    for variable in ["container", "KUBERNETES_SERVICE_HOST"] {
        let set = environment(variable).filter(|value| !value.is_empty());
        signs.extend(set.map(|_| format!("the variable {variable} is set")));
    }
    signs
}

fn cgroup_support(paths: &SourcePaths) -> Reported<CgroupSupport> {
    let root = paths.sys.join("fs/cgroup");
    let unified = kernel_file::read_bytes(&root.join("cgroup.controllers"));
    if let Ok(controllers) = unified {
        let controllers = String::from_utf8_lossy(&controllers).split_whitespace().map(str::to_owned).collect();
        return Reported::Value(CgroupSupport {
            mode: CgroupMode::Unified,
            controllers,
            has_kill: has_cgroup_kill(&root, paths),
        });
    }
    // Version 1 lists its controllers as `name hierarchy groups enabled`.
    let listed = kernel_file::read_text(&paths.proc.join("cgroups"));
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
        let has_kill = mode == CgroupMode::Hybrid && has_cgroup_kill(&beside, paths);
        CgroupSupport { mode, controllers: text.lines().filter_map(enabled).collect(), has_kill }
    })
}

/// Whether control groups have `cgroup.kill`. The root group never has the file; every group below has it if the kernel
/// supports it. Without a group to check, the kernel's release decides.
fn has_cgroup_kill(root: &Path, paths: &SourcePaths) -> bool {
    let names = sorted_names(root).unwrap_or_default();
    let mut groups = names.iter().map(|name| root.join(name)).filter(|path| path.is_dir()).peekable();
    if groups.peek().is_none() {
        return kernel_release(&paths.proc).value().is_some_and(|release| supports_cgroup_kill(release));
    }
    // In a container the root is a group like any other.
    groups.chain([root.to_owned()]).any(|group| group.join("cgroup.kill").exists())
}

/// Whether a kernel of this release supports `cgroup.kill`: Linux 5.14 or newer.
fn supports_cgroup_kill(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(14))
}

// The current user and the groups of the machine.

/// User that runs this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CurrentUser {
    /// Number of the user.
    pub uid: u32,
    /// Groups of this process.
    pub gids: Vec<u32>,
    /// Groups of the machine.
    pub groups: Reported<Vec<UserGroup>>,
}

/// Group of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UserGroup {
    pub gid: u32,
    pub name: String,
    /// Whether the group lists the current user; the process may be older than its membership.
    pub lists_user: bool,
}

impl CurrentUser {
    pub(super) fn current(etc: &Path) -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let mut gids = vec![rustix::process::getegid().as_raw()];
        gids.extend(rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()));
        gids.sort_unstable();
        gids.dedup();
        let passwd = kernel_file::read_text(&etc.join("passwd"));
        let name = passwd.value().and_then(|passwd| host_process::user_name(passwd, uid));
        let groups = kernel_file::read_text(&etc.join("group"));
        Self { uid, gids, groups: groups.map(|text| parse_groups(&text, name)) }
    }

    /// Returns the group with this number, if it has a name.
    pub(crate) fn group(&self, gid: u32) -> Option<&UserGroup> {
        self.groups.value()?.iter().find(|group| group.gid == gid)
    }
}

fn parse_groups(text: &str, user: Option<&str>) -> Vec<UserGroup> {
    let group = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let gid = fields.nth(1)?.parse().ok()?;
        let mut members = fields.next().unwrap_or_default().split(',').map(str::trim);
        Some(UserGroup { gid, name, lists_user: user.is_some_and(|user| members.any(|member| member == user)) })
    };
    text.lines().filter_map(group).collect()
}

// Environment of programs that use GPUs: variables that hide devices, and tools on the `PATH`.

/// Variables that hide devices from programs.
const HIDING_VARIABLES: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// Returns the variables that are set. An empty value counts: it hides all devices.
pub(super) fn hiding_variables(environment: &dyn Fn(&str) -> Option<String>) -> BTreeMap<&'static str, String> {
    let set = |name: &'static str| Some((name, truncate_text(&environment(name)?).into_owned()));
    HIDING_VARIABLES.into_iter().filter_map(set).collect()
}

/// Returns the path of each tool.
fn find_tools(paths: &SourcePaths, path: &str) -> BTreeMap<SourceKind, Option<PathBuf>> {
    let tools = [
        (SourceKind::NvidiaSmi, &paths.nvidia_smi),
        (SourceKind::AmdSmi, &paths.amd_smi),
        (SourceKind::RocmSmi, &paths.rocm_smi),
    ];
    tools.into_iter().map(|(kind, tool)| (kind, find_on_path(path, tool))).collect()
}

fn find_on_path(path: &str, tool: &Path) -> Option<PathBuf> {
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
    fn cgroup_kill_is_supported_from_linux_5_14_on() {
        for release in ["5.14.0-427.el9.x86_64", "5.15.167.4-microsoft-standard-WSL2", "6.8.0-45-generic", "10.0"] {
            assert!(supports_cgroup_kill(release), "{release}");
        }
        for release in ["5.13.19", "4.18.0-553.el8_10.x86_64", "5", "", "unknown"] {
            assert!(!supports_cgroup_kill(release), "{release}");
        }
    }

    #[test]
    fn groups_know_whether_they_list_the_user() {
        assert_eq!(
            host_process::user_name("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh", 1000),
            Some("ada")
        );
        let groups = parse_groups("video:x:44:ada,bob\nrender:x:110:bob\nbroken\nworse:x:y:z\n", Some("ada"));
        let seen: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.gid, group.lists_user)).collect();
        assert_eq!(seen, [("video", 44, true), ("render", 110, false)]);
    }
}
