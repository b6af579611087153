//! What the kernel's log says about GPUs: errors of NVIDIA's driver (Xids), and hangs, resets and memory errors of AMD.
//!
//! Any log that holds the kernel's messages will do: `dmesg` with any kind of time, the journal, syslog, `/dev/kmsg`.
//! Each line is read on its own; the whole becomes one device per place on the bus, with the worst that
//! was said of it since the last boot.

pub mod fabric_manager;
mod line;
mod tally;
mod trouble;

use line::{What, event};
pub use tally::Said;
pub use trouble::Trouble;

use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Lines looked at to tell a log of the kernel that says nothing of GPUs.
const FIRST_LINES: usize = 40;

/// Whether a text is a log with the kernel's messages.
pub fn looks_like(text: &str) -> bool {
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
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut log = tally::Log::default();
    for event in text.lines().filter_map(event) {
        log.add(&event);
    }
    Ok(log.snapshot())
}

/// What a log says went wrong since the last boot it tells of.
pub(crate) fn troubles(text: &str) -> Vec<Said> {
    let mut log = tally::Log::default();
    for event in text.lines().filter_map(event) {
        if event.what == What::Booted {
            log = tally::Log::default();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address;
    use crate::told::Told;
    use gpupool_core::device::{Health, Vendor};
    use gpupool_core::units::Bytes;
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
            let pci = address::parse(place);
            snapshot.devices.iter().find(|device| device.pci == pci).unwrap().health.clone()
        };
        assert_eq!(snapshot.devices.len(), 7, "{:?}", snapshot.devices);
        assert_eq!(health("0000:06:00.0"), None);
        assert!(matches!(health("0000:9b:00.0"), Some(Health::Unhealthy(why)) if why.starts_with("Xid 119")));
        assert_eq!(health("0000:38:00.0"), Some(Health::Healthy));
        assert_eq!(health("0000:b3:00.0"), Some(Health::Lost));
        assert_eq!(health("0000:c1:00.0"), Some(Health::Healthy));
        assert!(matches!(health("0000:c2:00.0"), Some(Health::Unhealthy(_))));
        assert_eq!(health("0000:c3:00.0"), None);
        let first = &snapshot.devices[1];
        assert_eq!(first.uuid.as_deref(), Some("GPU-509665ad-b600-ac93-3616-d754b23d636d"));
        assert_eq!(first.driver.as_deref(), Some("535.129.03"));
        assert_eq!(snapshot.devices[4].memory.total, Told::Value(Bytes::from_mib(65520).unwrap()));
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
    fn an_xid_names_its_process_where_it_knows_it() {
        let told = |line: &'static str| event(line).unwrap();
        let known = told("NVRM: Xid (PCI:0000:9b:00): 31, pid=77, name=python3, Ch 00000008");
        assert_eq!(
            (known.what, known.pid, known.process),
            (What::Trouble(Trouble::Xid(31)), Some(77), Some("python3"))
        );
        assert_eq!((known.vendor, known.pci), (Vendor::Nvidia, address::parse("9b:00.0")));
        let unknown = told("NVRM: Xid (PCI:0000:9b:00 GPU-I:02): 13, pid='<unknown>', name=<unknown>, x");
        assert_eq!((unknown.what, unknown.pid, unknown.process), (What::Trouble(Trouble::Xid(13)), None, None));
        assert_eq!(unknown.pci, address::parse("9b:00.0"));
        assert_eq!(event("NVRM: Xid (PCI:0000:9b:00): many"), None);
    }

    #[test]
    fn a_boot_ends_what_was_wrong_before_it() {
        let fallen = "kernel: NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\n";
        assert_eq!(parse(fallen).unwrap().devices[0].health, Some(Health::Lost));
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
