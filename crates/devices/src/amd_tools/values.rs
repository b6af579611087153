//! What both tools of AMD write alike: cells of JSON, names and ids, links, partitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{DeviceHealth, LinkKind, PciAddress};
use serde_json::Value;

use crate::amd_sysfs::hops as xgmi_hops;
use crate::detected_device::{DetectedDevice, DevicePartition, Milliwatts, is_uuid};
use crate::reported::Reported;
use crate::source_reading::SourceReading;
use crate::{amd_names, limits};

/// A JSON value as the text of one cell: plain values as they are, `{value, unit}` with the unit behind the number.
///
/// `None` for what is no single value.
pub(crate) fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some("N/A".to_owned()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text.trim().to_owned()),
        Value::Array(_) => None,
        Value::Object(parts) => {
            let inner = parts.get("value").filter(|inner| !inner.is_object() && !inner.is_array());
            let number = text_of(inner?)?;
            let unit = parts.get("unit").and_then(Value::as_str).unwrap_or_default();
            let is_number = number.starts_with(|first: char| first.is_ascii_digit() || first == '-');
            Some(if is_number { format!("{number} {unit}").trim_end().to_owned() } else { number })
        }
    }
}

// What AMD's names, ids and versions look like, and which of them are none.

/// AMD's unique id as its runtime takes it: `GPU-` and 16 hexadecimal digits. `None` for masked, redacted, zero or `N/A`.
pub(crate) fn unique_id(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    let digits = ["GPU-", "gpu-", "0x", "0X"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    let sound = (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = u64::from_str_radix(digits, 16).ok().filter(|&id| sound && id != 0 && id != u64::MAX)?;
    Some(format!("GPU-{id:016x}").into())
}

/// amd-smi's own longer UUID, as it is; `None` for what is masked.
pub(crate) fn long_uuid(text: &str) -> Option<Arc<str>> {
    Some(text.trim()).filter(|text| is_uuid(text)).map(Into::into)
}

/// The PCI ids of a device, as a tool wrote them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model<'a> {
    pub id: &'a str,
    pub revision: Option<&'a str>,
}

impl Model<'_> {
    /// Its name, as far as it is known.
    fn name(self) -> Option<String> {
        let hex = |text: &str| u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok();
        let revision = self.revision.and_then(hex).and_then(|revision| revision.try_into().ok());
        amd_names::known(hex(self.id)?, revision)
    }
}

/// The first of `names` that a person would use; else that of the model, as far as it is known; else the first of what
/// is left that says anything.
///
/// Tools that do not find a name print the vendor or the device id in its place.
pub(crate) fn best_name<'a>(names: &[&'a str], model: Option<Model<'a>>, others: &[&'a str]) -> Option<Arc<str>> {
    let names_vendor = |text: &str| text.starts_with("Advanced Micro Devices");
    let sound = |text: &&&str| says_something(text) && !names_vendor(text);
    let bounded = |text: &&str| text.trim().chars().take(limits::TEXT_CHARS).collect::<String>();
    let name = names.iter().filter(sound).find(|text| !is_hex(text.trim())).map(bounded);
    let by_id = || model.and_then(Model::name);
    let id = model.map(|model| model.id);
    let other = || others.iter().chain(&id).chain(names).find(sound).map(bounded);
    name.or_else(by_id).or_else(other).map(Into::into)
}

/// Whether a text is an answer at all.
pub(crate) fn says_something(text: &str) -> bool {
    let lower = text.trim().to_ascii_lowercase();
    let nothing = ["", "n/a", "none", "unknown", "not supported", "unsupported", "-", "<redacted>"];
    !nothing.contains(&lower.as_str()) && !lower.starts_with("n/a ")
}

fn is_hex(text: &str) -> bool {
    text.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The version of a driver. Where the driver is part of the kernel, tools print the kernel's whole banner, with or
/// without its blanks: then it is the kernel's version.
pub(crate) fn driver_version(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    if !says_something(text) {
        return None;
    }
    let banner = text.strip_prefix("Linux").map(str::trim_start).and_then(|rest| rest.strip_prefix("version"));
    let version = banner.unwrap_or(text).trim_start();
    let end = version.find(|c: char| c.is_whitespace() || c == '(').unwrap_or(version.len());
    let version: String = version[..end].chars().take(limits::TEXT_CHARS).collect();
    version.contains(|c: char| c.is_ascii_digit()).then(|| version.into())
}

/// A NUMA node, or `None` where the tool printed −1 in one of its spellings.
pub(crate) fn numa_node(text: &str) -> Option<u32> {
    text.trim().parse::<u32>().ok().filter(|&node| node < 1 << 16)
}

// Links between devices.

/// What a tool said about the way from one device to another; any of it may be missing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Way<'a> {
    /// `XGMI`, `PCIE`, `SELF`, …
    pub kind: Option<&'a str>,
    /// Steps on the way.
    pub hops: Option<u64>,
    /// AMD's own measure of how far it is.
    pub weight: Option<u64>,
}

