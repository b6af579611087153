//! Formats common to both AMD tools: JSON cells, names and ids, links, partitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_core::{DeviceHealth, LinkKind, PciAddress};
use serde_json::Value;

use crate::amd_sysfs::hops as xgmi_hops;
use crate::detected_device::{DetectedDevice, DevicePartition, Milliwatts, is_uuid};
use crate::reported::Reported;
use crate::source_reading::SourceReading;
use crate::{amd_names, limits};

/// Returns a JSON value as the text of one cell: plain values unchanged, `{value, unit}` with the unit after the
/// number.
///
/// `None` for anything but a single value.
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

// Names, ids and versions of AMD devices, and placeholders for missing ones.

/// Returns AMD's unique id in the form of its runtime: `GPU-` and 16 hexadecimal digits. `None` for masked, redacted,
/// zero or `N/A`.
pub(crate) fn unique_id(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    let digits = ["GPU-", "gpu-", "0x", "0X"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    let is_readable = (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = u64::from_str_radix(digits, 16).ok().filter(|&id| is_readable && id != 0 && id != u64::MAX)?;
    Some(format!("GPU-{id:016x}").into())
}

/// Returns amd-smi's own longer UUID unchanged; `None` if masked.
pub(crate) fn long_uuid(text: &str) -> Option<Arc<str>> {
    Some(text.trim()).filter(|text| is_uuid(text)).map(Into::into)
}

/// PCI ids of a device, as a tool printed them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PciModel<'a> {
    pub id: &'a str,
    pub revision: Option<&'a str>,
}

impl PciModel<'_> {
    /// Returns the name of the device, if known.
    fn name(self) -> Option<String> {
        let hex = |text: &str| u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok();
        let revision = self.revision.and_then(hex).and_then(|revision| revision.try_into().ok());
        amd_names::known_name(hex(self.id)?, revision)
    }
}

/// Returns the first of `names` that is readable; else the known name of the model; else the first remaining text.
///
/// Tools print the vendor or the device id instead of an unknown name.
pub(crate) fn best_name<'a>(names: &[&'a str], model: Option<PciModel<'a>>, others: &[&'a str]) -> Option<Arc<str>> {
    let names_vendor = |text: &str| text.starts_with("Advanced Micro Devices");
    let is_readable = |text: &&&str| has_value(text) && !names_vendor(text);
    let bounded = |text: &&str| text.trim().chars().take(limits::TEXT_CHARS).collect::<String>();
    let name = names.iter().filter(is_readable).find(|text| !is_hex(text.trim())).map(bounded);
    let by_id = || model.and_then(PciModel::name);
    let id = model.map(|model| model.id);
    let other = || others.iter().chain(&id).chain(names).find(is_readable).map(bounded);
    name.or_else(by_id).or_else(other).map(Into::into)
}

/// Whether a text has a value.
pub(crate) fn has_value(text: &str) -> bool {
    let lower = text.trim().to_ascii_lowercase();
    let nothing = ["", "n/a", "none", "unknown", "not supported", "unsupported", "-", "<redacted>"];
    !nothing.contains(&lower.as_str()) && !lower.starts_with("n/a ")
}

fn is_hex(text: &str) -> bool {
    text.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns the version of a driver. For a driver that is part of the kernel, tools print the kernel's banner, with or
/// without its spaces; the kernel's version counts then.
pub(crate) fn driver_version(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    if !has_value(text) {
        return None;
    }
    let banner = text.strip_prefix("Linux").map(str::trim_start).and_then(|rest| rest.strip_prefix("version"));
    let version = banner.unwrap_or(text).trim_start();
    let end = version.find(|c: char| c.is_whitespace() || c == '(').unwrap_or(version.len());
    let version: String = version[..end].chars().take(limits::TEXT_CHARS).collect();
    version.contains(|c: char| c.is_ascii_digit()).then(|| version.into())
}

/// Returns a NUMA node, or `None` for −1 in any notation.
pub(crate) fn numa_node(text: &str) -> Option<u32> {
    text.trim().parse::<u32>().ok().filter(|&node| node < 1 << 16)
}

// Links between devices.

/// Link from one device to another as a tool reports it; each field may be missing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReportedLink<'a> {
    pub kind: Option<&'a str>,
    /// Number of hops.
    pub hops: Option<u64>,
    /// AMD's measure of distance.
    pub weight: Option<u64>,
}

