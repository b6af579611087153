//! GPU faults in the kernel's log: errors of NVIDIA's driver (Xids), and hangs, resets and memory errors of AMD GPUs.
//!
//! Any log of kernel messages works: `dmesg` with any time format, the journal, syslog, `/dev/kmsg`. Each line is
//! parsed on its own. The result has one device per PCI address, with the worst health since the last boot.

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

/// Number of lines inspected to recognize a kernel log without GPU messages.
const INSPECTED_LINES: usize = 40;

/// Whether a text is a log with the kernel's messages.
pub(crate) fn looks_like(text: &str) -> bool {
    if text.trim_start().starts_with(['{', '<']) {
        return false;
    }
    let named = |line: &str| line.contains("NVRM: ") || line.contains("SXid (") || is_amdgpu_line(line);
    let first = || text.lines().filter(|line| !line.trim().is_empty()).take(INSPECTED_LINES);
    let kernel = first().filter(|line| is_kernel_line(line)).count();
    kernel > first().count() / 2 || text.lines().any(named)
}

/// Parses the devices and their health from a log, with the number of each fault as warnings.
///
/// Errors caused by programs leave a device healthy; a device without any fault has no health.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    let mut log = KernelLogSummary::default();
    for event in text.lines().filter_map(parse_line) {
        log.add(&event);
    }
    Ok(log.into_reading())
}

/// Counts the faults since the last boot in a log.
pub(crate) fn count_faults(text: &str) -> Vec<FaultCount> {
    let mut log = KernelLogSummary::default();
    for event in text.lines().filter_map(parse_line) {
        if event.kind == KernelEventKind::Booted {
            log = KernelLogSummary::default();
        }
        log.add(&event);
    }
    log.fault_counts()
}

fn is_amdgpu_line(line: &str) -> bool {
    line.contains("amdgpu ") && parse_line(line).is_some_and(|event| event.pci.is_some())
}

/// Whether a line has one of these forms: `[   12.345678] …`, `[Sun Feb 23 16:24:18 2025] …`, `kern  :warn  : …`, `Jan
/// 21 02:21:33 host kernel: …`, `4,1234,5678,-;…`.
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

// Parsing of one line, independent of the prefix before its message.

/// Statement of one line about a GPU, or about all GPUs of a vendor if it names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KernelLogEvent<'a> {
    pub vendor: Vendor,
    pub pci: Option<PciAddress>,
    pub kind: KernelEventKind<'a>,
    /// Message without the log's prefix.
    pub text: &'a str,
}

impl<'a> KernelLogEvent<'a> {
    const fn new(vendor: Vendor, pci: Option<PciAddress>, kind: KernelEventKind<'a>, text: &'a str) -> Self {
        Self { vendor, pci, kind, text }
    }
}

/// Content of a statement about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KernelEventKind<'a> {
    /// The line only names the device.
    Named,
    /// UUID from the driver.
    Uuid(&'a str),
    /// Memory size from the driver.
    Memory(Bytes),
    /// Version of the driver at its loading.
    DriverLoaded(&'a str),
    /// A program uses a library of another version than the driver.
    VersionMismatch,
    /// The device has a fault.
    Fault(GpuFault),
    /// The machine booted; earlier faults belong to an earlier run.
    Booted,
}

/// Parses a line; `None` if it concerns no GPU.
fn parse_line(line: &str) -> Option<KernelLogEvent<'_>> {
    // The SXid of a switch contains the text of an Xid.
    if let Some((_, message)) = line.split_once("SXid (") {
        return parse_switch_error(message);
    }
    if let Some((_, message)) = line.split_once("NVRM: ") {
        return parse_nvidia(message.trim());
    }
    if let Some(named) = parse_driver_line(line, "nvidia ", Vendor::Nvidia) {
        return Some(named);
    }
    if let Some(device) = parse_driver_line(line, "amdgpu ", Vendor::Amd) {
        return Some(KernelLogEvent { kind: parse_amd(device.text), ..device });
    }
    if line.contains("amdgpu") {
        let kind = parse_amd(line);
        return (kind != KernelEventKind::Named).then_some(KernelLogEvent::new(Vendor::Amd, None, kind, line.trim()));
    }
    parse_enumeration(line).or_else(|| parse_boot(line))
}

