//! What the kernel says of one open file of a graphics device: `/proc/<pid>/fdinfo/<fd>`.
//!
//! Such a text does not name its process. A captured one is therefore a device with a warning that says how much memory
//! some client of it uses, never a process.

use std::collections::BTreeSet;

use gpupool_core::device::{PciAddress, Vendor};
use gpupool_core::units::Bytes;

use crate::address;
use crate::found::{Doing, Found};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::{self, Told};

/// Whether a text is of an open graphics device.
pub fn looks_like(text: &str) -> bool {
    let has = |key: &str| text.lines().take(200).any(|line| line.starts_with(key));
    has("drm-driver:") && (has("drm-client-id:") || has("drm-pdev:"))
}

/// Reads one captured text, or several one after the other.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    let mut snapshot = Snapshot::default();
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

fn add(snapshot: &mut Snapshot, client: &Client) {
    let vendor = client.vendor();
    let place = client.pci.map_or_else(|| "a device".to_owned(), |pci| pci.to_string());
    if vendor == Vendor::Intel {
        return snapshot.warn(format!("Intel GPUs are not supported yet: {place} ({})", client.driver));
    }
    if !snapshot.devices.iter().any(|device| (device.vendor, device.pci) == (vendor, client.pci)) {
        let mut device = Found::new(vendor);
        device.pci = client.pci;
        device.driver = Some(client.driver.as_str().into());
        device.processes = Told::Unsupported("the text does not say whose open file it is about".into());
        snapshot.push(device);
    }
    let who = client.id.map_or_else(|| "a client".to_owned(), |id| format!("client {id}"));
    match &client.memory {
        Told::Value(memory) => snapshot.warn(format!("{place}: {who} uses {memory} of device memory")),
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    pub driver: String,
    pub pci: Option<PciAddress>,
    pub id: Option<u64>,
    pub name: Option<String>,
    pub memory: Told<Bytes>,
    pub doing: Doing,
}

impl Client {
    /// The client a text is about; `None` where it is about another kind of file.
    pub fn read(text: &str) -> Option<Self> {
        let mut client = Self {
            driver: String::new(),
            pci: None,
            id: None,
            name: None,
            memory: Told::ABSENT,
            doing: Doing::Unknown,
        };
        // What is resident is what is used; the others are older and wider words for it.
        let mut memory = [Told::ABSENT, Told::ABSENT, Told::ABSENT];
        let (mut computes, mut draws) = (false, false);
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key {
                "drm-driver" => client.driver = told::words(value).into_owned(),
                "drm-pdev" => client.pci = address::parse(value),
                "drm-client-id" => client.id = value.parse().ok(),
                "drm-client-name" if !value.is_empty() => client.name = Some(told::words(value).into_owned()),
                "drm-resident-vram" => memory[0] = amount(value),
                "drm-memory-vram" => memory[1] = amount(value),
                "drm-total-vram" => memory[2] = amount(value),
                "drm-engine-compute" => computes |= is_some_time(value),
                "drm-engine-gfx" => draws |= is_some_time(value),
                _ => {}
            }
        }
        client.memory = memory.into_iter().fold(Told::ABSENT, Told::or);
        client.doing = match (computes, draws) {
            (true, true) => Doing::Both,
            (true, false) => Doing::Compute,
            (false, true) => Doing::Graphics,
            (false, false) => Doing::Unknown,
        };
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
fn amount(text: &str) -> Told<Bytes> {
    Told::from_cell(text, |text| {
        let (number, unit) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let shift = match unit.trim() {
            "" | "B" => 0,
            "KiB" | "kB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            _ => return None,
        };
        number.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes)
    })
}

fn is_some_time(text: &str) -> bool {
    text.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).is_some_and(|time| time > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COMPUTE: &str = "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t77\ndrm-pdev:\t0000:c5:00.0\n\
        drm-total-vram:\t5000 KiB\ndrm-resident-vram:\t3 MiB\ndrm-memory-vram:\t4000 KiB\n\
        drm-engine-gfx:\t0 ns\ndrm-engine-compute:\t25 ns\n";

    #[test]
    fn the_resident_memory_counts_in_its_own_unit() {
        let client = Client::read(COMPUTE).unwrap();
        assert_eq!(client.memory, Told::Value(Bytes(3 << 20)));
        assert_eq!((client.id, client.doing), (Some(77), Doing::Compute));
        let older = Client::read("drm-driver: amdgpu\ndrm-memory-vram:\t4096\ndrm-engine-gfx: 9 ns\n").unwrap();
        assert_eq!((older.memory, older.doing), (Told::Value(Bytes(4096)), Doing::Graphics));
        assert!(matches!(amount("5 parsecs"), Told::Failed(_)));
        assert!(matches!(amount("99999999999999999 GiB"), Told::Failed(_)));
        assert_eq!(Client::read("pos:\t0\nmnt_id:\t9\n"), None);
    }

    #[test]
    fn a_captured_text_is_a_device_with_a_client_and_no_process() {
        assert!(looks_like(COMPUTE));
        assert!(!looks_like("drm-driver is a word\n"));
        let snapshot = parse(&format!("{COMPUTE}{COMPUTE}")).unwrap();
        assert_eq!(snapshot.warnings, ["0000:c5:00.0: client 77 uses 3 MiB of device memory"]);
        let [device] = snapshot.devices.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!(device.pci.unwrap().to_string(), "0000:c5:00.0");
        assert!(matches!(device.processes, Told::Unsupported(_)));
        assert!(device.memory.used.is_absent());
        assert!(parse("pos:\t0\n").is_err());
    }

    proptest! {
        #[test]
        fn no_flipped_or_cut_text_makes_it_panic(cut in 0..COMPUTE.len(), at in 0..COMPUTE.len(), byte in any::<u8>()) {
            let mut bytes = COMPUTE.as_bytes().to_vec();
            bytes[at] = byte;
            bytes.truncate(cut);
            let text = String::from_utf8_lossy(&bytes);
            let _ = (looks_like(&text), parse(&text));
        }
    }
}
