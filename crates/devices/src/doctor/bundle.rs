//! One file with what somebody elsewhere needs to see a machine as it is: what tools print, the kernel's files, findings.
//!
//! A machine that needs a report may be broken, so everything here is bounded: the number and size of files, the time
//! a tool or a single file may take, and the time of it all. What is missing is listed with the reason. What
//! goes in is on lists: which files of the kernel, which questions to which tools, and which fields of their answers
//! (`redact`). The environment, command lines, settings and the kernel's log are on none of them.

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
use crate::doctor::evidence::{DoctorEvidence, names_in, vendor_of};
use crate::doctor::redact::{RedactionOptions, redact};
use crate::doctor::{diagnose, render_findings};
use crate::source::SourceKind;
use crate::tool::{ToolOutput, VendorTool, run_on_thread};
use crate::{kernel_file, limits, pci_bus};

/// What a bundle should be like.
#[derive(Debug, Clone)]
pub struct BundleRequest {
    /// The version of gpupool that makes it.
    pub version: String,
    /// When it is made.
    pub created: SystemTime,
    /// How long one run of a tool may take.
    pub tool_deadline: Duration,
    /// How long one file of the kernel may take.
    pub file_deadline: Duration,
    /// How long all of it may take; what is not there by then is left out.
    pub deadline: Duration,
    /// Whether tools are run although that wakes a sleeping GPU.
    pub wake: bool,
    /// What is replaced.
    pub redact: RedactionOptions,
}

impl BundleRequest {
    /// The usual bundle.
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

/// Files for a report, by name.
#[derive(Debug)]
pub struct DiagnosticBundle {
    files: BTreeMap<String, Vec<u8>>,
    created_unix_secs: u64,
}

impl DiagnosticBundle {
    /// Collects what there is on the machine at `places`, of which `evidence` was gathered before.
    pub fn collect(places: &SourcePaths, evidence: &DoctorEvidence, wish: &BundleRequest) -> Self {
        let mut pile = Pile::new(Instant::now() + wish.deadline, wish.file_deadline);
        let findings = diagnose(evidence);
        let in_json = serde_json::to_vec_pretty(&findings).unwrap_or_default();
        pile.add("findings.json", "the doctor", in_json);
        pile.add("report.txt", "the doctor", render_findings(evidence, &findings).into_bytes());
        copy_trees(&mut pile, places, evidence);
        run_tools(&mut pile, evidence, wish);
        let host = kernel_file::read_text(&places.proc.join("sys/kernel/hostname"));
        let (mut files, missing) = pile.into_parts();
        let texts = files.iter_mut().map(|(name, entry)| (name, &mut entry.bytes));
        redact(texts, host.value().map(String::as_str), wish.redact);
        Self::pack(files, &missing, evidence, wish)
    }

    /// The files, by name.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// Writes a compressed archive that only its owner can read; a file that is already there is not replaced.
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
        files: BTreeMap<String, Entry>,
        missing: &[(String, String)],
        evidence: &DoctorEvidence,
        wish: &BundleRequest,
    ) -> Self {
        const NAMES_LEFT_OUT: &str = "of what tools print, fields that are not on a list were left out, such as names of \
                                      programs and serial numbers";
        const NAMES_KEPT: &str = "what tools print was kept as asked, with names of programs and serial numbers";
        const ASLEEP: &str = "of a device that was asleep only its identity and power state were read";
        let names = if wish.redact.identities { NAMES_LEFT_OUT } else { NAMES_KEPT };
        let created_unix_secs = wish.created.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let node = |node: &crate::doctor::DeviceNode| {
            format!("/dev/{} {:04o} {}:{} {:?}", node.name, node.mode, node.uid, node.gid, node.access)
        };
        let listed = |(name, entry): (&String, &Entry)| json!({ "name": name, "source": entry.source, "bytes": entry.bytes.len() });
        let manifest = json!({
            "gpupool": wish.version,
            "created_unix_secs": created_unix_secs,
            "kernel": evidence.kernel_release.value(),
            "redacted": wish.redact,
            "notes": [names, ASLEEP],
            "nodes": evidence.nodes().iter().map(node).collect::<Vec<_>>(),
            "files": files.iter().map(listed).collect::<Vec<_>>(),
            "missing": missing.iter().map(|(name, why)| json!({ "name": name, "why": why })).collect::<Vec<_>>(),
        });
        let manifest = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
        let mut files: BTreeMap<String, Vec<u8>> = files.into_iter().map(|(name, entry)| (name, entry.bytes)).collect();
        files.insert("manifest.json".to_owned(), manifest);
        Self { files, created_unix_secs }
    }
}

// Which files of the kernel go into a bundle. Of a sleeping device only those that do not wake it.