impl Way<'_> {
    /// The link it is; `None` for a device and itself, and where nothing says what joins them.
    ///
    /// Over PCIe, AMD's library counts two hops where both devices hang on one NUMA node, three where these are
    /// neighbours, four otherwise (`rsmi_topo_get_link_type` in github.com/ROCm/rocm_smi_lib, src/rocm_smi.cc). The
    /// weight is the sum of the kernel's (`rsmi_topo_get_link_weight`): 20 from each device to its node, and what lies
    /// between the nodes. Neither tells of switches.
    pub(crate) fn link(self) -> Option<LinkKind> {
        let near = match (self.hops, self.weight) {
            (Some(hops), _) => (1..=2).contains(&hops),
            (None, Some(weight)) => (1..=40).contains(&weight),
            (None, None) => false,
        };
        match self.kind?.to_ascii_uppercase().as_str() {
            "XGMI" => {
                let hops = self.hops.map(|hops| hops.clamp(1, 255) as u8);
                Some(LinkKind::Xgmi(hops.or(self.weight.map(xgmi_hops)).unwrap_or(1)))
            }
            "PCIE" | "PCIEXPRESS" | "PCI" => Some(if near { LinkKind::SameNuma } else { LinkKind::CrossNuma }),
            _ => None,
        }
    }
}

// What can be said of devices only once all of them are known: partitions, dies that share a sensor, health.

/// What a tool said of how a device is cut.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cut {
    /// Which part it is.
    pub id: Option<u16>,
    /// `SPX`, `CPX`, …; `None` also where the device cannot be cut.
    pub mode: Option<Arc<str>>,
}

impl Cut {
    /// From the words of a tool.
    pub(crate) fn new(id: Option<&str>, mode: Option<&str>) -> Self {
        let mode = mode.map(str::trim).filter(|mode| mode.len() == 3 && mode.to_ascii_uppercase().ends_with("PX"));
        Self { id: id.and_then(|id| id.trim().parse().ok()), mode: mode.map(|mode| mode.to_ascii_uppercase().into()) }
    }

    /// Into how many parts this mode cuts every device, where it does.
    fn parts(&self) -> Option<u16> {
        match self.mode.as_deref()? {
            "DPX" => Some(2),
            "TPX" => Some(3),
            "QPX" => Some(4),
            // CPX: one part for each compute die, of which devices have six or eight.
            _ => None,
        }
    }
}

/// Completes devices with what follows from the others. `cuts` are in the order of the devices.
pub(crate) fn settle(snapshot: &mut SourceReading, cuts: &[Cut]) {
    partitions(&mut snapshot.devices, cuts);
    shared_sensors(snapshot);
    for device in &mut snapshot.devices {
        if device.health.is_none() && device.has_answered() {
            device.health = Some(DeviceHealth::Healthy);
        }
    }
}

/// Devices at one place on the bus are parts of one; so is one whose mode says it is cut.
fn partitions(devices: &mut [DetectedDevice], cuts: &[Cut]) {
    let mut at: BTreeMap<PciAddress, u16> = BTreeMap::new();
    for address in devices.iter().filter_map(|device| device.pci) {
        let count = at.entry(address).or_default();
        *count = count.saturating_add(1);
    }
    let mut seen: BTreeMap<Option<PciAddress>, u16> = BTreeMap::new();
    for (device, cut) in devices.iter_mut().zip(cuts) {
        let shared = device.pci.and_then(|address| at.get(&address)).copied().filter(|&count| count > 1);
        let is_cut = cut.mode.as_deref().map_or(cut.id.is_some_and(|id| id > 0), |mode| mode != "SPX");
        let order = seen.entry(device.pci).or_default();
        let turn = *order;
        *order = order.saturating_add(1);
        if shared.is_none() && !is_cut {
            continue;
        }
        let parts = cut.parts().or(shared);
        // Without a place on the bus the parts of several cards follow each other.
        let turn = if device.pci.is_none() { parts.map_or(turn, |parts| turn % parts.max(1)) } else { turn };
        device.partition = Some(DevicePartition::Amd { id: cut.id.unwrap_or(turn), mode: cut.mode.clone(), parts });
    }
}

