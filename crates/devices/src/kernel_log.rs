//! What the kernel's log says about GPUs: errors of NVIDIA's driver (Xids), and hangs, resets and memory errors of AMD.
//!
//! Any log that holds the kernel's messages will do: `dmesg` with any kind of time, the journal, syslog, `/dev/kmsg`.
//! Each line is read on its own; the whole becomes one device per place on the bus, with the worst that
//! was said of it since the last boot.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{Bytes, DeviceHealth, PciAddress, Vendor};

use crate::address::parse_pci_address;
use crate::detected_device::{DetectedDevice, worse};
use crate::nvml::xid::{self, XidDescription, XidSeverity};
use crate::pci_bus;
use crate::reported::{Reported, truncate_text};
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Lines looked at to tell a log of the kernel that says nothing of GPUs.
const FIRST_LINES: usize = 40;

/// Whether a text is a log with the kernel's messages.
pub(crate) fn looks_like(text: &str) -> bool {
    if text.trim_start().starts_with(['{', '<']) {
        return false;
    }
    let named = |line: &str| line.contains("NVRM: ") || line.contains("SXid (") || amdgpu_line(line);
    let first = || text.lines().filter(|line| !line.trim().is_empty()).take(FIRST_LINES);
    let kernel = first().filter(|line| is_kernel_line(line)).count();
    kernel > first().count() / 2 || text.lines().any(named)
}

/// The devices a log names, with what it says of their health, and what happened in numbers as warnings.
///
/// Errors that programs cause leave a device healthy; a device that was only named has no health.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    let mut log = Log::default();
    for event in text.lines().filter_map(event) {
        log.add(&event);
    }
    Ok(log.snapshot())
}

/// What a log says went wrong since the last boot it tells of.
pub(crate) fn troubles(text: &str) -> Vec<Said> {
    let mut log = Log::default();
    for event in text.lines().filter_map(event) {
        if event.what == What::Booted {
            log = Log::default();
        }
        log.add(&event);
    }
    log.troubles()
}

fn amdgpu_line(line: &str) -> bool {
    line.contains("amdgpu ") && event(line).is_some_and(|event| event.pci.is_some())
}

/// `[   12.345678] …`, `[Sun Feb 23 16:24:18 2025] …`, `kern  :warn  : …`, `Jan 21 02:21:33 host kernel: …`, `4,1234,5678,-;…`.
fn is_kernel_line(line: &str) -> bool {
    let time = line.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(time, _)| time.trim());
    let seconds = time.is_some_and(|time| time.split_once('.').is_some() && time.parse::<f64>().is_ok());
    let date = time.is_some_and(|time| {
        let mut words = time.split_whitespace();
        let weekday = words.next().is_some_and(|day| ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].contains(&day));
        weekday && words.count() == 4
    });
    let facility = line.strip_prefix("kern").is_some_and(|rest| rest.trim_start().starts_with(':'));
    let record = line.split_once(';').is_some_and(|(head, _)| {
        head.split(',').count() >= 4 && head.split(',').take(3).all(|part| part.parse::<u64>().is_ok())
    });
    seconds || date || facility || record || line.contains(" kernel: ")
}

// What one line of the kernel's log says about a GPU, whatever stands before its message.

/// One thing a line says about a GPU, or about all of one maker where it names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Event<'a> {
    /// Whose device it is.
    pub vendor: Vendor,
    /// Which device.
    pub pci: Option<PciAddress>,
    pub what: What<'a>,
    /// The message, without what the log put before it.
    pub text: &'a str,
}

impl<'a> Event<'a> {
    const fn new(vendor: Vendor, pci: Option<PciAddress>, what: What<'a>, text: &'a str) -> Self {
        Self { vendor, pci, what, text }
    }
}