fn parse_nvidia(text: &str) -> Option<KernelLogEvent<'_>> {
    let event = |pci, kind| Some(KernelLogEvent::new(Vendor::Nvidia, pci, kind, text));
    if let Some((place, rest)) = text.strip_prefix("Xid (").and_then(|rest| rest.split_once(')')) {
        let number = leading_number(rest.trim_start_matches([':', ' ']))?;
        return event(first_address(place), KernelEventKind::Fault(GpuFault::Xid(number)));
    }
    if text.contains("fallen off the bus") {
        return event(first_address(text), KernelEventKind::Fault(GpuFault::FellOffTheBus));
    }
    if text.contains("RmInitAdapter failed") {
        return event(first_address(text), KernelEventKind::Fault(GpuFault::StartFailed));
    }
    if text.contains("API mismatch") {
        return event(None, KernelEventKind::VersionMismatch);
    }
    if let Some(version) = text.strip_prefix("loading ").and_then(pci_bus::version_in) {
        return event(None, KernelEventKind::DriverLoaded(version));
    }
    let is_uuid = |word: &&str| word.starts_with("GPU-") && word.len() == 40 && !word.contains('?');
    match (first_address(text), text.split_whitespace().find(is_uuid)) {
        (Some(pci), Some(uuid)) => event(Some(pci), KernelEventKind::Uuid(uuid)),
        // Other lines contain numbers that look like addresses; only the driver's phrases for a GPU count.
        (Some(pci), None) if text.contains("GPU at ") || text.contains("NVIDIA GPU ") || text.starts_with("GPU ") => {
            event(Some(pci), KernelEventKind::Named)
        }
        _ => None,
    }
}

fn parse_switch_error(message: &str) -> Option<KernelLogEvent<'_>> {
    let (place, rest) = message.split_once(')')?;
    let text = rest.trim_start_matches([':', ' ']);
    let number = leading_number(text)?;
    let lower = text.to_ascii_lowercase();
    let fatal = lower.contains("fatal") && !lower.contains("non-fatal");
    let kind = KernelEventKind::Fault(GpuFault::SwitchError { number, fatal });
    Some(KernelLogEvent::new(Vendor::Nvidia, first_address(place), kind, text))
}

fn parse_amd(text: &str) -> KernelEventKind<'_> {
    let vram = text.split_once("VRAM: ").or_else(|| text.split_once("VRAM RAM=")).map(|(_, rest)| rest);
    let memory = || vram.and_then(parse_mib).map(KernelEventKind::Memory);
    amd_fault(text).map(KernelEventKind::Fault).or_else(memory).unwrap_or(KernelEventKind::Named)
}

fn amd_fault(text: &str) -> Option<GpuFault> {
    let has = |words: &str| text.contains(words);
    let broken = text.split_once("uncorrectable hardware errors").and_then(|(before, _)| last_number(before));
    let phrases = [
        (has("device lost from bus") || has("fallen off the bus"), GpuFault::FellOffTheBus),
        (has("Fatal error during GPU init"), GpuFault::StartFailed),
        (broken.is_some_and(|errors| errors > 0) || is_poison(text), GpuFault::Uncorrectable),
        (has("GPU reset begin"), GpuFault::ResetBegun),
        (has("GPU reset") && has("succeeded"), GpuFault::ResetSucceeded),
        (has("GPU reset") && (has("failed") || has("ret = -")), GpuFault::ResetFailed),
        (has("GPU Recovery Failed"), GpuFault::ResetFailed),
        (has("ring ") && has(" timeout") && !has("soft recovered"), GpuFault::RingTimeout),
    ];
    phrases.into_iter().find(|(matches, _)| *matches).map(|(_, fault)| fault)
}

/// Whether poison was consumed or created; the setting that allows poison does not count.
fn is_poison(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    lower.contains("poison") && (lower.contains("consum") || lower.contains("creat"))
}

/// Parses a line that a driver wrote about a device: `amdgpu 0000:c1:00.0: …`.
fn parse_driver_line<'a>(line: &'a str, driver: &str, vendor: Vendor) -> Option<KernelLogEvent<'a>> {
    line.match_indices(driver).find_map(|(at, _)| {
        let before = line.get(..at)?.chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '-' || c == '_') {
            return None;
        }
        let (place, text) = line.get(at + driver.len()..)?.split_once(": ")?;
        let pci = Some(place).filter(|place| place.contains('.')).and_then(parse_pci_address)?;
        Some(KernelLogEvent::new(vendor, Some(pci), KernelEventKind::Named, text.trim()))
    })
}