/// Two dies of one card (MI250) carry one id and have one power sensor: a second die that says 0 W says nothing.
///
/// One that repeats the first is believed, with a warning.
fn shared_sensors(snapshot: &mut SourceReading) {
    let mut powers: BTreeMap<Arc<str>, Milliwatts> = BTreeMap::new();
    let die = |device: &DetectedDevice| device.uuid.clone().filter(|_| device.partition.is_none());
    for device in &snapshot.devices {
        if let (Some(uuid), Reported::Value(watts)) = (die(device), &device.power) {
            let most = powers.entry(uuid).or_default();
            *most = (*most).max(*watts);
        }
    }
    let mut repeated: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    for device in &mut snapshot.devices {
        let Some((uuid, most)) = die(device).and_then(|uuid| powers.get(&uuid).map(|&most| (uuid, most))) else {
            continue;
        };
        if most > Milliwatts(0) && device.power == Reported::Value(Milliwatts(0)) {
            device.power = Reported::Unsupported("measured at the other die of the card".into());
        } else if device.power == Reported::Value(most) {
            *repeated.entry(uuid).or_default() += 1;
        }
    }
    for (uuid, count) in repeated.into_iter().filter(|&(_, count)| count > 1) {
        snapshot.warn(format!("{count} dies of {uuid} report the same power, which may be that of the whole card"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::Vendor;
    use serde_json::json;

    use crate::address::parse_pci_address;

    #[test]
    fn a_value_with_a_unit_reads_like_its_text() {
        assert_eq!(text_of(&json!({"value": 283, "unit": "MB"})).unwrap(), "283 MB");
        assert_eq!(text_of(&json!({"value": "N/A", "unit": "W"})).unwrap(), "N/A");
        assert_eq!(text_of(&json!({"value": null, "unit": "C"})).unwrap(), "N/A");
        assert_eq!(text_of(&json!("12 W")).unwrap(), "12 W");
        assert_eq!(text_of(&json!({"umc": 1})), None);
    }

    #[test]
    fn an_id_has_one_spelling() {
        for spelling in ["0x719d230578348e8c", "719D230578348E8C", "GPU-719d230578348e8c", " 0x719D230578348E8C "] {
            assert_eq!(unique_id(spelling).as_deref(), Some("GPU-719d230578348e8c"), "{spelling}");
        }
        assert_eq!(unique_id("0x2150e7d042a1124").as_deref(), Some("GPU-02150e7d042a1124"));
        for none in ["N/A", "<redacted>", "GPU-XX", "", "0x0", "0xffffffffffffffff", "0x719d230578348e8c0"] {
            assert_eq!(unique_id(none), None, "{none}");
        }
        assert!(long_uuid("5bff740f-0000-1000-80f5-3c1c4d3e6f8a").is_some());
        assert_eq!(long_uuid("XXXXXXXX-0000-1000-80f5-3c1c4d3e6f8a"), None);
    }

    #[test]
    fn an_id_in_place_of_a_name_is_used_only_where_nothing_else_is_there() {
        let best = |names: &[&str], id: Option<&str>, others: &[&str]| {
            let model = id.map(|id| Model { id, revision: Some("0xc1") });
            best_name(names, model, others).map(|name| name.to_string())
        };
        assert_eq!(best(&["0x73bf"], Some("0x73bf"), &[]).as_deref(), Some("AMD Radeon RX 6800 XT"));
        assert_eq!(best(&["0x1002", "N/A", "Navi"], Some("0x74a0"), &["SKU"]).as_deref(), Some("Navi"));
        assert_eq!(best(&["0x1002"], Some("0x74a0"), &["SKU"]).as_deref(), Some("AMD Instinct MI300A"));
        assert_eq!(best(&["0x1002"], Some("0x0001"), &["SKU"]).as_deref(), Some("SKU"));
        assert_eq!(best(&["N/A"], Some("0x0001"), &[]).as_deref(), Some("0x0001"));
        assert_eq!(best(&["N/A", "", "Advanced Micro Devices, Inc. [AMD/ATI]"], None, &[]), None);
    }

    #[test]
    fn a_kernel_banner_is_shortened_to_the_kernels_version() {
        let squeezed = "Linuxversion6.8.0-31-generic(buildd@host)(gcc-13)#31-UbuntuSMP";
        assert_eq!(driver_version(squeezed).as_deref(), Some("6.8.0-31-generic"));
        assert_eq!(driver_version("Linux version 6.9.0-rc5+ (me@here) #1").as_deref(), Some("6.9.0-rc5+"));
        assert_eq!(driver_version("6.12.12").as_deref(), Some("6.12.12"));
        assert_eq!(driver_version("N/A"), None);
        assert_eq!(driver_version("Linuxver"), None);
    }

    #[test]
    fn no_numa_node_has_three_spellings() {
        assert_eq!(["-1", "4294967295", "N/A", "3"].map(numa_node), [None, None, None, Some(3)]);
    }

    fn link(kind: &str, hops: Option<u64>, weight: Option<u64>) -> Option<LinkKind> {
        Way { kind: Some(kind), hops, weight }.link()
    }

    #[test]
    fn a_way_becomes_the_link_it_is() {
        assert_eq!(link("XGMI", Some(1), Some(15)), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("xgmi", None, None), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("XGMI", None, Some(30)), Some(LinkKind::Xgmi(2)));
        assert_eq!(link("XGMI", None, Some(13)), Some(LinkKind::Xgmi(1)));
        assert_eq!(link("PCIE", Some(2), Some(40)), Some(LinkKind::SameNuma));
        assert_eq!(link("PCIE", Some(3), Some(72)), Some(LinkKind::CrossNuma));
        assert_eq!(link("PCIE", None, Some(40)), Some(LinkKind::SameNuma));
        assert_eq!(link("PCIE", None, None), Some(LinkKind::CrossNuma));
        assert_eq!(link("SELF", Some(0), Some(0)), None);
        assert_eq!(link("N/A", Some(1), None), None);
    }

    fn at(address: &str) -> DetectedDevice {
        let mut found = DetectedDevice::new(Vendor::Amd);
        found.pci = parse_pci_address(address);
        found
    }

    fn parts(devices: Vec<DetectedDevice>, cuts: &[Cut]) -> Vec<Option<DevicePartition>> {
        let mut snapshot = SourceReading { devices, ..SourceReading::default() };
        settle(&mut snapshot, cuts);
        snapshot.devices.into_iter().map(|device| device.partition).collect()
    }

    #[test]
    fn devices_at_one_place_are_parts_of_one() {
        let cuts: Vec<Cut> = ["0", "1", "0"].iter().map(|id| Cut::new(Some(id), None)).collect();
        let found = parts(vec![at("0000:01:00.0"), at("0000:01:00.0"), at("0001:01:00.0")], &cuts);
        assert_eq!(found[1], Some(DevicePartition::Amd { id: 1, mode: None, parts: Some(2) }));
        assert_eq!(found[2], None);
    }

    #[test]
    fn a_device_in_one_piece_is_no_partition() {
        for mode in ["SPX", "N/A", "", "spx"] {
            assert_eq!(parts(vec![at("01:00.0")], &[Cut::new(Some("0"), Some(mode))]), [None], "{mode}");
        }
    }

    #[test]
    fn a_mode_says_that_a_device_is_cut_even_where_its_parts_are_nameless() {
        let cut = Cut::new(None, Some("DPX"));
        let found = parts(vec![DetectedDevice::new(Vendor::Amd); 4], &vec![cut; 4]);
        let ids: Vec<_> = found.iter().flatten().map(DevicePartition::number).collect();
        assert_eq!(ids, [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn the_second_die_of_a_card_never_draws_zero_watts() {
        let die = |watts| {
            let mut found = DetectedDevice::new(Vendor::Amd);
            found.uuid = Some("GPU-0000000000000001".into());
            found.power = Reported::Value(Milliwatts(watts));
            found
        };
        let mut snapshot = SourceReading { devices: vec![die(89_000), die(0)], ..SourceReading::default() };
        settle(&mut snapshot, &[Cut::default(), Cut::default()]);
        assert_eq!(snapshot.devices[0].power, Reported::Value(Milliwatts(89_000)));
        assert!(matches!(snapshot.devices[1].power, Reported::Unsupported(_)));
        assert!(snapshot.warnings.is_empty());
        let mut twins = SourceReading { devices: vec![die(89_000), die(89_000)], ..SourceReading::default() };
        settle(&mut twins, &[Cut::default(), Cut::default()]);
        assert_eq!((&twins.devices[1].power, twins.warnings.len()), (&Reported::Value(Milliwatts(89_000)), 1));
    }
}