/// What happened to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What<'a> {
    /// The line only names it.
    Named,
    /// The driver tells its UUID.
    Uuid(&'a str),
    /// The driver tells its memory.
    Memory(Bytes),
    /// The driver was loaded, in this version.
    DriverLoaded(&'a str),
    /// A program uses a library of another version than the driver.
    VersionMismatch,
    /// Something went wrong with it.
    Trouble(Trouble),
    /// The machine booted; what came before is of an earlier run.
    Booted,
}

/// What a line says about a GPU, where it says anything.
fn event(line: &str) -> Option<Event<'_>> {
    // The SXid of a switch holds the words of an Xid.
    if let Some((_, message)) = line.split_once("SXid (") {
        return switch_error(message);
    }
    if let Some((_, message)) = line.split_once("NVRM: ") {
        return nvidia(message.trim());
    }
    if let Some(named) = by_driver(line, "nvidia ", Vendor::Nvidia) {
        return Some(named);
    }
    if let Some(found) = by_driver(line, "amdgpu ", Vendor::Amd) {
        return Some(Event { what: amd(found.text), ..found });
    }
    if line.contains("amdgpu") {
        let what = amd(line);
        return (what != What::Named).then_some(Event::new(Vendor::Amd, None, what, line.trim()));
    }
    enumerated(line).or_else(|| booted(line))
}

fn nvidia(text: &str) -> Option<Event<'_>> {
    let event = |pci, what| Some(Event::new(Vendor::Nvidia, pci, what, text));
    if let Some((place, rest)) = text.strip_prefix("Xid (").and_then(|rest| rest.split_once(')')) {
        let number = leading_number(rest.trim_start_matches([':', ' ']))?;
        return event(address_in(place), What::Trouble(Trouble::Xid(number)));
    }
    if text.contains("fallen off the bus") {
        return event(address_in(text), What::Trouble(Trouble::FellOffTheBus));
    }
    if text.contains("RmInitAdapter failed") {
        return event(address_in(text), What::Trouble(Trouble::StartFailed));
    }
    if text.contains("API mismatch") {
        return event(None, What::VersionMismatch);
    }
    if let Some(version) = text.strip_prefix("loading ").and_then(pci_bus::version_in) {
        return event(None, What::DriverLoaded(version));
    }
    let is_uuid = |word: &&str| word.starts_with("GPU-") && word.len() == 40 && !word.contains('?');
    match (address_in(text), text.split_whitespace().find(is_uuid)) {
        (Some(pci), Some(uuid)) => event(Some(pci), What::Uuid(uuid)),
        // Other lines hold numbers that read like addresses; only the driver's ways to name a GPU count.
        (Some(pci), None) if text.contains("GPU at ") || text.contains("NVIDIA GPU ") || text.starts_with("GPU ") => {
            event(Some(pci), What::Named)
        }
        _ => None,
    }
}

fn switch_error(message: &str) -> Option<Event<'_>> {
    let (place, rest) = message.split_once(')')?;
    let text = rest.trim_start_matches([':', ' ']);
    let number = leading_number(text)?;
    let lower = text.to_ascii_lowercase();
    let fatal = lower.contains("fatal") && !lower.contains("non-fatal");
    let what = What::Trouble(Trouble::SwitchError { number, fatal });
    Some(Event::new(Vendor::Nvidia, address_in(place), what, text))
}

fn amd(text: &str) -> What<'_> {
    let vram = text.split_once("VRAM: ").or_else(|| text.split_once("VRAM RAM=")).map(|(_, rest)| rest);
    let memory = || vram.and_then(mebibytes).map(What::Memory);
    amd_trouble(text).map(What::Trouble).or_else(memory).unwrap_or(What::Named)
}

fn amd_trouble(text: &str) -> Option<Trouble> {
    let has = |words: &str| text.contains(words);
    let broken = text.split_once("uncorrectable hardware errors").and_then(|(before, _)| last_number(before));
    let tells = [
        (has("device lost from bus") || has("fallen off the bus"), Trouble::FellOffTheBus),
        (has("Fatal error during GPU init"), Trouble::StartFailed),
        (broken.is_some_and(|errors| errors > 0) || is_poison(text), Trouble::Uncorrectable),
        (has("GPU reset begin"), Trouble::ResetBegun),
        (has("GPU reset") && has("succeeded"), Trouble::ResetSucceeded),
        (has("GPU reset") && (has("failed") || has("ret = -")), Trouble::ResetFailed),
        (has("GPU Recovery Failed"), Trouble::ResetFailed),
        (has("ring ") && has(" timeout") && !has("soft recovered"), Trouble::RingTimeout),
    ];
    tells.into_iter().find(|(told, _)| *told).map(|(_, trouble)| trouble)
}

/// Poison that was consumed or created; not the setting whether there may be any.
fn is_poison(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    lower.contains("poison") && (lower.contains("consum") || lower.contains("creat"))
}