/// Parses the kernel's enumeration of a device: `pci 0000:06:00.0: [10de:2236] type 00 class 0x030200`.
fn parse_enumeration(line: &str) -> Option<KernelLogEvent<'_>> {
    let (before, class) = line.split_once("] type 00 class 0x")?;
    let (place, ids) = before.rsplit_once(": [")?;
    let vendor = pci_bus::vendor_of_id(u16::from_str_radix(ids.split(':').next()?, 16).ok()?)?;
    let class = u16::from_str_radix(class.get(..4)?, 16).ok()?;
    let pci = parse_pci_address(place.rsplit(' ').next()?)?;
    pci_bus::is_gpu(vendor, class).then_some(KernelLogEvent::new(vendor, Some(pci), KernelEventKind::Named, before))
}

fn parse_boot(line: &str) -> Option<KernelLogEvent<'_>> {
    let (_, text) = line.split_once("Linux version ")?;
    let banner = text.contains("gcc") || text.contains("clang");
    banner.then_some(KernelLogEvent::new(Vendor::Other, None, KernelEventKind::Booted, text))
}

/// Returns the first address in a text: `PCI:0000:9b:00`, `0000:9b:00.0`.
fn first_address(text: &str) -> Option<PciAddress> {
    let words = text.split(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
    let indices = words.map(|word| word.trim_matches([':', '.'])).filter(|word| word.matches(':').count() == 2);
    indices.into_iter().find_map(parse_pci_address)
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Returns the number at the end of a text, or before a final `new`.
fn last_number(text: &str) -> Option<u64> {
    let text = text.trim_end();
    text.strip_suffix("new").unwrap_or(text).split_whitespace().next_back()?.parse().ok()
}

/// Parses `65520M …` as MiB.
fn parse_mib(text: &str) -> Option<Bytes> {
    let (digits, _) = text.split_once('M')?;
    digits.parse().ok().and_then(Bytes::from_mib)
}

// Summary of a log by device.

/// Fault and the number of its occurrences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FaultCount {
    /// Affected device; `None` if the log names none.
    pub pci: Option<PciAddress>,
    pub fault: GpuFault,
    /// Number of occurrences.
    pub count: u64,
}

/// Everything parsed from a log so far.
#[derive(Debug, Default)]
struct KernelLogSummary {
    /// Devices in the order of their first mention.
    devices: Vec<LoggedDevice>,
    indices: BTreeMap<PciAddress, usize>,
    /// Faults without a device, or of switches.
    deviceless: BTreeMap<GpuFault, u64>,
    driver: Option<Arc<str>>,
    mismatch: Option<Arc<str>>,
    /// NVIDIA GPU named last: some messages take several lines and name the GPU only in the first.
    last_nvidia: Option<PciAddress>,
}

/// Device and its faults.
#[derive(Debug)]
struct LoggedDevice {
    detected: DetectedDevice,
    counts: BTreeMap<GpuFault, u64>,
}

impl KernelLogSummary {
    fn add(&mut self, event: &KernelLogEvent<'_>) {
        let fault = match event.kind {
            KernelEventKind::Booted => return self.forget_health(),
            KernelEventKind::DriverLoaded(version) => return self.driver = Some(version.into()),
            KernelEventKind::VersionMismatch => return self.mismatch = Some(truncate_text(event.text).into()),
            KernelEventKind::Fault(switch @ GpuFault::SwitchError { .. }) => return self.count_deviceless(switch),
            KernelEventKind::Fault(fault) => Some(fault),
            KernelEventKind::Named | KernelEventKind::Uuid(_) | KernelEventKind::Memory(_) => None,
        };
        let continues = fault == Some(GpuFault::FellOffTheBus) && event.vendor == Vendor::Nvidia;
        match (event.pci.or(self.last_nvidia.filter(|_| continues)), fault) {
            (Some(pci), fault) => self.add_to_device(pci, event, fault),
            (None, Some(fault)) => self.count_deviceless(fault),
            (None, None) => {}
        }
    }

    fn count_deviceless(&mut self, fault: GpuFault) {
        *self.deviceless.entry(fault).or_default() += 1;
    }

    fn add_to_device(&mut self, pci: PciAddress, event: &KernelLogEvent<'_>, fault: Option<GpuFault>) {
        if event.vendor == Vendor::Nvidia {
            self.last_nvidia = Some(pci);
        }
        let at = *self.indices.entry(pci).or_insert_with(|| {
            let mut detected = DetectedDevice::new(event.vendor);
            detected.pci = Some(pci);
            self.devices.push(LoggedDevice { detected, counts: BTreeMap::new() });
            self.devices.len() - 1
        });
        let Some(device) = self.devices.get_mut(at) else { return };
        match event.kind {
            KernelEventKind::Uuid(uuid) => device.detected.uuid = Some(uuid.into()),
            KernelEventKind::Memory(bytes) => device.detected.memory.total = Reported::Value(bytes),
            _ => {}
        }
        if let Some(fault) = fault {
            *device.counts.entry(fault).or_default() += 1;
            device.detected.health = worse(device.detected.health.take(), Some(fault.health()));
        }
    }

    /// Forgets the health of all devices: a fault before a boot may be gone. The counts stay.
    fn forget_health(&mut self) {
        for device in &mut self.devices {
            device.detected.health = None;
        }
    }

    /// Returns the faults by device, with those of no device last.
    fn fault_counts(&self) -> Vec<FaultCount> {
        let devices = self.devices.iter().map(|device| (device.detected.pci, &device.counts));
        let all = devices.chain([(None, &self.deviceless)]);
        all.flat_map(|(pci, counts)| counts.iter().map(move |(&fault, &count)| FaultCount { pci, fault, count }))
            .collect()
    }

    fn into_reading(self) -> SourceReading {
        let mut reading = SourceReading::default();
        if let Some(mismatch) = self.mismatch {
            reading.warn(format!("a program's NVIDIA library has another version than the driver: {mismatch}"));
        }
        for (fault, count) in self.deviceless {
            reading.warn(fault.describe_with_advice(count));
        }
        for mut device in self.devices {
            for (fault, count) in device.counts {
                if let Some(pci) = device.detected.pci {
                    reading.warn(format!("{pci}: {}", fault.describe_with_advice(count)));
                }
            }
            if device.detected.vendor == Vendor::Nvidia {
                device.detected.driver = self.driver.clone();
            }
            pci_bus::push_listed_gpu(&mut reading, device.detected);
        }
        if reading.devices.is_empty() {
            reading.warn("the log names no GPU");
        }
        reading
    }
}

// Faults of GPUs in the kernel's log, and their effect on health.

/// Fault of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GpuFault {
    /// Error of NVIDIA's driver, by number.
    Xid(u32),
    /// Error of an NVSwitch, by number; it is not a GPU.
    SwitchError {
        number: u32,
        /// Whether the switch calls the error fatal.
        fatal: bool,
    },
    /// The GPU no longer responds on the bus.
    FellOffTheBus,
    /// The driver could not start the GPU.
    StartFailed,
    /// A job hung on the GPU.
    RingTimeout,
    /// The driver began to reset the GPU.
    ResetBegun,
    /// A reset of the GPU succeeded.
    ResetSucceeded,
    /// A reset of the GPU failed.
    ResetFailed,
    /// Memory or logic failed beyond repair.
    Uncorrectable,
}

