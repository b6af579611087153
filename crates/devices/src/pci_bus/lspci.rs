//! What `lspci` prints: plain, `-n`, `-nn`, `-D`, `-v`, `-k` and `-mm`.

use gpupool_core::device::Vendor;

use crate::found::Found;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::{address, pci_bus};

/// Whether a text is what `lspci` prints: its first line begins with a place on the bus and names a class.
pub fn looks_like(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    Listed::of(first).is_some()
}

/// The GPUs of a listing, by their places on the bus. Displays of management boards and virtual machines are none.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut snapshot = Snapshot::default();
    let mut lines = 0;
    let mut gpu = None;
    for line in text.lines() {
        if line.starts_with(char::is_whitespace) {
            detail(line.trim(), gpu.and_then(|place: usize| snapshot.devices.get_mut(place)));
            continue;
        }
        let Some(listed) = Listed::of(line) else { continue };
        lines += 1;
        gpu = listed.gpu().and_then(|device| pci_bus::list(&mut snapshot, device));
        if let (Some(_), true) = (gpu, line.contains("(rev ff)")) {
            snapshot.warn(format!("{}: does not answer on the bus: it fell off, or is powered down", listed.place));
        }
    }
    if lines == 0 && !text.trim().is_empty() {
        return Err(SourceError::malformed("lspci", "no line begins with a place on the bus"));
    }
    Ok(snapshot)
}

/// A line below a device, as `-v` prints them: `NUMA node: 1` alone or `NUMA node 1` among its flags.
fn detail(line: &str, device: Option<&mut Found>) {
    let (Some(device), Some((_, node))) = (device, line.split_once("NUMA node")) else { return };
    let digits = node.trim_start_matches([':', ' ']).split(|c: char| !c.is_ascii_digit()).next();
    device.numa = digits.and_then(|digits| digits.parse().ok());
}

/// One line: a place, a class and a device, each as the line spells it.
struct Listed<'a> {
    place: &'a str,
    class: &'a str,
    device: String,
}

impl<'a> Listed<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let (place, rest) = line.split_once(' ')?;
        if !place.contains('.') || address::parse(place).is_none() {
            return None;
        }
        if let Some(quoted) = rest.trim_start().strip_prefix('"') {
            // `-mm` puts class, maker and device between quotes.
            let mut cells = quoted.split('"').step_by(2);
            let class = cells.next()?;
            let (maker, maker_id) = numbered(cells.next()?);
            let (device, device_id) = numbered(cells.next()?);
            let ids = maker_id.zip(device_id).map(|(maker, device)| format!(" [{maker}:{device}]"));
            return Some(Self { place, class, device: format!("{maker} {device}{}", ids.unwrap_or_default()) });
        }
        let (class, device) = rest.split_once(": ")?;
        Some(Self { place, class, device: device.to_owned() })
    }

    /// The device, where it is a GPU.
    fn gpu(&self) -> Option<Found> {
        let ids = ids(&self.device);
        let maker = match ids {
            Some((vendor, _)) => pci_bus::maker(vendor)?,
            None => MAKERS.iter().find(|(name, _)| self.device.starts_with(name))?.1,
        };
        if !pci_bus::is_gpu(maker, class(self.class)?) {
            return None;
        }
        let mut device = Found::new(maker);
        device.pci = address::parse(self.place);
        device.name = name(&self.device).map(|name| crate::told::words(name).into());
        Some(device)
    }
}

/// Makers by the names that the list of PCI devices gives them.
const MAKERS: [(&str, Vendor); 8] = [
    ("NVIDIA Corporation", Vendor::Nvidia),
    ("nVidia Corporation", Vendor::Nvidia),
    ("Advanced Micro Devices, Inc. [AMD/ATI]", Vendor::Amd),
    ("Advanced Micro Devices [AMD/ATI]", Vendor::Amd),
    ("Advanced Micro Devices, Inc. [AMD]", Vendor::Amd),
    ("AMD/ATI", Vendor::Amd),
    ("ATI Technologies Inc", Vendor::Amd),
    ("Intel Corporation", Vendor::Intel),
];

/// The class by its number, `3D controller [0302]` or `0302`, else by its name.
fn class(text: &str) -> Option<u16> {
    let number = text.rsplit_once('[').map_or(text, |(_, number)| number).trim_end_matches(']');
    let named = [
        ("VGA compatible controller", 0x0300),
        ("XGA compatible controller", 0x0301),
        ("3D controller", 0x0302),
        ("Display controller", 0x0380),
        ("Processing accelerators", 0x1200),
    ];
    let by_number = (number.len() == 4).then(|| u16::from_str_radix(number, 16).ok()).flatten();
    by_number.or_else(|| named.iter().find(|(name, _)| text.starts_with(name)).map(|(_, class)| *class))
}

/// A name and the number behind it, as `-mm -nn` writes them: `GA102GL [A10] [2236]`.
fn numbered(cell: &str) -> (&str, Option<&str>) {
    let split = cell.strip_suffix(']').and_then(|rest| rest.rsplit_once(" ["));
    let is_number = |number: &str| number.len() == 4 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    split.filter(|(_, number)| is_number(number)).map_or((cell, None), |(name, number)| (name, Some(number)))
}