/// A line that a driver wrote about a device: `amdgpu 0000:c1:00.0: …`.
fn by_driver<'a>(line: &'a str, driver: &str, vendor: Vendor) -> Option<Event<'a>> {
    line.match_indices(driver).find_map(|(at, _)| {
        let before = line.get(..at)?.chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '-' || c == '_') {
            return None;
        }
        let (place, text) = line.get(at + driver.len()..)?.split_once(": ")?;
        let pci = Some(place).filter(|place| place.contains('.')).and_then(parse_pci_address)?;
        Some(Event::new(vendor, Some(pci), What::Named, text.trim()))
    })
}

/// A device that the kernel found on the bus: `pci 0000:06:00.0: [10de:2236] type 00 class 0x030200`.
fn enumerated(line: &str) -> Option<Event<'_>> {
    let (before, class) = line.split_once("] type 00 class 0x")?;
    let (place, ids) = before.rsplit_once(": [")?;
    let vendor = pci_bus::maker(u16::from_str_radix(ids.split(':').next()?, 16).ok()?)?;
    let class = u16::from_str_radix(class.get(..4)?, 16).ok()?;
    let pci = parse_pci_address(place.rsplit(' ').next()?)?;
    pci_bus::is_gpu(vendor, class).then_some(Event::new(vendor, Some(pci), What::Named, before))
}

fn booted(line: &str) -> Option<Event<'_>> {
    let (_, text) = line.split_once("Linux version ")?;
    let banner = text.contains("gcc") || text.contains("clang");
    banner.then_some(Event::new(Vendor::Other, None, What::Booted, text))
}