impl ReportedLink<'_> {
    /// Returns the kind of the link; `None` for a device and itself, or if the kind is unknown.
    ///
    /// Over PCIe, AMD's library counts two hops for devices on one NUMA node, three for neighbouring nodes, four
    /// otherwise (`rsmi_topo_get_link_type` in github.com/ROCm/rocm_smi_lib, src/rocm_smi.cc). The weight is the sum of
    /// the kernel's (`rsmi_topo_get_link_weight`): 20 from each device to its node, and the distance between the nodes.
    /// Neither reflects switches.
    pub(crate) fn to_link_kind(self) -> Option<LinkKind> {
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

// Facts that follow from all devices together: partitions, dies that share a sensor, health.

/// Partition of a device as a tool reports it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReportedPartition {
    /// Partition number.
    pub id: Option<u16>,
    /// `SPX`, `CPX`, …; `None` also for a device without partition modes.
    pub mode: Option<Arc<str>>,
}

impl ReportedPartition {
    /// Parses the texts of a tool.
    pub(crate) fn new(id: Option<&str>, mode: Option<&str>) -> Self {
        let mode = mode.map(str::trim).filter(|mode| mode.len() == 3 && mode.to_ascii_uppercase().ends_with("PX"));
        Self { id: id.and_then(|id| id.trim().parse().ok()), mode: mode.map(|mode| mode.to_ascii_uppercase().into()) }
    }

    /// Returns the number of partitions in this mode, if it is the same for every device.
    fn part_count(&self) -> Option<u16> {
        match self.mode.as_deref()? {
            "DPX" => Some(2),
            "TPX" => Some(3),
            "QPX" => Some(4),
            // CPX: one partition for each compute die, of which devices have six or eight.
            _ => None,
        }
    }
}

/// Completes each device with facts that follow from the others. `partitions` are in the order of the devices.
pub(crate) fn complete_devices(reading: &mut SourceReading, partitions: &[ReportedPartition]) {
    mark_partitions(&mut reading.devices, partitions);
    resolve_shared_power(reading);
    for device in &mut reading.devices {
        if device.health.is_none() && device.has_answered() {
            device.health = Some(DeviceHealth::Healthy);
        }
    }
}

/// Marks devices with the same PCI address as partitions, and those in a partition mode.
fn mark_partitions(devices: &mut [DetectedDevice], partitions: &[ReportedPartition]) {
    let mut at: BTreeMap<PciAddress, u16> = BTreeMap::new();
    for address in devices.iter().filter_map(|device| device.pci) {
        let count = at.entry(address).or_default();
        *count = count.saturating_add(1);
    }
    let mut seen: BTreeMap<Option<PciAddress>, u16> = BTreeMap::new();
    for (device, partition) in devices.iter_mut().zip(partitions) {
        let shared = device.pci.and_then(|address| at.get(&address)).copied().filter(|&count| count > 1);
        let is_part = partition.mode.as_deref().map_or(partition.id.is_some_and(|id| id > 0), |mode| mode != "SPX");
        let order = seen.entry(device.pci).or_default();
        let turn = *order;
        *order = order.saturating_add(1);
        if shared.is_none() && !is_part {
            continue;
        }
        let parts = partition.part_count().or(shared);
        // Without a PCI address the partitions of several cards follow each other.
        let turn = if device.pci.is_none() { parts.map_or(turn, |parts| turn % parts.max(1)) } else { turn };
        device.partition =
            Some(DevicePartition::Amd { id: partition.id.unwrap_or(turn), mode: partition.mode.clone(), parts });
    }
}

