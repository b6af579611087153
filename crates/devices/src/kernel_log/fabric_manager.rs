//! The log of NVIDIA's Fabric Manager, which looks after the switches between GPUs.

use std::collections::BTreeMap;

use gpupool_core::device::Vendor;

use crate::found::Found;
use crate::kernel_log::line::address_in;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::words;

/// Different messages of one level that are kept apart; the rest is only counted.
const MESSAGES: usize = 20;

/// Whether a text is a Fabric Manager's log: `[Feb 25 2025 13:59:45] [INFO] [tid 1803] …`.
pub fn looks_like(text: &str) -> bool {
    text.lines().filter(|line| !line.trim().is_empty()).take(20).any(|line| Entry::of(line).is_some())
}

/// The GPUs that the log lists when the manager starts, and its errors and warnings as warnings.
///
/// A log that was cut after the start lists no GPU; that is no error.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut snapshot = Snapshot::default();
    let mut trouble: BTreeMap<&str, Vec<(&str, u64)>> = BTreeMap::new();
    let mut entries = 0;
    let mut listing = false;
    for line in text.lines() {
        if let Some(entry) = Entry::of(line) {
            entries += 1;
            listing = entry.message.contains("detected GPU information");
            if !matches!(entry.level, "INFO" | "DEBUG") {
                count(trouble.entry(entry.level).or_default(), entry.message);
            }
        } else if listing && let Some(device) = gpu(line) {
            snapshot.push(device);
        }
    }
    if entries == 0 && !text.trim().is_empty() {
        return Err(SourceError::malformed("Fabric Manager log", "no line holds a time, a level and a thread"));
    }
    for (level, messages) in trouble {
        for (message, count) in messages {
            snapshot.warn(format!("Fabric Manager {level} ×{count}: {}", words(message)));
        }
    }
    if snapshot.devices.is_empty() {
        snapshot.warn("a Fabric Manager's log; this part of it names no GPU");
    }
    Ok(snapshot)
}

fn count<'a>(messages: &mut Vec<(&'a str, u64)>, message: &'a str) {
    const REST: &str = "other messages";
    let full = messages.len() >= MESSAGES && messages.iter().all(|(known, _)| *known != message);
    let message = if full { REST } else { message };
    match messages.iter_mut().find(|(known, _)| *known == message) {
        Some((_, count)) => *count += 1,
        None => messages.push((message, 1)),
    }
}

/// A line of the list of GPUs: `Index: 00  PCI Bus ID: 00000000:07:00.0  …  UUID: GPU-…`.
fn gpu(line: &str) -> Option<Found> {
    let after = |key: &str| line.split_once(key).map(|(_, rest)| rest.trim_start());
    let mut device = Found::new(Vendor::Nvidia);
    device.pci = Some(after("PCI Bus ID:").or_else(|| after("Pci Bus Id:")).and_then(address_in)?);
    let word = after("UUID:").and_then(|rest| rest.split_whitespace().next());
    device.uuid = word.filter(|uuid| uuid.starts_with("GPU-")).map(Into::into);
    device.index = after("Index:").and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    Some(device)
}

/// One entry of the log.
struct Entry<'a> {
    level: &'a str,
    message: &'a str,
}

impl<'a> Entry<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let (_, rest) = line.strip_prefix('[')?.split_once("] [")?;
        let (level, rest) = rest.split_once("] [tid ")?;
        let (_, message) = rest.split_once(']')?;
        let is_level = !level.is_empty() && level.bytes().all(|byte| byte.is_ascii_uppercase());
        is_level.then_some(Self { level, message: message.trim() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address;

    const LOG: &str = "[Feb 25 2025 13:59:45] [INFO] [tid 1803] dumping all the detected GPU information\n  \
        Index: 01  PCI Bus ID: 00000000:1B:00.0  Discovered Link Mask: 3ffff  Enabled Link Mask: 3ffff  UUID: GPU-aa\n\n\
        [Feb 25 2025 13:59:46] [INFO] [tid 1803] dumping all the detected NVLink Switch information\n  \
        Index: 00  PCI Bus ID: 00000000:86:00.0  UUID: SWX-bb\n\
        [Feb 27 2025 15:10:02] [ERROR] [tid 12727] detected NVSwitch non-fatal error 12028 on port 61\n\
        [Feb 27 2025 15:10:03] [ERROR] [tid 12728] detected NVSwitch non-fatal error 12028 on port 61\n";

    #[test]
    fn gpus_and_errors_are_taken_and_switches_are_not() {
        assert!(looks_like(LOG));
        let snapshot = parse(LOG).unwrap();
        assert_eq!(snapshot.devices.len(), 1);
        let gpu = &snapshot.devices[0];
        assert_eq!((gpu.pci, gpu.index, gpu.uuid.as_deref()), (address::parse("1b:00.0"), Some(1), Some("GPU-aa")));
        assert_eq!(snapshot.warnings, ["Fabric Manager ERROR ×2: detected NVSwitch non-fatal error 12028 on port 61"]);
    }

    #[test]
    fn gpus_without_end_are_cut_off_with_a_warning_and_so_are_their_names() {
        let gpu =
            |number: usize| format!("  Index: {number}  PCI Bus ID: {number:08X}:1B:00.0  UUID: GPU-{number:02000}\n");
        let listing = "[Feb 25 2025 13:59:45] [INFO] [tid 1803] detected GPU information\n";
        let snapshot = parse(&format!("{listing}{}", (0..1030).map(gpu).collect::<String>())).unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (crate::limits::DEVICES, 1));
        assert_eq!(snapshot.devices[7].uuid.as_ref().unwrap().len(), crate::limits::WORDS);
    }

    #[test]
    fn errors_without_end_are_counted_and_not_kept() {
        let line = |port: usize| format!("[Feb 27 2025 15:10:02] [ERROR] [tid 1] error on port {port}\n");
        let snapshot = parse(&(0..1000).map(line).collect::<String>()).unwrap();
        assert_eq!(snapshot.warnings.len(), MESSAGES + 2);
        assert!(
            snapshot.warnings.iter().any(|warning| warning.contains("×980: other messages")),
            "{:?}",
            snapshot.warnings
        );
        assert!(!looks_like("[    1.0] [drm] x") && parse("x").is_err());
    }
}