/// The first address in a text: `PCI:0000:9b:00`, `0000:9b:00.0`.
fn address_in(text: &str) -> Option<PciAddress> {
    let words = text.split(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
    let places = words.map(|word| word.trim_matches([':', '.'])).filter(|word| word.matches(':').count() == 2);
    places.into_iter().find_map(parse_pci_address)
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The number at the end of a text, or before a `new` there.
fn last_number(text: &str) -> Option<u64> {
    let text = text.trim_end();
    text.strip_suffix("new").unwrap_or(text).split_whitespace().next_back()?.parse().ok()
}

/// `65520M …` in MiB.
fn mebibytes(text: &str) -> Option<Bytes> {
    let (digits, _) = text.split_once('M')?;
    digits.parse().ok().and_then(Bytes::from_mib)
}

// What a log says, counted per device.

/// What a log says went wrong, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Said {
    /// With which device; `None` where it was said of none in particular.
    pub pci: Option<PciAddress>,
    /// What went wrong.
    pub trouble: Trouble,
    /// How often.
    pub count: u64,
}

/// Everything a log said so far.
#[derive(Debug, Default)]
struct Log {
    /// In the order in which the log first names them.
    devices: Vec<Device>,
    places: BTreeMap<PciAddress, usize>,
    /// What was said of no device in particular, or of switches.
    apart: BTreeMap<Trouble, u64>,
    driver: Option<Arc<str>>,
    mismatch: Option<Arc<str>>,
    /// The NVIDIA GPU named last: some messages take several lines and name it only in the first.
    last_nvidia: Option<PciAddress>,
}

/// A device and what happened to it.
#[derive(Debug)]
struct Device {
    found: DetectedDevice,
    counts: BTreeMap<Trouble, u64>,
}

impl Log {
    fn add(&mut self, event: &Event<'_>) {
        let trouble = match event.what {
            What::Booted => return self.forget_health(),
            What::DriverLoaded(version) => return self.driver = Some(version.into()),
            What::VersionMismatch => return self.mismatch = Some(truncate_text(event.text).into()),
            What::Trouble(switch @ Trouble::SwitchError { .. }) => return self.count_apart(switch),
            What::Trouble(trouble) => Some(trouble),
            What::Named | What::Uuid(_) | What::Memory(_) => None,
        };
        let continues = trouble == Some(Trouble::FellOffTheBus) && event.vendor == Vendor::Nvidia;
        match (event.pci.or(self.last_nvidia.filter(|_| continues)), trouble) {
            (Some(pci), trouble) => self.add_to(pci, event, trouble),
            (None, Some(trouble)) => self.count_apart(trouble),
            (None, None) => {}
        }
    }

    fn count_apart(&mut self, trouble: Trouble) {
        *self.apart.entry(trouble).or_default() += 1;
    }

    fn add_to(&mut self, pci: PciAddress, event: &Event<'_>, trouble: Option<Trouble>) {
        if event.vendor == Vendor::Nvidia {
            self.last_nvidia = Some(pci);
        }
        let at = *self.places.entry(pci).or_insert_with(|| {
            let mut found = DetectedDevice::new(event.vendor);
            found.pci = Some(pci);
            self.devices.push(Device { found, counts: BTreeMap::new() });
            self.devices.len() - 1
        });
        let Some(device) = self.devices.get_mut(at) else { return };
        match event.what {
            What::Uuid(uuid) => device.found.uuid = Some(uuid.into()),
            What::Memory(bytes) => device.found.memory.total = Reported::Value(bytes),
            _ => {}
        }
        if let Some(trouble) = trouble {
            *device.counts.entry(trouble).or_default() += 1;
            device.found.health = worse(device.found.health.take(), Some(trouble.health()));
        }
    }

    /// What was wrong before a boot need not be wrong after it; it stays in the counts.
    fn forget_health(&mut self) {
        for device in &mut self.devices {
            device.found.health = None;
        }
    }

    /// What went wrong, device by device, last what was said of none.
    fn troubles(&self) -> Vec<Said> {
        let devices = self.devices.iter().map(|device| (device.found.pci, &device.counts));
        let all = devices.chain([(None, &self.apart)]);
        all.flat_map(|(pci, counts)| counts.iter().map(move |(&trouble, &count)| Said { pci, trouble, count }))
            .collect()
    }

    fn snapshot(self) -> SourceReading {
        let mut snapshot = SourceReading::default();
        if let Some(mismatch) = self.mismatch {
            snapshot.warn(format!("a program's NVIDIA library is of another version than the driver: {mismatch}"));
        }
        for (trouble, count) in self.apart {
            snapshot.warn(trouble.sentence(count));
        }
        for mut device in self.devices {
            for (trouble, count) in device.counts {
                if let Some(pci) = device.found.pci {
                    snapshot.warn(format!("{pci}: {}", trouble.sentence(count)));
                }
            }
            if device.found.vendor == Vendor::Nvidia {
                device.found.driver = self.driver.clone();
            }
            pci_bus::list(&mut snapshot, device.found);
        }
        if snapshot.devices.is_empty() {
            snapshot.warn("the log names no GPU");
        }
        snapshot
    }
}

// What can go wrong with a GPU as the kernel's log tells it, and what each says of its health.

/// Something that went wrong with a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// NVIDIA's driver reports an error by number.
    Xid(u32),
    /// An NVSwitch reports an error by number; it is no GPU.
    SwitchError {
        number: u32,
        /// Whether the switch says it is fatal.
        fatal: bool,
    },
    /// It no longer answers on the bus.
    FellOffTheBus,
    /// The driver could not start it.
    StartFailed,
    /// A job hung on it.
    RingTimeout,
    /// The driver began to reset it.
    ResetBegun,
    /// A reset succeeded.
    ResetSucceeded,
    /// A reset failed.
    ResetFailed,
    /// Memory or logic went wrong beyond repair.
    Uncorrectable,
}

impl Trouble {
    /// Its name, and what it means for the device. What has no number of its own is dealt with as the Xid that says the
    /// same.
    fn verdict(self) -> (String, XidDescription) {
        let like = |name: &str, severity, meaning, xid: u32| {
            (name.to_owned(), XidDescription { severity, meaning, remedy: xid::describe_xid(xid).remedy })
        };
        let passing = |name: &str, meaning| {
            (name.to_owned(), XidDescription { severity: XidSeverity::Warn, meaning, remedy: "" })
        };
        let (bad, warn) = (XidSeverity::Unhealthy, XidSeverity::Warn);
        match self {
            Self::Xid(number) => (format!("Xid {number}"), xid::describe_xid(number)),
            Self::SwitchError { number, fatal } => {
                let name = format!("NVSwitch SXid {number}");
                match fatal {
                    true => like(&name, bad, "a fatal error of a switch between the GPUs", 74),
                    false => passing(&name, "an error that a switch between the GPUs got over"),
                }
            }
            Self::FellOffTheBus => like("off the bus", bad, "the GPU no longer answers on the bus", 79),
            Self::StartFailed => like("start failed", bad, "the driver could not start the GPU", 143),
            Self::RingTimeout => like("ring timeout", warn, "a job hung on the GPU", 16),
            Self::ResetBegun => like("reset begun", warn, "the driver reset the GPU", 16),
            Self::ResetSucceeded => passing("reset succeeded", "the GPU came back from a reset"),
            Self::ResetFailed => like("reset failed", bad, "the GPU did not come back from a reset", 143),
            Self::Uncorrectable => {
                like("uncorrectable error", bad, "memory or logic of the GPU went wrong beyond repair", 48)
            }
        }
    }

