//! What one line of the kernel's log says about a GPU, whatever stands before its message.

use gpupool_core::device::{PciAddress, Vendor};
use gpupool_core::units::Bytes;

use crate::kernel_log::trouble::Trouble;
use crate::{address, pci_bus};

/// One thing a line says about a GPU, or about all of one maker where it names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event<'a> {
    /// Whose device it is.
    pub vendor: Vendor,
    /// Which device.
    pub pci: Option<PciAddress>,
    /// What happened.
    pub what: What<'a>,
    /// The process an Xid names.
    pub pid: Option<u32>,
    /// The name of that process.
    pub process: Option<&'a str>,
    /// The message, without what the log put before it.
    pub text: &'a str,
}

impl<'a> Event<'a> {
    const fn new(vendor: Vendor, pci: Option<PciAddress>, what: What<'a>, text: &'a str) -> Self {
        Self { vendor, pci, what, pid: None, process: None, text }
    }
}

/// What happened to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What<'a> {
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
pub(crate) fn event(line: &str) -> Option<Event<'_>> {
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
        let found = Event::new(Vendor::Nvidia, address_in(place), What::Trouble(Trouble::Xid(number)), text);
        return Some(Event { pid: setting(rest, "pid=").and_then(leading_number), process: process(rest), ..found });
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
    if let Some(version) = text.strip_prefix("loading ").and_then(pci_bus::nvidia_proc::version_in) {
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
        let pci = Some(place).filter(|place| place.contains('.')).and_then(address::parse)?;
        Some(Event::new(vendor, Some(pci), What::Named, text.trim()))
    })
}

/// A device that the kernel found on the bus: `pci 0000:06:00.0: [10de:2236] type 00 class 0x030200`.
fn enumerated(line: &str) -> Option<Event<'_>> {
    let (before, class) = line.split_once("] type 00 class 0x")?;
    let (place, ids) = before.rsplit_once(": [")?;
    let vendor = pci_bus::maker(u16::from_str_radix(ids.split(':').next()?, 16).ok()?)?;
    let class = u16::from_str_radix(class.get(..4)?, 16).ok()?;
    let pci = address::parse(place.rsplit(' ').next()?)?;
    pci_bus::is_gpu(vendor, class).then_some(Event::new(vendor, Some(pci), What::Named, before))
}

fn booted(line: &str) -> Option<Event<'_>> {
    let (_, text) = line.split_once("Linux version ")?;
    let banner = text.contains("gcc") || text.contains("clang");
    banner.then_some(Event::new(Vendor::Other, None, What::Booted, text))
}

/// The first address in a text: `PCI:0000:9b:00`, `0000:9b:00.0`.
pub(super) fn address_in(text: &str) -> Option<PciAddress> {
    let words = text.split(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
    let places = words.map(|word| word.trim_matches([':', '.'])).filter(|word| word.matches(':').count() == 2);
    places.into_iter().find_map(address::parse)
}

/// The text behind `key`, without quotes.
fn setting<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, value) = text.split_once(key)?;
    value.split(',').next().map(|value| value.trim().trim_matches('\''))
}

fn process(text: &str) -> Option<&str> {
    setting(text, "name=").filter(|name| !name.is_empty() && !name.starts_with('<'))
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
