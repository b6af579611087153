//! Processes on AMD devices.
//!
//! The compute driver lists its processes with their memory, readable for every user. Programs that draw, or compute
//! without that driver, are found by their open files. Reading the files of other users' processes needs a privilege;
//! without it the list is incomplete.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::{fs, io};

use gpupool_core::{Bytes, PciAddress, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::{DetectedDevice, DeviceProcess, ProcessActivity};
use crate::reported::{Reported, truncate_text};
use crate::source::SourceError;
use crate::source_reading::SourceReading;
use crate::{amounts, kernel_file, limits};

/// Maximum number of readings between two listings of a process's open files. The files are listed when the process is
/// new, and then after 1, 2, 4 … readings: programs open a device early or never, and most processes are old.
const MAX_READINGS_APART: u32 = 64;

/// Keys of a device in the kernel's process lists.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceKeys {
    pub gpu_id: Option<u32>,
    pub pci: Option<PciAddress>,
    pub minor: Option<u32>,
}

/// Scanner for processes, with a cache of those that hold a graphics device.
#[derive(Debug, Default)]
pub(crate) struct ProcessScanner {
    /// Process list of the compute driver: `class/kfd/kfd/proc`.
    compute: Option<PathBuf>,
    /// Mount point of procfs.
    proc: Option<PathBuf>,
    /// Open files by process.
    known: HashMap<u32, OpenFileScan>,
    readings: u64,
}

/// Open files of a process at their last listing.
#[derive(Debug)]
struct OpenFileScan {
    /// Open graphics devices.
    open: Vec<DrmFile>,
    /// Number of the reading at which the files are listed again, and the interval since the last listing.
    next_listing: u64,
    interval: u32,
}

/// Open file that is a graphics device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DrmFile {
    fd: u32,
    /// Minor number of a render node; `None` for another node.
    minor: Option<u32>,
}

/// Facts about a process on a device.
#[derive(Debug, Clone, Default)]
struct GpuUsage {
    name: Option<String>,
    activity: ProcessActivity,
    /// Memory in the compute driver's list.
    computing: Option<Reported<Bytes>>,
    /// Memory of the open files, compute memory included.
    open: Option<Reported<Bytes>>,
}

/// Processes of each device, by pid.
type UsagesByDevice = Vec<BTreeMap<u32, GpuUsage>>;

impl ProcessScanner {
    /// Creates a scanner of the compute driver's list (`class/kfd/kfd/proc`) and of `/proc`, if these folders exist.
    pub(super) fn new(compute: Option<PathBuf>, proc: Option<PathBuf>) -> Self {
        Self { compute, proc, ..Self::default() }
    }

    /// Scans the processes of each device, in the order of the devices, and returns a warning about unreadable
    /// processes.
    pub(super) fn read(&mut self, devices: &[DeviceKeys]) -> (Vec<Reported<Vec<DeviceProcess>>>, Option<String>) {
        if devices.is_empty() {
            return (Vec::new(), None);
        }
        let mut usages: UsagesByDevice = vec![BTreeMap::new(); devices.len()];
        let computing = self.compute.as_deref().is_some_and(|folder| scan_compute_list(folder, devices, &mut usages));
        let unread = self.proc.clone().and_then(|proc| self.scan_open_files(&proc, devices, &mut usages));
        let reported = |(key, usages): (&DeviceKeys, BTreeMap<u32, GpuUsage>)| match unread {
            Some(unread) if unread > 0 && !(computing && key.gpu_id.is_some()) => {
                Reported::Failed(format!("the open files of {unread} processes cannot be read").into())
            }
            None if !(computing && key.gpu_id.is_some()) => Reported::ABSENT,
            _ => Reported::Value(usages.into_iter().map(|(pid, usage)| usage.into_process(pid)).collect()),
        };
        let reported = devices.iter().zip(usages).map(reported).collect();
        let warning = unread.filter(|&unread| unread > 0).map(|unread| {
            format!("the open files of {unread} processes cannot be read: graphics programs on AMD GPUs may be missing")
        });
        (reported, warning)
    }

