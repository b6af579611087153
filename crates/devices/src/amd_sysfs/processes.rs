//! Which processes use which AMD device.
//!
//! The compute driver lists its processes with the memory of each, for everybody to read. Programs that draw, or that
//! compute without it, are found by their open files, which takes the right to look at other people's processes: a list
//! made without it is not complete.

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

/// The open files of a process are listed when it is new, and then after 1, 2, 4 … readings up to this many: programs
/// open a device early or not at all, and most processes of a machine are old.
const MOST_READINGS_APART: u32 = 64;

/// How a device is named in the places where its processes are.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceKey {
    pub gpu_id: Option<u32>,
    pub pci: Option<PciAddress>,
    pub minor: Option<u32>,
}

/// Looks for processes, remembering which ones hold a graphics device.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    /// The compute driver's list: `class/kfd/kfd/proc`.
    compute: Option<PathBuf>,
    /// `/proc`.
    proc: Option<PathBuf>,
    /// What is known of the open files of each process.
    known: HashMap<u32, Listed>,
    readings: u64,
}

/// The open files of a process, as they were listed.
#[derive(Debug)]
struct Listed {
    /// Graphics devices among them.
    open: Vec<OpenDevice>,
    /// At which reading they are listed again, and how long after the last time that is.
    again: u64,
    apart: u32,
}

/// An open file of a process that is a graphics device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OpenDevice {
    fd: u32,
    /// Set where it is a render node.
    minor: Option<u32>,
}

/// What is known of a process on a device.
#[derive(Debug, Clone, Default)]
struct Usage {
    name: Option<String>,
    activity: ProcessActivity,
    /// By the compute driver.
    computing: Option<Reported<Bytes>>,
    /// By its open files, which count the memory of compute as well.
    open: Option<Reported<Bytes>>,
}

/// The processes of each device.
type Usages = Vec<BTreeMap<u32, Usage>>;

impl Processes {
    /// Looks in the compute driver's list (`class/kfd/kfd/proc`) and in `/proc`, where there are such folders.
    pub(super) fn new(compute: Option<PathBuf>, proc: Option<PathBuf>) -> Self {
        Self { compute, proc, ..Self::default() }
    }

    /// The processes of each device, in the order of the devices, and what could not be seen.
    pub(super) fn read(&mut self, devices: &[DeviceKey]) -> (Vec<Reported<Vec<DeviceProcess>>>, Option<String>) {
        if devices.is_empty() {
            return (Vec::new(), None);
        }
        let mut usages: Usages = vec![BTreeMap::new(); devices.len()];
        let computing = self.compute.as_deref().is_some_and(|folder| compute_processes(folder, devices, &mut usages));
        let unseen = self.proc.clone().and_then(|proc| self.open_devices(&proc, devices, &mut usages));
        let told = |(key, usages): (&DeviceKey, BTreeMap<u32, Usage>)| match unseen {
            Some(unseen) if unseen > 0 && !(computing && key.gpu_id.is_some()) => {
                Reported::Failed(format!("the open files of {unseen} processes may not be read").into())
            }
            None if !(computing && key.gpu_id.is_some()) => Reported::ABSENT,
            _ => Reported::Value(usages.into_iter().map(|(pid, usage)| usage.process(pid)).collect()),
        };
        let told = devices.iter().zip(usages).map(told).collect();
        let warning = unseen.filter(|&unseen| unseen > 0).map(|unseen| {
            format!(
                "the open files of {unseen} processes may not be read: programs that draw on an AMD GPU may be missing"
            )
        });
        (told, warning)
    }

