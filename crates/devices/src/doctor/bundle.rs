//! Diagnostic bundle: one file with tool output, kernel files and findings, for a maintainer without access to the
//! machine.
//!
//! A machine that needs a report may be broken, so every step is bounded: the number and size of files, the time for a
//! tool or a single file, and the total time. Missing files are listed with the reason. Only listed content is
//! collected: kernel files, tool commands, and fields of tool output (`redact`). The environment, command lines,
//! settings and the kernel's log are never collected.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use gpupool_core::PciAddress;
use serde_json::json;

use crate::detect::SourcePaths;
use crate::doctor::evidence::{DoctorEvidence, sorted_names, vendor_of};
use crate::doctor::redact::{RedactionOptions, redact};
use crate::doctor::{diagnose, render_findings};
use crate::source::SourceKind;
use crate::tool::{ToolOutput, VendorTool, run_on_thread};
use crate::{kernel_file, limits, pci_bus};

/// Options for collecting a bundle.
#[derive(Debug, Clone)]
pub struct BundleRequest {
    /// Version of gpupool that collects the bundle.
    pub version: String,
    /// Creation time.
    pub created: SystemTime,
    /// Time limit of one run of a tool.
    pub tool_deadline: Duration,
    /// Time limit of reading one kernel file.
    pub file_deadline: Duration,
    /// Time limit of the whole collection; anything unread by then is left out.
    pub deadline: Duration,
    /// Whether tools run even if that wakes a sleeping GPU.
    pub wake: bool,
    /// Identities to remove or replace.
    pub redact: RedactionOptions,
}

impl BundleRequest {
    /// Returns the default options.
    pub fn new(version: impl Into<String>, created: SystemTime) -> Self {
        Self {
            version: version.into(),
            created,
            tool_deadline: Duration::from_secs(30),
            file_deadline: Duration::from_secs(5),
            deadline: Duration::from_secs(120),
            wake: false,
            redact: RedactionOptions::default(),
        }
    }
}

/// Collected files by name.
#[derive(Debug)]
pub struct DiagnosticBundle {
    files: BTreeMap<String, Vec<u8>>,
    created_unix_secs: u64,
}

impl DiagnosticBundle {
    /// Collects the files of the machine at `paths`; `evidence` was gathered before.
    pub fn collect(paths: &SourcePaths, evidence: &DoctorEvidence, request: &BundleRequest) -> Self {
        let mut collector = BundleCollector::new(Instant::now() + request.deadline, request.file_deadline);
        let findings = diagnose(evidence);
        let in_json = serde_json::to_vec_pretty(&findings).unwrap_or_default();
        collector.add("findings.json", "the doctor", in_json);
        collector.add("report.txt", "the doctor", render_findings(evidence, &findings).into_bytes());
        copy_trees(&mut collector, paths, evidence);
        run_tools(&mut collector, evidence, request);
        let host = kernel_file::read_text(&paths.proc.join("sys/kernel/hostname"));
        let (mut files, missing) = collector.into_parts();
        let texts = files.iter_mut().map(|(name, entry)| (name, &mut entry.bytes));
        redact(texts, host.value().map(String::as_str), request.redact);
        Self::pack(files, &missing, evidence, request)
    }

    /// Returns the files by name.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// Writes a compressed archive that only its owner can read. Fails if the file already exists.
    pub fn write_to(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        let mut archive = tar::Builder::new(GzEncoder::new(&mut file, Compression::default()));
        for (name, bytes) in self.files() {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            header.set_mtime(self.created_unix_secs);
            archive.append_data(&mut header, name, bytes)?;
        }
        archive.into_inner()?.finish()?.flush()?;
        file.persist_noclobber(path).map_err(|error| error.error)?;
        Ok(())
    }