impl GpuFault {
    /// Returns the name and the meaning of the fault. A fault without a number has the remedy of the matching Xid.
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
                    false => passing(&name, "an error from which a switch between the GPUs recovered"),
                }
            }
            Self::FellOffTheBus => like("off the bus", bad, "the GPU no longer answers on the bus", 79),
            Self::StartFailed => like("start failed", bad, "the driver could not start the GPU", 143),
            Self::RingTimeout => like("ring timeout", warn, "a job hung on the GPU", 16),
            Self::ResetBegun => like("reset begun", warn, "the driver reset the GPU", 16),
            Self::ResetSucceeded => passing("reset succeeded", "the GPU came back from a reset"),
            Self::ResetFailed => like("reset failed", bad, "the GPU did not come back from a reset", 143),
            Self::Uncorrectable => {
                like("uncorrectable error", bad, "memory or logic of the GPU failed beyond repair", 48)
            }
        }
    }

    /// Returns the health of a device with this fault.
    fn health(self) -> DeviceHealth {
        let (name, verdict) = self.verdict();
        match (self, verdict.severity) {
            (Self::FellOffTheBus | Self::Xid(79), _) => DeviceHealth::Lost,
            (_, XidSeverity::Unhealthy) => DeviceHealth::Unhealthy(format!("{name}: {}", verdict.meaning).into()),
            (_, XidSeverity::Application | XidSeverity::Warn) => DeviceHealth::Healthy,
        }
    }

    pub(crate) fn severity(self) -> XidSeverity {
        self.verdict().1.severity
    }

    /// Describes the fault with its count: `Xid 13 ×629: …; the GPU is fine`.
    fn describe_with_advice(self, count: u64) -> String {
        let advice = match (self, self.severity()) {
            (_, XidSeverity::Application) => "the GPU is fine",
            (Self::Xid(_), _) => self.remedy(),
            _ => "",
        };
        let joint = if advice.is_empty() { "" } else { "; " };
        format!("{}{joint}{advice}", self.describe(count))
    }

    /// Describes the fault with its count, without advice: `Xid 79 ×1: the GPU fell off the bus`.
    pub(crate) fn describe(self, count: u64) -> String {
        let (name, verdict) = self.verdict();
        format!("{name} ×{count}: {}", verdict.meaning)
    }

    /// Returns the next step for a person; empty if there is none.
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
    fn every_prefix_is_parsed_and_each_device_has_its_worst_health() {
        assert!(looks_like(LOG));
        let reading = parse(LOG).unwrap();
        let health = |address: &str| {
            let pci = parse_pci_address(address);
            reading.devices.iter().find(|device| device.pci == pci).unwrap().health.clone()
        };
        assert_eq!(reading.devices.len(), 7, "{:?}", reading.devices);
        assert_eq!(health("0000:06:00.0"), None);
        assert!(matches!(health("0000:9b:00.0"), Some(DeviceHealth::Unhealthy(why)) if why.starts_with("Xid 119")));
        assert_eq!(health("0000:38:00.0"), Some(DeviceHealth::Healthy));
        assert_eq!(health("0000:b3:00.0"), Some(DeviceHealth::Lost));
        assert_eq!(health("0000:c1:00.0"), Some(DeviceHealth::Healthy));
        assert!(matches!(health("0000:c2:00.0"), Some(DeviceHealth::Unhealthy(_))));
        assert_eq!(health("0000:c3:00.0"), None);
        let first = &reading.devices[1];
        assert_eq!(first.uuid.as_deref(), Some("GPU-509665ad-b600-ac93-3616-d754b23d636d"));
        assert_eq!(first.driver.as_deref(), Some("535.129.03"));
        assert_eq!(reading.devices[4].memory.total, Reported::Value(Bytes::from_mib(65520).unwrap()));
        for part in [
            "Xid 13 ×1",
            "Xid 43 ×1",
            "SXid 28006 ×1",
            "has another version",
            "ring timeout ×1",
            "0000:b3:00.0: off the bus",
        ] {
            assert!(reading.warnings.iter().any(|warning| warning.contains(part)), "{part}: {:?}", reading.warnings);
        }
    }

    #[test]
    fn an_xid_is_parsed_with_and_without_its_process() {
        let parsed = |line: &'static str| parse_line(line).unwrap();
        let known = parsed("NVRM: Xid (PCI:0000:9b:00): 31, pid=77, name=python3, Ch 00000008");
        assert_eq!(known.kind, KernelEventKind::Fault(GpuFault::Xid(31)));
        assert_eq!((known.vendor, known.pci), (Vendor::Nvidia, parse_pci_address("9b:00.0")));
        let unknown = parsed("NVRM: Xid (PCI:0000:9b:00 GPU-I:02): 13, pid='<unknown>', name=<unknown>, x");
        assert_eq!(unknown.kind, KernelEventKind::Fault(GpuFault::Xid(13)));
        assert_eq!(unknown.pci, parse_pci_address("9b:00.0"));
        assert_eq!(parse_line("NVRM: Xid (PCI:0000:9b:00): many"), None);
    }

    #[test]
    fn a_boot_clears_the_health_and_keeps_the_counts() {
        let fallen = "kernel: NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\n";
        assert_eq!(parse(fallen).unwrap().devices[0].health, Some(DeviceHealth::Lost));
        let booted = format!("{fallen}kernel: Linux version 6.8.0 (gcc 13)\n");
        let reading = parse(&booted).unwrap();
        assert_eq!(reading.devices[0].health, None);
        assert!(reading.warnings[0].contains("Xid 79 ×1"));
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
        fn parsing_a_damaged_log_never_panics(cut in 0..LOG.len(), at in 0..LOG.len(), byte in any::<u8>()) {
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