/// Resolves the power of dies that share one id and one sensor (MI250): a second die with 0 W has no value.
///
/// A second die with the same power keeps its value, with a warning.
fn resolve_shared_power(reading: &mut SourceReading) {
    let mut powers: BTreeMap<Arc<str>, Milliwatts> = BTreeMap::new();
    let die = |device: &DetectedDevice| device.uuid.clone().filter(|_| device.partition.is_none());
    for device in &reading.devices {
        if let (Some(uuid), Reported::Value(watts)) = (die(device), &device.power) {
            let most = powers.entry(uuid).or_default();
            *most = (*most).max(*watts);
        }
    }
    let mut repeated: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    for device in &mut reading.devices {
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
        reading.warn(format!("{count} dies of {uuid} report the same power, which may be that of the whole card"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::Vendor;
    use serde_json::json;

    use crate::address::parse_pci_address;

    #[test]
    fn a_value_with_a_unit_equals_its_text() {
        assert_eq!(text_of(&json!({"value": 283, "unit": "MB"})).unwrap(), "283 MB");
        assert_eq!(text_of(&json!({"value": "N/A", "unit": "W"})).unwrap(), "N/A");
        assert_eq!(text_of(&json!({"value": null, "unit": "C"})).unwrap(), "N/A");
        assert_eq!(text_of(&json!("12 W")).unwrap(), "12 W");
        assert_eq!(text_of(&json!({"umc": 1})), None);
    }

    #[test]
    fn every_notation_of_an_id_is_equal() {
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
    fn an_id_is_the_name_only_as_the_last_resort() {
        let best = |names: &[&str], id: Option<&str>, others: &[&str]| {
            let model = id.map(|id| PciModel { id, revision: Some("0xc1") });
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
    fn three_notations_mean_no_numa_node() {
        assert_eq!(["-1", "4294967295", "N/A", "3"].map(numa_node), [None, None, None, Some(3)]);
    }

    fn link(kind: &str, hops: Option<u64>, weight: Option<u64>) -> Option<LinkKind> {
        ReportedLink { kind: Some(kind), hops, weight }.to_link_kind()
    }

    #[test]
    fn a_reported_link_has_its_kind() {
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

    fn parts(devices: Vec<DetectedDevice>, partitions: &[ReportedPartition]) -> Vec<Option<DevicePartition>> {
        let mut reading = SourceReading { devices, ..SourceReading::default() };
        complete_devices(&mut reading, partitions);
        reading.devices.into_iter().map(|device| device.partition).collect()
    }

    #[test]
    fn devices_with_one_address_are_partitions() {
        let partitions: Vec<ReportedPartition> =
            ["0", "1", "0"].iter().map(|id| ReportedPartition::new(Some(id), None)).collect();
        let found = parts(vec![at("0000:01:00.0"), at("0000:01:00.0"), at("0001:01:00.0")], &partitions);
        assert_eq!(found[1], Some(DevicePartition::Amd { id: 1, mode: None, parts: Some(2) }));
        assert_eq!(found[2], None);
    }

    #[test]
    fn an_unpartitioned_mode_is_not_a_partition() {
        for mode in ["SPX", "N/A", "", "spx"] {
            assert_eq!(parts(vec![at("01:00.0")], &[ReportedPartition::new(Some("0"), Some(mode))]), [None], "{mode}");
        }
    }

    #[test]
    fn a_partition_mode_suffices_without_addresses() {
        let partition = ReportedPartition::new(None, Some("DPX"));
        let found = parts(vec![DetectedDevice::new(Vendor::Amd); 4], &vec![partition; 4]);
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
        let mut reading = SourceReading { devices: vec![die(89_000), die(0)], ..SourceReading::default() };
        complete_devices(&mut reading, &[ReportedPartition::default(), ReportedPartition::default()]);
        assert_eq!(reading.devices[0].power, Reported::Value(Milliwatts(89_000)));
        assert!(matches!(reading.devices[1].power, Reported::Unsupported(_)));
        assert!(reading.warnings.is_empty());
        let mut twins = SourceReading { devices: vec![die(89_000), die(89_000)], ..SourceReading::default() };
        complete_devices(&mut twins, &[ReportedPartition::default(), ReportedPartition::default()]);
        assert_eq!((&twins.devices[1].power, twins.warnings.len()), (&Reported::Value(Milliwatts(89_000)), 1));
    }
}