/// The numbers of maker and device: the last `[10de:2236]`, or a bare `10de:2236`.
fn ids(device: &str) -> Option<(u16, u16)> {
    let pair = |text: &str| {
        let (vendor, device) = text.split_once(':')?;
        let hex = |digits: &str| (digits.len() == 4).then(|| u16::from_str_radix(digits, 16).ok()).flatten();
        Some((hex(vendor)?, hex(device)?))
    };
    let bracketed = device.rsplit('[').find_map(|part| pair(part.split(']').next()?));
    bracketed.or_else(|| pair(device.split_whitespace().next()?))
}

/// The name of a device without its maker, numbers and revision; `None` where the list of PCI devices has none.
fn name(device: &str) -> Option<&str> {
    let mut name = device.split(" (rev ").next()?.split(" (prog-if ").next()?.trim();
    if let Some((before, last)) = name.rsplit_once('[')
        && ids(last).is_some()
    {
        name = before.trim();
    }
    for (maker, _) in MAKERS {
        name = name.strip_prefix(maker).unwrap_or(name).trim_start();
    }
    let unknown = name.is_empty() || name == "Device" || name.starts_with("Device ") || ids(name).is_some();
    (!unknown).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LISTING: &str = "00:00.0 Host bridge [0600]: Intel Corporation DRAM Controller [8086:29c0]\n\
        00:01.0 VGA compatible controller [0300]: Red Hat, Inc. Virtio GPU [1af4:1050] (rev 01)\n\
        0001:03:00.0 3D controller [0302]: NVIDIA Corporation GA102GL [A10] [10de:2236] (rev a1)\n\
        \tSubsystem: NVIDIA Corporation Device [10de:1482]\n\tPhysical Slot: 1\n\tFlags: fast devsel, IRQ 5, NUMA node 1, IOMMU group 5\n\
        \tKernel driver in use: nvidia\n\
        04:00.0 Display controller: Advanced Micro Devices, Inc. [AMD/ATI] Aldebaran/MI200 [Instinct MI210] (rev 02)\n\tNUMA node: 3\n\
        05:00.0 VGA compatible controller: ASPEED Technology, Inc. ASPEED Graphics Family (rev 41)\n\
        06:00.0 1200: 1002:74a1\n07:00.0 Bridge [0680]: NVIDIA Corporation Device [10de:1af1] (rev a1)\n\
        08:00.0 3D controller: NVIDIA Corporation Device 2331 (rev ff)\n\
        09:00.0 \"3D controller [0302]\" \"NVIDIA Corporation [10de]\" \"GH100 [H100] [2331]\" -ra1 \"NVIDIA\" \"x\"\n\
        00:02.0 VGA compatible controller [0300]: Intel Corporation UHD [8086:9bc5]\n\
        0a:00.0 Audio device [0403]: NVIDIA Corporation GA102 [10de:1aef]\n";

    #[test]
    fn gpus_are_told_from_other_displays_in_every_form_of_the_listing() {
        assert!(looks_like(LISTING));
        let snapshot = parse(LISTING).unwrap();
        let listed: Vec<_> = snapshot
            .devices
            .iter()
            .map(|gpu| (gpu.pci.unwrap().to_string(), gpu.vendor, gpu.name.as_deref()))
            .collect();
        let expected = [
            ("0001:03:00.0".to_owned(), Vendor::Nvidia, Some("GA102GL [A10]")),
            ("0000:04:00.0".to_owned(), Vendor::Amd, Some("Aldebaran/MI200 [Instinct MI210]")),
            ("0000:06:00.0".to_owned(), Vendor::Amd, None),
            ("0000:08:00.0".to_owned(), Vendor::Nvidia, None),
            ("0000:09:00.0".to_owned(), Vendor::Nvidia, Some("GH100 [H100]")),
        ];
        assert_eq!(listed, expected);
        let nodes: Vec<_> = snapshot.devices.iter().map(|gpu| gpu.numa).collect();
        assert_eq!(nodes, [Some(1), Some(3), None, None, None]);
        assert_eq!(snapshot.warnings.len(), 2, "one that does not answer, one of Intel: {:?}", snapshot.warnings);
    }

    #[test]
    fn other_texts_are_no_listing() {
        for other in ["", "0000:01:00.0, NVIDIA A100", "GPU 0: x", "12:30 lunch: soup", "00000000:01:00.0 Off |"] {
            assert!(!looks_like(other), "{other}");
        }
        assert!(parse("nothing of the kind").is_err());
        assert_eq!(parse("").unwrap().devices, []);
    }

    proptest! {
        #[test]
        fn no_damage_makes_it_panic(cut in 0..LISTING.len(), at in 0..LISTING.len(), byte in any::<u8>()) {
            let mut bytes = LISTING.as_bytes().to_vec();
            bytes[at] = byte;
            for end in [cut, bytes.len()] {
                let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
                looks_like(&text);
                let _ = parse(&text);
            }
        }
    }
}