    fn pack(
        files: BTreeMap<String, BundleFile>,
        missing: &[(String, String)],
        evidence: &DoctorEvidence,
        request: &BundleRequest,
    ) -> Self {
        const NAMES_LEFT_OUT: &str = "unlisted fields of tool output were removed, such as program names and serial \
                                      numbers";
        const NAMES_KEPT: &str = "tool output was kept as requested, with program names and serial numbers";
        const ASLEEP: &str = "of a sleeping device only its identity and power state were read";
        let names = if request.redact.identities { NAMES_LEFT_OUT } else { NAMES_KEPT };
        let created_unix_secs = request.created.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let node = |node: &crate::doctor::DeviceNode| {
            format!("/dev/{} {:04o} {}:{} {:?}", node.name, node.mode, node.uid, node.gid, node.access)
        };
        let file = |(name, file): (&String, &BundleFile)| json!({ "name": name, "source": file.source, "bytes": file.bytes.len() });
        let manifest = json!({
            "gpupool": request.version,
            "created_unix_secs": created_unix_secs,
            "kernel": evidence.kernel_release.value(),
            "redacted": request.redact,
            "notes": [names, ASLEEP],
            "nodes": evidence.nodes().iter().map(node).collect::<Vec<_>>(),
            "files": files.iter().map(file).collect::<Vec<_>>(),
            "missing": missing.iter().map(|(name, why)| json!({ "name": name, "why": why })).collect::<Vec<_>>(),
        });
        let manifest = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
        let mut files: BTreeMap<String, Vec<u8>> = files.into_iter().map(|(name, entry)| (name, entry.bytes)).collect();
        files.insert("manifest.json".to_owned(), manifest);
        Self { files, created_unix_secs }
    }
}

// Kernel files of a bundle. For a sleeping device, only files that do not wake it.

/// Files that the kernel serves from memory, without access to the device.
const IDENTITY_FILES: [&str; 9] = [
    "numa_node",
    "vendor",
    "device",
    "class",
    "revision",
    "subsystem_vendor",
    "subsystem_device",
    "uevent",
    "power/runtime_status",
];

/// Further files of a device on the bus.
const BUS_FILES: [&str; 7] = [
    "local_cpulist",
    "boot_vga",
    "power/control",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
];

/// Further files of a card.
const CARD_FILES: [&str; 29] = [
    "local_cpulist",
    "unique_id",
    "product_name",
    "product_number",
    "vbios_version",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "mem_info_vis_vram_total",
    "mem_info_vis_vram_used",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
    "mem_info_vram_vendor",
    "gpu_busy_percent",
    "mem_busy_percent",
    "gpu_metrics",
    "power_state",
    "power_dpm_force_performance_level",
    "pp_dpm_sclk",
    "pp_dpm_mclk",
    "current_link_speed",
    "current_link_width",
    "current_compute_partition",
    "available_compute_partition",
    "current_memory_partition",
    "available_memory_partition",
    "xcp_id",
    "xgmi_device_id",
    "xgmi_physical_id",
    "xgmi_hive_info/xgmi_hive_id",
];

/// Files of the machine rather than of one device.
const PROC_FILES: [&str; 5] = ["modules", "version", "self/cgroup", "cgroups", "sys/kernel/osrelease"];
const SYS_FILES: [&str; 3] = ["module/nvidia/version", "module/amdgpu/version", "fs/cgroup/cgroup.controllers"];

/// Maximum depth of a copied tree.
const MAX_DEPTH: usize = 8;

/// Copies the listed files of `/sys` and `/proc`.
pub(super) fn copy_trees(collector: &mut BundleCollector, paths: &SourcePaths, evidence: &DoctorEvidence) {
    collector.copy_all("proc", &paths.proc, &PROC_FILES);
    collector.copy_all("sys", &paths.sys, &SYS_FILES);
    copy_bus(collector, paths, evidence);
    copy_cards(collector, paths);
    copy_tree(collector, &paths.sys.join("class/kfd/kfd/topology"), "sys/class/kfd/kfd/topology", MAX_DEPTH);
    copy_nvidia(collector, paths, evidence);
}

fn copy_bus(collector: &mut BundleCollector, paths: &SourcePaths, evidence: &DoctorEvidence) {
    for gpu in evidence.gpus.value().into_iter().flatten() {
        let folder = format!("bus/pci/devices/{}", gpu.pci);
        let (to, from) = (format!("sys/{folder}"), paths.sys.join(&folder));
        collector.copy_all(&to, &from, &IDENTITY_FILES);
        if !gpu.asleep {
            collector.copy_all(&to, &from, &BUS_FILES);
        }
    }
}

fn copy_cards(collector: &mut BundleCollector, paths: &SourcePaths) {
    let folder = paths.sys.join("class/drm");
    for number in kernel_file::numbered_entries(&folder, "card").unwrap_or_default() {
        let device = folder.join(format!("card{number}/device"));
        let to = format!("sys/class/drm/card{number}/device");
        let asleep = pci_bus::is_asleep(&device);
        collector.copy_all(&to, &device, &IDENTITY_FILES);
        for node in sorted_names(&device.join("drm")).unwrap_or_default() {
            collector.copy(&format!("{to}/drm/{node}/dev"), &device.join("drm").join(&node).join("dev"));
        }
        if asleep {
            continue;
        }
        collector.copy_all(&to, &device, &CARD_FILES);
        for monitor in sorted_names(&device.join("hwmon")).unwrap_or_default() {
            // One level: the folders below link back to the device.
            copy_tree(collector, &device.join("hwmon").join(&monitor), &format!("{to}/hwmon/{monitor}"), 1);
        }
    }
}