    /// Adds the processes that hold a device open; says of how many the files could not be seen, or `None` where
    /// nothing could.
    fn open_devices(&mut self, proc: &Path, devices: &[DeviceKey], usages: &mut Usages) -> Option<usize> {
        let pids = kernel_file::numbered_entries(proc, "").ok()?;
        self.readings += 1;
        let alive: BTreeSet<u32> = pids.iter().copied().collect();
        self.known.retain(|pid, _| alive.contains(pid));
        let mut unseen = 0;
        let mut clients = BTreeSet::new();
        for pid in alive {
            let folder = proc.join(pid.to_string());
            let known = self.known.get(&pid);
            if known.is_none_or(|listed| listed.again <= self.readings) {
                let apart = known.map_or(1, |listed| (listed.apart * 2).min(MOST_READINGS_APART));
                match open_devices_of(&folder) {
                    Ok(open) => {
                        let again = self.readings + u64::from(apart);
                        self.known.insert(pid, Listed { open, again, apart })
                    }
                    Err(error) => {
                        unseen += usize::from(!has_ended(&error));
                        self.known.remove(&pid)
                    }
                };
            }
            for open in self.known.get(&pid).into_iter().flat_map(|listed| &listed.open) {
                let text = kernel_file::read_text(&folder.join(format!("fdinfo/{}", open.fd)));
                if matches!(text, Reported::Failed(_)) {
                    unseen += 1;
                }
                let Some(client) = text.value().and_then(|text| Client::read(text)) else { continue };
                let Some(place) = place_of(devices, *open, &client) else { continue };
                let is_first = client.id.is_none_or(|id| clients.insert((place, id)));
                if is_first && usages[place].len() < limits::PROCESSES {
                    usages[place].entry(pid).or_default().add(client);
                }
            }
        }
        Some(unseen)
    }
}

/// Adds the processes the compute driver lists; says whether it lists any at all.
///
/// It keeps a file for every device a process may use, so a process is on a device only where it has memory or a queue.
fn compute_processes(folder: &Path, devices: &[DeviceKey], usages: &mut Usages) -> bool {
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
                    Usage { activity: ProcessActivity::Compute, computing: Some(memory), ..Usage::default() },
                );
            }
        }
    }
    true
}

/// The devices a process has queues on.
fn queues(folder: &Path) -> BTreeSet<u32> {
    let queues = fs::read_dir(folder.join("queues")).into_iter().flatten().flatten();
    queues.filter_map(|queue| kernel_file::read_number(&queue.path().join("gpuid")).value().copied()).collect()
}

/// The graphics devices a process has open.
fn open_devices_of(folder: &Path) -> io::Result<Vec<OpenDevice>> {
    let mut open = Vec::new();
    for entry in fs::read_dir(folder.join("fd"))? {
        let Ok(entry) = entry else { continue };
        let target = fs::read_link(entry.path()).ok();
        let device = target.as_deref().and_then(Path::to_str).and_then(|target| target.strip_prefix("/dev/dri/"));
        let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(device), Some(fd)) = (device, fd) {
            open.push(OpenDevice { fd, minor: device.strip_prefix("renderD").and_then(|minor| minor.parse().ok()) });
        }
    }
    Ok(open)
}

/// Whether a process could not be looked at because it is no more.
fn has_ended(error: &io::Error) -> bool {
    const NO_SUCH_PROCESS: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(NO_SUCH_PROCESS)
}

/// The device a client is of: by its render node, or by its address where only one device has it.
fn place_of(devices: &[DeviceKey], open: OpenDevice, client: &Client) -> Option<usize> {
    if client.driver != "amdgpu" && client.driver != "radeon" {
        return None;
    }
    let by_minor = devices.iter().position(|key| open.minor.is_some() && key.minor == open.minor);
    let by_pci = || {
        let mut same = (0..devices.len()).filter(|&place| client.pci.is_some() && devices[place].pci == client.pci);
        same.next().filter(|_| same.next().is_none())
    };
    by_minor.or_else(by_pci)
}