/// What the kernel keeps in its own memory: reading it asks nothing of the device.
const IDENTITY: [&str; 9] = [
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

/// What else is read of a device on the bus.
const BUS: [&str; 7] = [
    "local_cpulist",
    "boot_vga",
    "power/control",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
];

/// What else is read of a card.
const CARD: [&str; 29] = [
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

/// Files about the machine that are not of one device.
const PROC: [&str; 5] = ["modules", "version", "self/cgroup", "cgroups", "sys/kernel/osrelease"];
const SYS: [&str; 3] = ["module/nvidia/version", "module/amdgpu/version", "fs/cgroup/cgroup.controllers"];

/// No tree is followed deeper.
const DEPTH: usize = 8;

/// Copies what is useful of `/sys` and `/proc`.
pub(super) fn copy_trees(pile: &mut Pile, places: &SourcePaths, evidence: &DoctorEvidence) {
    pile.copy_all("proc", &places.proc, &PROC);
    pile.copy_all("sys", &places.sys, &SYS);
    copy_bus(pile, places, evidence);
    copy_cards(pile, places);
    walk(pile, &places.sys.join("class/kfd/kfd/topology"), "sys/class/kfd/kfd/topology", DEPTH);
    copy_nvidia(pile, places, evidence);
}

fn copy_bus(pile: &mut Pile, places: &SourcePaths, evidence: &DoctorEvidence) {
    for gpu in evidence.gpus.value().into_iter().flatten() {
        let folder = format!("bus/pci/devices/{}", gpu.pci);
        let (to, from) = (format!("sys/{folder}"), places.sys.join(&folder));
        pile.copy_all(&to, &from, &IDENTITY);
        if !gpu.asleep {
            pile.copy_all(&to, &from, &BUS);
        }
    }
}

fn copy_cards(pile: &mut Pile, places: &SourcePaths) {
    let folder = places.sys.join("class/drm");
    for number in kernel_file::numbered_entries(&folder, "card").unwrap_or_default() {
        let device = folder.join(format!("card{number}/device"));
        let to = format!("sys/class/drm/card{number}/device");
        let asleep = pci_bus::is_asleep(&device);
        pile.copy_all(&to, &device, &IDENTITY);
        for node in names_in(&device.join("drm")).unwrap_or_default() {
            pile.copy(&format!("{to}/drm/{node}/dev"), &device.join("drm").join(&node).join("dev"));
        }
        if asleep {
            continue;
        }
        pile.copy_all(&to, &device, &CARD);
        for monitor in names_in(&device.join("hwmon")).unwrap_or_default() {
            // One level: what is below are links back to the device.
            walk(pile, &device.join("hwmon").join(&monitor), &format!("{to}/hwmon/{monitor}"), 1);
        }
    }
}

fn copy_nvidia(pile: &mut Pile, places: &SourcePaths, evidence: &DoctorEvidence) {
    let asleep: Vec<PciAddress> =
        evidence.gpus.value().into_iter().flatten().filter(|gpu| gpu.asleep).map(|gpu| gpu.pci).collect();
    let root = places.proc.join("driver/nvidia");
    if !root.is_dir() {
        return;
    }
    pile.copy_all("proc/driver/nvidia", &root, &["version", "params"]);
    for gpu in names_in(&root.join("gpus")).unwrap_or_default() {
        let is_asleep = crate::address::parse_pci_address(&gpu).is_some_and(|address| asleep.contains(&address));
        let files: &[&str] = if is_asleep { &["power"] } else { &["information", "numa_status", "power"] };
        pile.copy_all(&format!("proc/driver/nvidia/gpus/{gpu}"), &root.join("gpus").join(&gpu), files);
    }
}

/// Copies a folder, following no links.
fn walk(pile: &mut Pile, from: &Path, to: &str, depth: usize) {
    let names = match names_in(from) {
        Ok(names) if depth > 0 => names,
        Ok(_) => return,
        Err(error) => return pile.miss(to, &error.to_string()),
    };
    for name in names {
        walk_entry(pile, &from.join(&name), &format!("{to}/{name}"), depth - 1);
    }
}

fn walk_entry(pile: &mut Pile, from: &Path, to: &str, depth: usize) {
    match std::fs::symlink_metadata(from) {
        Ok(facts) if facts.is_dir() => walk(pile, from, to, depth),
        Ok(facts) if facts.is_symlink() => {}
        Ok(_) => pile.copy(to, from),
        Err(error) => pile.miss(to, &error.to_string()),
    }
}

// What the vendors' tools print, for a bundle.

/// What one tool is asked: the arguments, the name of the file and how it ends.
type Question = (&'static [&'static str], &'static str, &'static str);

/// Every run of every tool.
const RUNS: [(SourceKind, &[Question]); 3] = [
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

/// Runs the tools that are here. A failure is a file of its own, `<name>.error.txt`.
pub(super) fn run_tools(pile: &mut Pile, evidence: &DoctorEvidence, wish: &BundleRequest) {
    for (kind, questions) in RUNS {
        match runnable(evidence, wish, kind) {
            Ok(path) => {
                let mut tool = VendorTool::new(path, wish.tool_deadline);
                for (arguments, name, ending) in questions {
                    ask(pile, &mut tool, arguments, name, ending);
                }
            }
            Err(why) => questions.iter().for_each(|(_, name, ending)| pile.miss(&format!("{name}.{ending}"), why)),
        }
    }
}

/// Where a tool is, or why it is not run.
fn runnable<'a>(
    evidence: &'a DoctorEvidence,
    wish: &BundleRequest,
    kind: SourceKind,
) -> Result<&'a Path, &'static str> {
    let path = evidence.tools.get(&kind).and_then(Option::as_deref).ok_or("the tool is not on the PATH")?;
    let asleep = vendor_of(kind).is_some_and(|vendor| evidence.gpus_of(vendor).any(|gpu| gpu.asleep));
    if asleep && !wish.wake {
        return Err("not run: it would wake a GPU that is asleep");
    }
    Ok(path)
}

fn ask(pile: &mut Pile, tool: &mut VendorTool, arguments: &[&str], name: &str, ending: &str) {
    let file = format!("{name}.{ending}");
    if pile.is_late() {
        return pile.miss(&file, "the time for the bundle was over");
    }
    let command = tool.path().file_name().unwrap_or_default().to_string_lossy();
    let source = format!("{command} {}", arguments.join(" "));
    let trouble = match tool.run(arguments) {
        Ok(ToolOutput { stdout, stderr, code }) => {
            let failed = code != Some(0);
            let trouble = failed.then(|| {
                let ended = code.map_or("ended by a signal".to_owned(), |code| format!("exit code {code}"));
                format!("{ended}\n{stderr}")
            });
            if !stdout.trim().is_empty() {
                pile.add(&file, source.trim_end(), stdout.into_bytes());
            }
            trouble
        }
        Err(error) => Some(format!("{}: {error}\n", error.code())),
    };
    if let Some(trouble) = trouble {
        pile.miss(&file, trouble.lines().next().unwrap_or_default());
        pile.add(&format!("{name}.error.txt"), source.trim_end(), trouble.into_bytes());
    }
}

// The files of a bundle while they are collected, within bounds of number, size and time.

/// After so many files that do not answer no other is read: each keeps a thread that cannot be ended.
const STUCK: usize = 4;

/// A file and where it is from.
#[derive(Debug)]
pub(super) struct Entry {
    pub source: String,
    pub bytes: Vec<u8>,
}

/// What was collected, and what was not with the reason.
pub(super) struct Pile {
    files: BTreeMap<String, Entry>,
    missing: Vec<(String, String)>,
    bytes: usize,
    until: Instant,
    patience: Duration,
    stuck: usize,
}

impl Pile {
    /// An empty pile that takes files until a time, and waits so long for each.
    pub(super) fn new(until: Instant, patience: Duration) -> Self {
        let (files, missing) = (BTreeMap::new(), Vec::new());
        Self { files, missing, bytes: 0, until, patience, stuck: 0 }
    }

    /// Copies a file of the machine.
    pub(super) fn copy(&mut self, name: &str, path: &Path) {
        match self.read(path) {
            Ok(bytes) => self.add(name, &path.display().to_string(), bytes),
            Err(why) => self.miss(name, &why),
        }
    }

    /// Copies files of a folder.
    pub(super) fn copy_all(&mut self, to: &str, from: &Path, files: &[&str]) {
        for file in files {
            self.copy(&format!("{to}/{file}"), &from.join(file));
        }
    }

    /// Adds a file.
    pub(super) fn add(&mut self, name: &str, source: &str, bytes: Vec<u8>) {
        if self.files.len() >= limits::BUNDLE_FILES || self.bytes + bytes.len() > limits::BUNDLE_BYTES {
            return self.miss(name, "the bundle is full");
        }
        self.bytes += bytes.len();
        self.files.insert(name.to_owned(), Entry { source: source.to_owned(), bytes });
    }

    /// Says why a file is not in the bundle.
    pub(super) fn miss(&mut self, name: &str, why: &str) {
        if self.missing.len() < limits::BUNDLE_FILES {
            self.missing.push((name.to_owned(), why.to_owned()));
        }
    }

    /// Whether the time is over.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    /// The files, and what is missing.
    pub(super) fn into_parts(self) -> (BTreeMap<String, Entry>, Vec<(String, String)>) {
        (self.files, self.missing)
    }

    fn read(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        if self.is_late() {
            return Err("the time for the bundle was over".to_owned());
        }
        if self.stuck >= STUCK {
            return Err("not read: too many other files did not answer".to_owned());
        }
        // A file may never answer; then its thread is lost with it.
        let file = path.to_owned();
        let answer = run_on_thread("bundle-reader", move || kernel_file::read_bytes(&file));
        let patience = self.patience.min(self.until.saturating_duration_since(Instant::now()));
        match answer.recv_timeout(patience) {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(RecvTimeoutError::Disconnected) => Err("no thread to read it".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck += 1;
                Err(format!("unresponsive: it did not answer for {} ms", patience.as_millis()))
            }
        }
    }
}