    /// Adds the processes that hold a device open. Returns the number of unreadable processes, or `None` if there is no
    /// list.
    fn scan_open_files(&mut self, proc: &Path, devices: &[DeviceKeys], usages: &mut UsagesByDevice) -> Option<usize> {
        let pids = kernel_file::numbered_entries(proc, "").ok()?;
        self.readings += 1;
        let alive: BTreeSet<u32> = pids.iter().copied().collect();
        self.known.retain(|pid, _| alive.contains(pid));
        let mut unread = 0;
        let mut clients = BTreeSet::new();
        for pid in alive {
            let folder = proc.join(pid.to_string());
            let known = self.known.get(&pid);
            if known.is_none_or(|listed| listed.next_listing <= self.readings) {
                let interval = known.map_or(1, |listed| (listed.interval * 2).min(MAX_READINGS_APART));
                match open_drm_files(&folder) {
                    Ok(open) => {
                        let next_listing = self.readings + u64::from(interval);
                        self.known.insert(pid, OpenFileScan { open, next_listing, interval })
                    }
                    Err(error) => {
                        unread += usize::from(!has_ended(&error));
                        self.known.remove(&pid)
                    }
                };
            }
            for open in self.known.get(&pid).into_iter().flat_map(|listed| &listed.open) {
                let text = kernel_file::read_text(&folder.join(format!("fdinfo/{}", open.fd)));
                if matches!(text, Reported::Failed(_)) {
                    unread += 1;
                }
                let Some(client) = text.value().and_then(|text| DrmClient::read(text)) else { continue };
                let Some(index) = device_of_client(devices, *open, &client) else { continue };
                let is_first = client.id.is_none_or(|id| clients.insert((index, id)));
                if is_first && usages[index].len() < limits::PROCESSES {
                    usages[index].entry(pid).or_default().add(client);
                }
            }
        }
        Some(unread)
    }
}

/// Adds the processes in the compute driver's list; returns whether the list exists.
///
/// The driver has a file for every device a process may use, so a process counts only if it has memory or a queue
/// there.
fn scan_compute_list(folder: &Path, devices: &[DeviceKeys], usages: &mut UsagesByDevice) -> bool {
    let Ok(pids) = kernel_file::numbered_entries(folder, "") else { return false };
    for pid in pids {
        let folder = folder.join(pid.to_string());
        let queues = std::cell::LazyCell::new(|| queues(&folder));
        for (key, usages) in devices.iter().zip(usages.iter_mut()) {
            let Some(gpu) = key.gpu_id else { continue };
            let memory = kernel_file::read_number::<u64>(&folder.join(format!("vram_{gpu}"))).map(Bytes);
            let holds = memory.value().is_some_and(|memory| memory.0 > 0);
            if (holds || queues.contains(&gpu)) && usages.len() < limits::PROCESSES {
                usages.insert(
                    pid,
                    GpuUsage { activity: ProcessActivity::Compute, computing: Some(memory), ..GpuUsage::default() },
                );
            }
        }
    }
    true
}

/// Lists the devices on which a process has queues.
fn queues(folder: &Path) -> BTreeSet<u32> {
    let queues = fs::read_dir(folder.join("queues")).into_iter().flatten().flatten();
    queues.filter_map(|queue| kernel_file::read_number(&queue.path().join("gpuid")).value().copied()).collect()
}

/// Lists the graphics devices that a process has open.
fn open_drm_files(folder: &Path) -> io::Result<Vec<DrmFile>> {
    let mut open = Vec::new();
    for entry in fs::read_dir(folder.join("fd"))? {
        let Ok(entry) = entry else { continue };
        let target = fs::read_link(entry.path()).ok();
        let device = target.as_deref().and_then(Path::to_str).and_then(|target| target.strip_prefix("/dev/dri/"));
        let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(device), Some(fd)) = (device, fd) {
            open.push(DrmFile { fd, minor: device.strip_prefix("renderD").and_then(|minor| minor.parse().ok()) });
        }
    }
    Ok(open)
}

/// Whether the error means that the process has exited.
fn has_ended(error: &io::Error) -> bool {
    const NO_SUCH_PROCESS: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(NO_SUCH_PROCESS)
}

/// Returns the index of a client's device: by render node, or by address if only one device has it.
fn device_of_client(devices: &[DeviceKeys], open: DrmFile, client: &DrmClient) -> Option<usize> {
    if client.driver != "amdgpu" && client.driver != "radeon" {
        return None;
    }
    let by_minor = devices.iter().position(|key| open.minor.is_some() && key.minor == open.minor);
    let by_pci = || {
        let mut same = (0..devices.len()).filter(|&index| client.pci.is_some() && devices[index].pci == client.pci);
        same.next().filter(|_| same.next().is_none())
    };
    by_minor.or_else(by_pci)
}