    /// What it says of the device's health.
    fn health(self) -> DeviceHealth {
        let (name, verdict) = self.verdict();
        match (self, verdict.severity) {
            (Self::FellOffTheBus | Self::Xid(79), _) => DeviceHealth::Lost,
            (_, XidSeverity::Unhealthy) => DeviceHealth::Unhealthy(format!("{name}: {}", verdict.meaning).into()),
            (_, XidSeverity::Application | XidSeverity::Warn) => DeviceHealth::Healthy,
        }
    }

    /// How bad it is.
    pub(crate) fn severity(self) -> XidSeverity {
        self.verdict().1.severity
    }

    /// Its count in a sentence: `Xid 13 ×629: …; the GPU is fine`.
    fn sentence(self, count: u64) -> String {
        let advice = match (self, self.severity()) {
            (_, XidSeverity::Application) => "the GPU is fine",
            (Self::Xid(_), _) => self.remedy(),
            _ => "",
        };
        let joint = if advice.is_empty() { "" } else { "; " };
        format!("{}{joint}{advice}", self.counted(count))
    }

    /// What happened how often: `Xid 79 ×1: the GPU fell off the bus`.
    pub(crate) fn counted(self, count: u64) -> String {
        let (name, verdict) = self.verdict();
        format!("{name} ×{count}: {}", verdict.meaning)
    }