fn copy_nvidia(collector: &mut BundleCollector, paths: &SourcePaths, evidence: &DoctorEvidence) {
    let asleep: Vec<PciAddress> =
        evidence.gpus.value().into_iter().flatten().filter(|gpu| gpu.asleep).map(|gpu| gpu.pci).collect();
    let root = paths.proc.join("driver/nvidia");
    if !root.is_dir() {
        return;
    }
    collector.copy_all("proc/driver/nvidia", &root, &["version", "params"]);
    for gpu in sorted_names(&root.join("gpus")).unwrap_or_default() {
        let is_asleep = crate::address::parse_pci_address(&gpu).is_some_and(|address| asleep.contains(&address));
        let files: &[&str] = if is_asleep { &["power"] } else { &["information", "numa_status", "power"] };
        collector.copy_all(&format!("proc/driver/nvidia/gpus/{gpu}"), &root.join("gpus").join(&gpu), files);
    }
}

/// Copies a folder without following links.
fn copy_tree(collector: &mut BundleCollector, from: &Path, to: &str, depth: usize) {
    let names = match sorted_names(from) {
        Ok(names) if depth > 0 => names,
        Ok(_) => return,
        Err(error) => return collector.skip(to, &error.to_string()),
    };
    for name in names {
        copy_entry(collector, &from.join(&name), &format!("{to}/{name}"), depth - 1);
    }
}

fn copy_entry(collector: &mut BundleCollector, from: &Path, to: &str, depth: usize) {
    match std::fs::symlink_metadata(from) {
        Ok(facts) if facts.is_dir() => copy_tree(collector, from, to, depth),
        Ok(facts) if facts.is_symlink() => {}
        Ok(_) => collector.copy(to, from),
        Err(error) => collector.skip(to, &error.to_string()),
    }
}

// Output of the vendors' tools, for a bundle.

/// One run of a tool: arguments, file name, file extension.
type ToolQuery = (&'static [&'static str], &'static str, &'static str);

/// All runs of each tool.
const TOOL_QUERIES: [(SourceKind, &[ToolQuery]); 3] = [
    (
        SourceKind::NvidiaSmi,
        &[
            (&["-q", "-x"], "nvidia-smi-q", "xml"),
            (&["-L"], "nvidia-smi-L", "txt"),
            (&["topo", "-m"], "nvidia-smi-topo", "txt"),
        ],
    ),
    (
        SourceKind::AmdSmi,
        &[
            (&["list", "--json"], "amd-smi-list", "json"),
            (&["static", "--json"], "amd-smi-static", "json"),
            (&["metric", "--json"], "amd-smi-metric", "json"),
        ],
    ),
    (SourceKind::RocmSmi, &[(&["-a", "--json"], "rocm-smi-a", "json")]),
];

/// Runs the installed tools. A failure becomes a file of its own, `<name>.error.txt`.
pub(super) fn run_tools(collector: &mut BundleCollector, evidence: &DoctorEvidence, request: &BundleRequest) {
    for (kind, queries) in TOOL_QUERIES {
        match runnable_tool(evidence, request, kind) {
            Ok(path) => {
                let mut tool = VendorTool::new(path, request.tool_deadline);
                for (arguments, name, ending) in queries {
                    run_tool(collector, &mut tool, arguments, name, ending);
                }
            }
            Err(why) => queries.iter().for_each(|(_, name, ending)| collector.skip(&format!("{name}.{ending}"), why)),
        }
    }
}

/// Returns the path of a tool, or the reason not to run it.
fn runnable_tool<'a>(
    evidence: &'a DoctorEvidence,
    request: &BundleRequest,
    kind: SourceKind,
) -> Result<&'a Path, &'static str> {
    let path = evidence.tools.get(&kind).and_then(Option::as_deref).ok_or("the tool is not on the PATH")?;
    let asleep = vendor_of(kind).is_some_and(|vendor| evidence.gpus_of(vendor).any(|gpu| gpu.asleep));
    if asleep && !request.wake {
        return Err("not run: it would wake a sleeping GPU");
    }
    Ok(path)
}