impl GpuUsage {
    /// Adds the usage of another open file of the process; one unknown amount makes the sum unknown.
    fn add(&mut self, client: DrmClient) {
        self.name = self.name.take().or(client.name);
        self.activity = combine_activities(self.activity, client.activity);
        self.open = Some(match (self.open.take(), client.memory) {
            (Some(Reported::Value(one)), Reported::Value(other)) => {
                Reported::Value(Bytes(one.0.saturating_add(other.0)))
            }
            (Some(Reported::Value(_)) | None, other) => other,
            (Some(unknown), _) => unknown,
        });
    }

    fn into_process(self, pid: u32) -> DeviceProcess {
        let memory = match (self.computing, self.open) {
            (Some(Reported::Value(one)), Some(Reported::Value(other))) => Reported::Value(one.max(other)),
            (one, other) => one.unwrap_or_default().or(other.unwrap_or_default()),
        };
        DeviceProcess {
            pid,
            name: self.name.map(Into::into),
            activity: self.activity,
            memory,
            ..DeviceProcess::default()
        }
    }
}

fn combine_activities(one: ProcessActivity, other: ProcessActivity) -> ProcessActivity {
    match (one, other) {
        (ProcessActivity::Unknown, doing) | (doing, ProcessActivity::Unknown) => doing,
        (one, other) if one == other => one,
        _ => ProcessActivity::Both,
    }
}

// Kernel text about one open file of a graphics device: `/proc/<pid>/fdinfo/<fd>`.

/// Whether a text describes an open graphics device.
pub(crate) fn looks_like_fdinfo(text: &str) -> bool {
    let has = |key: &str| text.lines().take(200).any(|line| line.starts_with(key));
    has("drm-driver:") && (has("drm-client-id:") || has("drm-pdev:"))
}

/// Parses one captured text, or several in a row.
pub(crate) fn parse_fdinfo(text: &str) -> Result<SourceReading, SourceError> {
    let mut reading = SourceReading::default();
    let mut seen = BTreeSet::new();
    let clients = split_records(text).into_iter().filter_map(|record| DrmClient::read(&record));
    let mut any = false;
    for client in clients {
        any = true;
        if client.id.is_some_and(|id| !seen.insert((client.pci, id))) {
            continue;
        }
        add_client(&mut reading, &client);
    }
    if any { Ok(reading) } else { Err(SourceError::malformed("fdinfo", "no graphics driver is named (drm-driver)")) }
}

fn add_client(reading: &mut SourceReading, client: &DrmClient) {
    let vendor = client.vendor();
    let address = client.pci.map_or_else(|| "a device".to_owned(), |pci| pci.to_string());
    if vendor == Vendor::Intel {
        return reading.warn(format!("Intel GPUs are not supported yet: {address} ({})", client.driver));
    }
    if !reading.devices.iter().any(|device| (device.vendor, device.pci) == (vendor, client.pci)) {
        let mut device = DetectedDevice::new(vendor);
        device.pci = client.pci;
        device.driver = Some(client.driver.as_str().into());
        device.processes = Reported::Unsupported("the text does not name the process of the open file".into());
        reading.push(device);
    }
    let client_label = client.id.map_or_else(|| "a client".to_owned(), |id| format!("client {id}"));
    match &client.memory {
        Reported::Value(memory) => reading.warn(format!("{address}: {client_label} uses {memory} of device memory")),
        _ => reading.warn(format!("{address}: {client_label} uses the device")),
    }
}

/// Splits the texts of several files: each begins with its index in the file, or names its driver once.
fn split_records(text: &str) -> Vec<String> {
    let mut records = vec![String::new()];
    let mut named = false;
    for line in text.lines() {
        let starts = line.starts_with("pos:") || line.starts_with("drm-driver:") && named;
        if starts {
            records.push(String::new());
            named = false;
        }
        named |= line.starts_with("drm-driver:");
        if let Some(last) = records.last_mut() {
            last.push_str(line);
            last.push('\n');
        }
    }
    records
}

/// Client of a graphics device: an opened file, shared by any number of processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DrmClient {
    pub driver: String,
    pub pci: Option<PciAddress>,
    pub id: Option<u64>,
    pub name: Option<String>,
    pub memory: Reported<Bytes>,
    pub activity: ProcessActivity,
}