impl Usage {
    /// Adds what another open file of the process uses; a part that is not told makes the sum unknown.
    fn add(&mut self, client: Client) {
        self.name = self.name.take().or(client.name);
        self.activity = both(self.activity, client.activity);
        self.open = Some(match (self.open.take(), client.memory) {
            (Some(Reported::Value(one)), Reported::Value(other)) => {
                Reported::Value(Bytes(one.0.saturating_add(other.0)))
            }
            (Some(Reported::Value(_)) | None, other) => other,
            (Some(unknown), _) => unknown,
        });
    }

    fn process(self, pid: u32) -> DeviceProcess {
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

fn both(one: ProcessActivity, other: ProcessActivity) -> ProcessActivity {
    match (one, other) {
        (ProcessActivity::Unknown, doing) | (doing, ProcessActivity::Unknown) => doing,
        (one, other) if one == other => one,
        _ => ProcessActivity::Both,
    }
}

// What the kernel says of one open file of a graphics device: `/proc/<pid>/fdinfo/<fd>`.

/// Whether a text is of an open graphics device.
pub(crate) fn looks_like_fdinfo(text: &str) -> bool {
    let has = |key: &str| text.lines().take(200).any(|line| line.starts_with(key));
    has("drm-driver:") && (has("drm-client-id:") || has("drm-pdev:"))
}

/// Reads one captured text, or several one after the other.
pub(crate) fn parse_fdinfo(text: &str) -> Result<SourceReading, SourceError> {
    let mut snapshot = SourceReading::default();
    let mut seen = BTreeSet::new();
    let clients = records(text).into_iter().filter_map(|record| Client::read(&record));
    let mut any = false;
    for client in clients {
        any = true;
        if client.id.is_some_and(|id| !seen.insert((client.pci, id))) {
            continue;
        }
        add(&mut snapshot, &client);
    }
    if any { Ok(snapshot) } else { Err(SourceError::malformed("fdinfo", "no graphics driver is named (drm-driver)")) }
}

fn add(snapshot: &mut SourceReading, client: &Client) {
    let vendor = client.vendor();
    let place = client.pci.map_or_else(|| "a device".to_owned(), |pci| pci.to_string());
    if vendor == Vendor::Intel {
        return snapshot.warn(format!("Intel GPUs are not supported yet: {place} ({})", client.driver));
    }
    if !snapshot.devices.iter().any(|device| (device.vendor, device.pci) == (vendor, client.pci)) {
        let mut device = DetectedDevice::new(vendor);
        device.pci = client.pci;
        device.driver = Some(client.driver.as_str().into());
        device.processes = Reported::Unsupported("the text does not say whose open file it is about".into());
        snapshot.push(device);
    }
    let who = client.id.map_or_else(|| "a client".to_owned(), |id| format!("client {id}"));
    match &client.memory {
        Reported::Value(memory) => snapshot.warn(format!("{place}: {who} uses {memory} of device memory")),
        _ => snapshot.warn(format!("{place}: {who} uses it")),
    }
}

/// The texts of single files: each begins with its position in the file, or names its driver once.
fn records(text: &str) -> Vec<String> {
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

/// One user of a graphics device: an opened file, however many processes hold it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Client {
    pub driver: String,
    pub pci: Option<PciAddress>,
    pub id: Option<u64>,
    pub name: Option<String>,
    pub memory: Reported<Bytes>,
    pub activity: ProcessActivity,
}

impl Client {
    /// The client a text is about; `None` where it is about another kind of file.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut client = Self::default();
        // What is resident is what is used; the others are older and wider words for it.
        let mut memory = [Reported::ABSENT, Reported::ABSENT, Reported::ABSENT];
        let (mut computes, mut draws) = (false, false);
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key {
                "drm-driver" => client.driver = truncate_text(value).into_owned(),
                "drm-pdev" => client.pci = parse_pci_address(value),
                "drm-client-id" => client.id = value.parse().ok(),
                "drm-client-name" if !value.is_empty() => client.name = Some(truncate_text(value).into_owned()),
                "drm-resident-vram" => memory[0] = amount(value),
                "drm-memory-vram" => memory[1] = amount(value),
                "drm-total-vram" => memory[2] = amount(value),
                "drm-engine-compute" => computes |= is_some_time(value),
                "drm-engine-gfx" => draws |= is_some_time(value),
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

/// An amount of memory: bytes, unless a unit follows.
fn amount(text: &str) -> Reported<Bytes> {
    Reported::from_cell(text, |text| amounts::parse_bytes(text, "B"))
}

fn is_some_time(text: &str) -> bool {
    text.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).is_some_and(|time| time > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    use crate::amd_sysfs::tests::Tree;

    const CARD: DeviceKey = DeviceKey { gpu_id: Some(51), pci: None, minor: Some(128) };

    fn processes(tree: &Tree) -> Processes {
        Processes::new(Some(tree.path("class/kfd/kfd/proc")), Some(tree.places().proc))
    }

    fn client(tree: &Tree, pid: u32, fd: u32, node: &str, id: u32, memory: &str) {
        tree.link(&format!("../proc/{pid}/fd/{fd}"), &format!("/dev/dri/{node}"));
        let text = format!(
            "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\ndrm-resident-vram:\t{memory}\n\
             drm-engine-gfx:\t7 ns\n"
        );
        tree.file(&format!("../proc/{pid}/fdinfo/{fd}"), text);
    }

    fn seen(told: &Reported<Vec<DeviceProcess>>) -> Vec<(u32, ProcessActivity, Option<u64>)> {
        let list = told.value().unwrap();
        list.iter()
            .map(|process| (process.pid, process.activity, process.memory.value().map(|bytes| bytes.0)))
            .collect()
    }

    #[test]
    fn a_process_computes_on_a_device_where_it_has_memory_or_a_queue() {
        let tree = Tree::new();
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
        let (told, warning) = processes(&tree).read(&[CARD]);
        assert_eq!(
            seen(&told[0]),
            [(10, ProcessActivity::Compute, Some(4096)), (12, ProcessActivity::Compute, Some(0))]
        );
        assert_eq!(warning, None);
    }

    #[test]
    fn a_client_counts_once_however_often_it_is_open() {
        let tree = Tree::new();
        client(&tree, 20, 4, "renderD128", 1, "3 MiB");
        client(&tree, 20, 5, "renderD128", 1, "3 MiB");
        client(&tree, 20, 6, "renderD128", 2, "512 KiB");
        client(&tree, 20, 7, "renderD129", 3, "9 MiB");
        client(&tree, 21, 4, "renderD128", 1, "3 MiB");
        let (told, _) = processes(&tree).read(&[CARD]);
        assert_eq!(seen(&told[0]), [(20, ProcessActivity::Graphics, Some(3 << 20 | 512 << 10))]);
    }

    #[test]
    fn what_both_lists_know_is_not_counted_twice() {
        let tree = Tree::new();
        tree.file("class/kfd/kfd/proc/30/vram_51", "1048576");
        client(&tree, 30, 9, "renderD128", 5, "3 MiB");
        let (told, _) = processes(&tree).read(&[CARD]);
        assert_eq!(seen(&told[0]), [(30, ProcessActivity::Both, Some(3 << 20))]);
    }

    #[test]
    fn a_card_node_is_known_by_its_address_where_only_one_device_has_it() {
        let tree = Tree::new();
        client(&tree, 40, 3, "card0", 6, "1 MiB");
        let at = |minor| DeviceKey { pci: crate::parse_pci_address("03:00.0"), minor: Some(minor), gpu_id: None };
        assert_eq!(seen(&processes(&tree).read(&[at(128)]).0[0]).len(), 1);
        let (two, _) = processes(&tree).read(&[at(128), at(129)]);
        assert_eq!((seen(&two[0]).len(), seen(&two[1]).len()), (0, 0));
    }

    #[test]
    fn a_device_that_an_old_process_opens_is_seen_in_the_end() {
        let tree = Tree::new();
        tree.folder("../proc/53/fd");
        let mut processes = processes(&tree);
        assert!(seen(&processes.read(&[CARD]).0[0]).is_empty());
        for _ in 0..200 {
            processes.read(&[CARD]);
        }
        client(&tree, 53, 8, "renderD128", 1, "1 MiB");
        let readings = (0..MOST_READINGS_APART).position(|_| !seen(&processes.read(&[CARD]).0[0]).is_empty());
        assert!(readings.is_some());
        tree.remove("../proc/53");
        assert!(seen(&processes.read(&[CARD]).0[0]).is_empty());
    }

    #[test]
    fn without_the_right_to_look_the_list_is_not_complete() {
        let tree = Tree::new();
        // Listing what is no folder fails for everybody, the superuser too.
        tree.file("../proc/60/fd", "");
        tree.folder("../proc/61");
        let unknown = DeviceKey { gpu_id: None, ..CARD };
        let (told, warning) = processes(&tree).read(&[unknown]);
        assert_eq!(told, [Reported::Failed("the open files of 1 processes may not be read".into())]);
        assert!(warning.is_some());
        tree.folder("class/kfd/kfd/proc");
        assert_eq!(processes(&tree).read(&[unknown, CARD]).0[1], Reported::Value(Vec::new()));
    }

    #[test]
    fn a_tree_without_either_list_tells_nothing_of_processes() {
        let tree = Tree::new();
        assert_eq!(processes(&tree).read(&[CARD]).0, [Reported::ABSENT]);
    }

    const COMPUTE: &str = "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t77\ndrm-pdev:\t0000:c5:00.0\n\
        drm-total-vram:\t5000 KiB\ndrm-resident-vram:\t3 MiB\ndrm-memory-vram:\t4000 KiB\n\
        drm-engine-gfx:\t0 ns\ndrm-engine-compute:\t25 ns\n";

    #[test]
    fn the_resident_memory_counts_in_its_own_unit() {
        let client = Client::read(COMPUTE).unwrap();
        assert_eq!(client.memory, Reported::Value(Bytes(3 << 20)));
        assert_eq!((client.id, client.activity), (Some(77), ProcessActivity::Compute));
        let older = Client::read("drm-driver: amdgpu\ndrm-memory-vram:\t4096\ndrm-engine-gfx: 9 ns\n").unwrap();
        assert_eq!((older.memory, older.activity), (Reported::Value(Bytes(4096)), ProcessActivity::Graphics));
        assert!(matches!(amount("5 parsecs"), Reported::Failed(_)));
        assert!(matches!(amount("99999999999999999 GiB"), Reported::Failed(_)));
        assert_eq!(Client::read("pos:\t0\nmnt_id:\t9\n"), None);
    }

    #[test]
    fn a_captured_text_is_a_device_with_a_client_and_no_process() {
        assert!(looks_like_fdinfo(COMPUTE));
        assert!(!looks_like_fdinfo("drm-driver is a word\n"));
        let snapshot = parse_fdinfo(&format!("{COMPUTE}{COMPUTE}")).unwrap();
        assert_eq!(snapshot.warnings, ["0000:c5:00.0: client 77 uses 3 MiB of device memory"]);
        let [device] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(device.pci.unwrap().to_string(), "0000:c5:00.0");
        assert!(matches!(device.processes, Reported::Unsupported(_)));
        assert!(device.memory.used.is_absent());
        assert!(parse_fdinfo("pos:\t0\n").is_err());
    }

    proptest! {
        #[test]
        fn no_flipped_or_cut_text_makes_it_panic(cut in 0..COMPUTE.len(), at in 0..COMPUTE.len(), byte in any::<u8>()) {
            let mut bytes = COMPUTE.as_bytes().to_vec();
            bytes[at] = byte;
            bytes.truncate(cut);
            let text = String::from_utf8_lossy(&bytes);
            let _ = (looks_like_fdinfo(&text), parse_fdinfo(&text));
        }
    }
}