    /// What a person can do about it; empty where there is nothing to do.
    pub(crate) fn remedy(self) -> &'static str {
        self.verdict().1.remedy
    }

    pub(crate) fn name(self) -> String {
        self.verdict().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::parse_pci_address;
    use crate::reported::Reported;
    use gpupool_core::{Bytes, DeviceHealth, Vendor};
    use proptest::prelude::*;

    const LOG: &str = "\
        [    0.000000] Linux version 5.15.0 (gcc 11)\n\
        [    1.000000] pci 0000:06:00.0: [10de:2236] type 00 class 0x030200 PCIe Endpoint\n\
        [    1.100000] pci 0000:0a:00.0: [1a03:2000] type 00 class 0x030000\n\
        [    2.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
        2025-01-21T02:21:33.123456+00:00 host kernel: NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d\n\
        4,1234,5678901,-;NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s\n\
        kern  :warn  : 2025-01-21T02:21:33,498559+00:00 NVRM: Xid (PCI:0000:38:00): 13, pid='<unknown>', name=<unknown>, Graphics\n\
        Jan 21 02:21:33 host kernel: [ 7.1] NVRM: Xid (0000:38:00): 43, Ch 00000008\n\
        [    3.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO\n\
        [    4.000000] NVRM: The NVIDIA GPU 0000:b3:00.0\n\
        [    4.000001] NVRM: (PCI ID: 10de:1db4) installed in this system has\n\
        [    4.000002] NVRM: fallen off the bus and is not responding to commands.\n\
        [    5.000000] NVRM: API mismatch: the client has the version 535.104.05, but\n\
        [    6.000000] amdgpu 0000:c1:00.0: amdgpu: VRAM: 65520M 0x0000008000000000 - 0x0000008FFEFFFFFF (65520M used)\n\
        [    7.000000] amdgpu 0000:c1:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3\n\
        [    7.100000] amdgpu 0000:c1:00.0: amdgpu: ring sdma0 timeout, but soft recovered\n\
        [    8.000000] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n\
        [    9.000000] amdgpu 0000:c1:00.0: amdgpu: GPU reset(2) succeeded!\n\
        [   10.000000] amdgpu 0000:c2:00.0: amdgpu: socket: 0, die: 0, 2 new uncorrectable hardware errors detected in umc block\n\
        [   11.000000] amdgpu 0000:c3:00.0: amdgpu: no uncorrectable hardware errors detected in umc block\n";

    #[test]
    fn every_prefix_is_read_and_each_device_has_the_worst_that_was_said_of_it() {
        assert!(looks_like(LOG));
        let snapshot = parse(LOG).unwrap();
        let health = |place: &str| {
            let pci = parse_pci_address(place);
            snapshot.devices.iter().find(|device| device.pci == pci).unwrap().health.clone()
        };
        assert_eq!(snapshot.devices.len(), 7, "{:?}", snapshot.devices);
        assert_eq!(health("0000:06:00.0"), None);
        assert!(matches!(health("0000:9b:00.0"), Some(DeviceHealth::Unhealthy(why)) if why.starts_with("Xid 119")));
        assert_eq!(health("0000:38:00.0"), Some(DeviceHealth::Healthy));
        assert_eq!(health("0000:b3:00.0"), Some(DeviceHealth::Lost));
        assert_eq!(health("0000:c1:00.0"), Some(DeviceHealth::Healthy));
        assert!(matches!(health("0000:c2:00.0"), Some(DeviceHealth::Unhealthy(_))));
        assert_eq!(health("0000:c3:00.0"), None);
        let first = &snapshot.devices[1];
        assert_eq!(first.uuid.as_deref(), Some("GPU-509665ad-b600-ac93-3616-d754b23d636d"));
        assert_eq!(first.driver.as_deref(), Some("535.129.03"));
        assert_eq!(snapshot.devices[4].memory.total, Reported::Value(Bytes::from_mib(65520).unwrap()));
        for part in [
            "Xid 13 ×1",
            "Xid 43 ×1",
            "SXid 28006 ×1",
            "of another version",
            "ring timeout ×1",
            "0000:b3:00.0: off the bus",
        ] {
            assert!(snapshot.warnings.iter().any(|warning| warning.contains(part)), "{part}: {:?}", snapshot.warnings);
        }
    }

    #[test]
    fn an_xid_is_known_with_and_without_its_process() {
        let told = |line: &'static str| event(line).unwrap();
        let known = told("NVRM: Xid (PCI:0000:9b:00): 31, pid=77, name=python3, Ch 00000008");
        assert_eq!(known.what, What::Trouble(Trouble::Xid(31)));
        assert_eq!((known.vendor, known.pci), (Vendor::Nvidia, parse_pci_address("9b:00.0")));
        let unknown = told("NVRM: Xid (PCI:0000:9b:00 GPU-I:02): 13, pid='<unknown>', name=<unknown>, x");
        assert_eq!(unknown.what, What::Trouble(Trouble::Xid(13)));
        assert_eq!(unknown.pci, parse_pci_address("9b:00.0"));
        assert_eq!(event("NVRM: Xid (PCI:0000:9b:00): many"), None);
    }

    #[test]
    fn a_boot_ends_what_was_wrong_before_it() {
        let fallen = "kernel: NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\n";
        assert_eq!(parse(fallen).unwrap().devices[0].health, Some(DeviceHealth::Lost));
        let booted = format!("{fallen}kernel: Linux version 6.8.0 (gcc 13)\n");
        let snapshot = parse(&booted).unwrap();
        assert_eq!(snapshot.devices[0].health, None);
        assert!(snapshot.warnings[0].contains("Xid 79 ×1"));
    }

    #[test]
    fn a_log_that_names_no_gpu_is_still_a_log() {
        let seconds = "[    0.000000] Command line: quiet\n[    0.100000] x86/fpu: x87\n";
        let dates = "[Sun Feb 23 16:24:18 2025] Command line: quiet\n[Sun Feb 23 16:24:19 2025] x86/fpu: x87\n";
        for text in [seconds, dates] {
            assert!(looks_like(text));
            assert!(parse(text).unwrap().devices.is_empty());
        }
        assert!(!looks_like("GPU  Name\n0  A100\n") && !looks_like("{\"a\": \"NVRM: x\"}") && !looks_like(""));
    }

    proptest! {
        #[test]
        fn no_damage_makes_it_panic(cut in 0..LOG.len(), at in 0..LOG.len(), byte in any::<u8>()) {
            let mut bytes = LOG.as_bytes().to_vec();
            bytes[at] = byte;
            for end in [cut, bytes.len()] {
                let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
                looks_like(&text);
                let _ = parse(&text);
            }
        }
    }
}