impl DrmClient {
    /// Parses a client; `None` for a file of another kind.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut client = Self::default();
        // Resident memory is the memory in use; the others are older names and wider measures.
        let mut memory = [Reported::ABSENT, Reported::ABSENT, Reported::ABSENT];
        let (mut computes, mut draws) = (false, false);
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key {
                "drm-driver" => client.driver = truncate_text(value).into_owned(),
                "drm-pdev" => client.pci = parse_pci_address(value),
                "drm-client-id" => client.id = value.parse().ok(),
                "drm-client-name" if !value.is_empty() => client.name = Some(truncate_text(value).into_owned()),
                "drm-resident-vram" => memory[0] = parse_memory(value),
                "drm-memory-vram" => memory[1] = parse_memory(value),
                "drm-total-vram" => memory[2] = parse_memory(value),
                "drm-engine-compute" => computes |= is_positive_time(value),
                "drm-engine-gfx" => draws |= is_positive_time(value),
                _ => {}
            }
        }
        client.memory = memory.into_iter().fold(Reported::ABSENT, Reported::or);
        client.activity = ProcessActivity::of(computes, draws);
        (!client.driver.is_empty()).then_some(client)
    }

    fn vendor(&self) -> Vendor {
        match self.driver.as_str() {
            "amdgpu" | "radeon" => Vendor::Amd,
            "nvidia" | "nvidia-drm" | "nouveau" | "nova" => Vendor::Nvidia,
            "i915" | "xe" => Vendor::Intel,
            _ => Vendor::Other,
        }
    }
}

/// Parses an amount of memory; the default unit is bytes.
fn parse_memory(text: &str) -> Reported<Bytes> {
    Reported::from_cell(text, |text| amounts::parse_bytes(text, "B"))
}