fn run_tool(collector: &mut BundleCollector, tool: &mut VendorTool, arguments: &[&str], name: &str, ending: &str) {
    let file = format!("{name}.{ending}");
    if collector.is_late() {
        return collector.skip(&file, "the time limit of the bundle was reached");
    }
    let command = tool.path().file_name().unwrap_or_default().to_string_lossy();
    let source = format!("{command} {}", arguments.join(" "));
    let failure = match tool.run(arguments) {
        Ok(ToolOutput { stdout, stderr, code }) => {
            let failed = code != Some(0);
            let failure = failed.then(|| {
                let ended = code.map_or("ended by a signal".to_owned(), |code| format!("exit code {code}"));
                format!("{ended}\n{stderr}")
            });
            if !stdout.trim().is_empty() {
                collector.add(&file, source.trim_end(), stdout.into_bytes());
            }
            failure
        }
        Err(error) => Some(format!("{}: {error}\n", error.code())),
    };
    if let Some(failure) = failure {
        collector.skip(&file, failure.lines().next().unwrap_or_default());
        collector.add(&format!("{name}.error.txt"), source.trim_end(), failure.into_bytes());
    }
}

// Collection of files within bounds of number, size and time.

/// Maximum number of reads that hang; each blocks a thread that cannot be ended.
const MAX_STUCK_READS: usize = 4;

/// Content of a file and its origin.
#[derive(Debug)]
pub(super) struct BundleFile {
    pub source: String,
    pub bytes: Vec<u8>,
}

/// Collected files, and missing files with the reason.
pub(super) struct BundleCollector {
    files: BTreeMap<String, BundleFile>,
    missing: Vec<(String, String)>,
    bytes: usize,
    deadline: Instant,
    file_deadline: Duration,
    stuck_reads: usize,
}

impl BundleCollector {
    /// Creates an empty collector that stops at `deadline` and waits at most `file_deadline` for each file.
    pub(super) fn new(deadline: Instant, file_deadline: Duration) -> Self {
        let (files, missing) = (BTreeMap::new(), Vec::new());
        Self { files, missing, bytes: 0, deadline, file_deadline, stuck_reads: 0 }
    }

    /// Copies one file of the machine.
    pub(super) fn copy(&mut self, name: &str, path: &Path) {
        match self.read(path) {
            Ok(bytes) => self.add(name, &path.display().to_string(), bytes),
            Err(why) => self.skip(name, &why),
        }
    }

    /// Copies several files of a folder.
    pub(super) fn copy_all(&mut self, to: &str, from: &Path, files: &[&str]) {
        for file in files {
            self.copy(&format!("{to}/{file}"), &from.join(file));
        }
    }

    pub(super) fn add(&mut self, name: &str, source: &str, bytes: Vec<u8>) {
        if self.files.len() >= limits::BUNDLE_FILES || self.bytes + bytes.len() > limits::BUNDLE_BYTES {
            return self.skip(name, "the bundle is full");
        }
        self.bytes += bytes.len();
        self.files.insert(name.to_owned(), BundleFile { source: source.to_owned(), bytes });
    }

    /// Records why a file is missing.
    pub(super) fn skip(&mut self, name: &str, why: &str) {
        if self.missing.len() < limits::BUNDLE_FILES {
            self.missing.push((name.to_owned(), why.to_owned()));
        }
    }

    /// Whether the deadline has passed.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Returns the collected files and the missing ones.
    pub(super) fn into_parts(self) -> (BTreeMap<String, BundleFile>, Vec<(String, String)>) {
        (self.files, self.missing)
    }

    fn read(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        if self.is_late() {
            return Err("the time limit of the bundle was reached".to_owned());
        }
        if self.stuck_reads >= MAX_STUCK_READS {
            return Err("not read: too many other files did not respond".to_owned());
        }
        // The read may never return; its thread is lost then.
        let file = path.to_owned();
        let receiver = run_on_thread("bundle-reader", move || kernel_file::read_bytes(&file));
        let file_deadline = self.file_deadline.min(self.deadline.saturating_duration_since(Instant::now()));
        match receiver.recv_timeout(file_deadline) {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(RecvTimeoutError::Disconnected) => Err("no thread to read the file".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck_reads += 1;
                Err(format!("unresponsive: no response within {} ms", file_deadline.as_millis()))
            }
        }
    }
}