fn is_positive_time(text: &str) -> bool {
    text.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).is_some_and(|time| time > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::amd_sysfs::tests::SysfsTree;

    const CARD: DeviceKeys = DeviceKeys { gpu_id: Some(51), pci: None, minor: Some(128) };

    fn processes(tree: &SysfsTree) -> ProcessScanner {
        ProcessScanner::new(Some(tree.path("class/kfd/kfd/proc")), Some(tree.paths().proc))
    }

    fn client(tree: &SysfsTree, pid: u32, fd: u32, node: &str, id: u32, memory: &str) {
        tree.link(&format!("../proc/{pid}/fd/{fd}"), &format!("/dev/dri/{node}"));
        let text = format!(
            "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\ndrm-resident-vram:\t{memory}\n\
             drm-engine-gfx:\t7 ns\n"
        );
        tree.file(&format!("../proc/{pid}/fdinfo/{fd}"), text);
    }

    fn seen(reported: &Reported<Vec<DeviceProcess>>) -> Vec<(u32, ProcessActivity, Option<u64>)> {
        let list = reported.value().unwrap();
        list.iter()
            .map(|process| (process.pid, process.activity, process.memory.value().map(|bytes| bytes.0)))
            .collect()
    }

    #[test]
    fn a_process_computes_on_a_device_where_it_has_memory_or_a_queue() {
        let tree = SysfsTree::new();
        tree.folder("../proc");
        for (file, content) in [
            ("10/vram_51", "4096"),
            ("11/vram_51", "0"),
            ("12/vram_51", "0"),
            ("12/queues/0/gpuid", "51"),
            ("12/vram_77", "8"),
        ] {
            tree.file(&format!("class/kfd/kfd/proc/{file}"), content);
        }
        let (reported, warning) = processes(&tree).read(&[CARD]);
        assert_eq!(
            seen(&reported[0]),
            [(10, ProcessActivity::Compute, Some(4096)), (12, ProcessActivity::Compute, Some(0))]
        );
        assert_eq!(warning, None);
    }

    #[test]
    fn a_client_counts_once_however_often_it_is_open() {
        let tree = SysfsTree::new();
        client(&tree, 20, 4, "renderD128", 1, "3 MiB");
        client(&tree, 20, 5, "renderD128", 1, "3 MiB");
        client(&tree, 20, 6, "renderD128", 2, "512 KiB");
        client(&tree, 20, 7, "renderD129", 3, "9 MiB");
        client(&tree, 21, 4, "renderD128", 1, "3 MiB");
        let (reported, _) = processes(&tree).read(&[CARD]);
        assert_eq!(seen(&reported[0]), [(20, ProcessActivity::Graphics, Some(3 << 20 | 512 << 10))]);
    }

    #[test]
    fn memory_in_both_lists_is_counted_once() {
        let tree = SysfsTree::new();
        tree.file("class/kfd/kfd/proc/30/vram_51", "1048576");
        client(&tree, 30, 9, "renderD128", 5, "3 MiB");
        let (reported, _) = processes(&tree).read(&[CARD]);
        assert_eq!(seen(&reported[0]), [(30, ProcessActivity::Both, Some(3 << 20))]);
    }

    #[test]
    fn a_card_node_is_matched_by_a_unique_address() {
        let tree = SysfsTree::new();
        client(&tree, 40, 3, "card0", 6, "1 MiB");
        let at = |minor| DeviceKeys { pci: crate::parse_pci_address("03:00.0"), minor: Some(minor), gpu_id: None };
        assert_eq!(seen(&processes(&tree).read(&[at(128)]).0[0]).len(), 1);
        let (two, _) = processes(&tree).read(&[at(128), at(129)]);
        assert_eq!((seen(&two[0]).len(), seen(&two[1]).len()), (0, 0));
    }

    #[test]
    fn a_device_opened_by_an_old_process_is_found_eventually() {
        let tree = SysfsTree::new();
        tree.folder("../proc/53/fd");
        let mut processes = processes(&tree);
        assert!(seen(&processes.read(&[CARD]).0[0]).is_empty());
        for _ in 0..200 {
            processes.read(&[CARD]);
        }
        client(&tree, 53, 8, "renderD128", 1, "1 MiB");
        let readings = (0..MAX_READINGS_APART).position(|_| !seen(&processes.read(&[CARD]).0[0]).is_empty());
        assert!(readings.is_some());
        tree.remove("../proc/53");
        assert!(seen(&processes.read(&[CARD]).0[0]).is_empty());
    }

    #[test]
    fn without_privilege_the_process_list_is_a_failure() {
        let tree = SysfsTree::new();
        // Listing a file as a folder fails even for the superuser.
        tree.file("../proc/60/fd", "");
        tree.folder("../proc/61");
        let unknown = DeviceKeys { gpu_id: None, ..CARD };
        let (reported, warning) = processes(&tree).read(&[unknown]);
        assert_eq!(reported, [Reported::Failed("the open files of 1 processes cannot be read".into())]);
        assert!(warning.is_some());
        tree.folder("class/kfd/kfd/proc");
        assert_eq!(processes(&tree).read(&[unknown, CARD]).0[1], Reported::Value(Vec::new()));
    }

    #[test]
    fn without_any_list_the_processes_are_absent() {
        let tree = SysfsTree::new();
        assert_eq!(processes(&tree).read(&[CARD]).0, [Reported::ABSENT]);
    }

    const COMPUTE: &str = "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t77\ndrm-pdev:\t0000:c5:00.0\n\
        drm-total-vram:\t5000 KiB\ndrm-resident-vram:\t3 MiB\ndrm-memory-vram:\t4000 KiB\n\
        drm-engine-gfx:\t0 ns\ndrm-engine-compute:\t25 ns\n";

    #[test]
    fn resident_memory_counts_in_its_own_unit() {
        let client = DrmClient::read(COMPUTE).unwrap();
        assert_eq!(client.memory, Reported::Value(Bytes(3 << 20)));
        assert_eq!((client.id, client.activity), (Some(77), ProcessActivity::Compute));
        let older = DrmClient::read("drm-driver: amdgpu\ndrm-memory-vram:\t4096\ndrm-engine-gfx: 9 ns\n").unwrap();
        assert_eq!((older.memory, older.activity), (Reported::Value(Bytes(4096)), ProcessActivity::Graphics));
        assert!(matches!(parse_memory("5 parsecs"), Reported::Failed(_)));
        assert!(matches!(parse_memory("99999999999999999 GiB"), Reported::Failed(_)));
        assert_eq!(DrmClient::read("pos:\t0\nmnt_id:\t9\n"), None);
    }

    #[test]
    fn a_captured_fdinfo_is_a_device_without_processes() {
        assert!(looks_like_fdinfo(COMPUTE));
        assert!(!looks_like_fdinfo("drm-driver is a word\n"));
        let reading = parse_fdinfo(&format!("{COMPUTE}{COMPUTE}")).unwrap();
        assert_eq!(reading.warnings, ["0000:c5:00.0: client 77 uses 3 MiB of device memory"]);
        let [device] = reading.devices.as_slice() else { panic!("{reading:?}") };
        assert_eq!(device.pci.unwrap().to_string(), "0000:c5:00.0");
        assert!(matches!(device.processes, Reported::Unsupported(_)));
        assert!(device.memory.used.is_absent());
        assert!(parse_fdinfo("pos:\t0\n").is_err());
    }

    proptest! {
        #[test]
        fn parsing_damaged_fdinfo_never_panics(cut in 0..COMPUTE.len(), at in 0..COMPUTE.len(), byte in any::<u8>()) {
            let mut bytes = COMPUTE.as_bytes().to_vec();
            bytes[at] = byte;
            bytes.truncate(cut);
            let text = String::from_utf8_lossy(&bytes);
            let _ = (looks_like_fdinfo(&text), parse_fdinfo(&text));
        }
    }
}
