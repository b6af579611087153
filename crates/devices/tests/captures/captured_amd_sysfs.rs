//! Captured kernel trees of AMD machines and of others, compared with values checked by eye.

use std::collections::BTreeMap;
use std::path::Path;

use gpupool_core::{Bytes, DeviceHealth, LinkKind, Percent, Vendor};
use gpupool_devices::capture::CaptureFormat;
use gpupool_devices::{DetectedDevice, DevicePartition, Milliwatts, Reported, SourceReading};

use crate::capture_fixtures::{own_captures, real_captures};

/// Reading of a captured tree; `None` on a machine without captures.
fn read_capture(place: &str) -> Option<SourceReading> {
    Some(read(&real_captures()?.join(place)))
}

/// Reading of a captured tree of our own.
fn read_own_capture(place: &str) -> SourceReading {
    read(&own_captures().join(place))
}

fn read(root: &Path) -> SourceReading {
    let read = format("sysfs").read_tree(root);
    read.unwrap_or_else(|| panic!("{} is not recognised", root.display())).unwrap()
}

fn format(name: &str) -> CaptureFormat {
    name.parse().unwrap()
}

/// The only device in a tree of one card; `big` and `old` are our own.
fn card(name: &str) -> Option<DetectedDevice> {
    let place = format!("amd/lact-sysfs/{name}");
    let mut reading = if ["big", "old"].contains(&name) { read_own_capture(&place) } else { read_capture(&place)? };
    assert_eq!(reading.devices.len(), 1, "{name}");
    reading.devices.pop()
}

/// Name, address, busy %, °C, mW drawn and mW allowed of a card.
type ExpectedCard = (&'static str, &'static str, &'static str, Option<u32>, i16, Option<u64>, Option<u64>);

#[test]
fn every_card_of_the_collection_reads_as_it_was_saved() {
    let rows: [ExpectedCard; 12] = [
        ("big", "AMD Radeon RX 6900 XT", "0000:0c:00.0", Some(3), 56, Some(36_000), Some(289_000)),
        ("hd7870", "AMD Radeon HD 7870", "0000:01:00.0", None, 27, None, None),
        ("phoenix", "AMD Radeon 780M", "0000:64:00.0", Some(0), 25, Some(3_103), None),
        ("r7-240", "AMD Radeon R7 240", "0000:01:00.0", None, 52, None, None),
        ("rx5500xt", "AMD Radeon RX 5300 / 5500 / 5500 XT", "0000:04:00.0", Some(0), 48, Some(16_000), Some(130_000)),
        ("rx580", "AMD Radeon RX 580", "0000:09:00.0", Some(11), 44, Some(41_045), Some(155_000)),
        ("rx6600xt", "AMD Radeon RX 6600 / 6600 XT / 6600M", "0000:0b:00.0", Some(0), 35, Some(3_000), Some(100_000)),
        ("rx6900xt", "AMD Radeon RX 6900 XT", "0000:0c:00.0", Some(3), 56, Some(36_000), Some(289_000)),
        (
            "rx7600s",
            "AMD Radeon RX 7600 / 7600 XT / 7600S / 7700S",
            "0000:03:00.0",
            Some(0),
            53,
            Some(1_000),
            Some(95_000),
        ),
        ("rx7800xt", "AMD Radeon RX 7700 XT / 7800 XT", "0000:03:00.0", Some(2), 24, Some(32_000), Some(236_000)),
        ("rx9070", "AMD Radeon RX 9070 / 9070 XT", "0000:03:00.0", Some(25), 48, Some(49_000), Some(200_000)),
        ("vega56", "AMD Radeon RX Vega 56", "0000:0b:00.0", Some(0), 38, Some(8_000), Some(260_000)),
    ];
    for (folder, name, address, busy, celsius, power, limit) in rows {
        let Some(card) = card(folder) else { return };
        assert_eq!(card.name.as_deref(), Some(name), "{folder}");
        assert_eq!(card.pci.unwrap().to_string(), address, "{folder}");
        assert_eq!(card.utilization.value().copied(), busy.map(|busy| Percent(busy * 1000)), "{folder}");
        assert_eq!(card.temperature_c, Reported::Value(celsius), "{folder}");
        assert_eq!(card.power.value().copied(), power.map(Milliwatts), "{folder}");
        assert_eq!(card.power_limit.value().copied(), limit.map(Milliwatts), "{folder}");
        assert_eq!(
            (card.vendor, card.health, card.asleep),
            (Vendor::Amd, Some(DeviceHealth::Healthy), false),
            "{folder}"
        );
        assert_eq!((card.numa, card.partition), (None, None), "{folder}");
    }
}

#[test]
fn memory_is_in_bytes_and_absent_where_it_was_not_saved() {
    let of = |total, used, host_total, host_used| Some([total, used, host_total, host_used].map(Bytes));
    let rows = [
        ("big", of(17_163_091_968, 668_274_688, 16_786_171_904, 62_369_792)),
        ("old", None),
        ("r7-240", of(2_147_483_648, 495_321_088, 4_069_261_312, 116_916_224)),
        ("rx580", of(4_294_967_296, 536_870_912, 8_342_712_320, 92_377_088)),
        ("rx6900xt", of(17_163_091_968, 668_274_688, 16_786_171_904, 62_369_792)),
        ("vega56", of(8_573_157_376, 16_613_376, 8_342_863_872, 12_337_152)),
        // An APU: the memory reserved for it, and the memory of the host.
        ("phoenix", of(4_294_967_296, 1_272_893_440, 31_433_977_856, 211_398_656)),
        ("rx5500xt", None),
        ("rx9070", None),
    ];
    for (folder, expected) in rows {
        let Some(card) = card(folder) else { return };
        let memory = card.memory;
        let reported = [memory.total, memory.used, memory.host_total, memory.host_used];
        match expected {
            Some(expected) => assert_eq!(reported, expected.map(Reported::Value), "{folder}"),
            None => assert!(reported.iter().all(Reported::is_absent), "{folder}"),
        }
        assert!(!memory.unified);
    }
}

#[test]
fn identities_come_from_padded_files_and_not_from_empty_ones() {
    assert_eq!(card("big").unwrap().uuid.as_deref(), Some("GPU-946d7e1ef9b172dd"));
    assert_eq!(card("old").unwrap().uuid, None);
    let Some(padded) = card("rx6900xt") else { return };
    assert_eq!(padded.uuid.as_deref(), Some("GPU-946d7e1ef9b172dd"));
    let empty = card("phoenix").unwrap();
    assert_eq!(empty.uuid, None);
    // The compute topology beside the card has its render node.
    assert_eq!((empty.index, empty.minor), (Some(0), Some(128)));
}

#[test]
fn the_legacy_driver_is_named_in_a_warning() {
    for reading in
        [Some(read_own_capture("amd/lact-sysfs/old")), read_capture("amd/lact-sysfs/hd7870")].into_iter().flatten()
    {
        assert_eq!(reading.devices[0].driver.as_deref(), Some("radeon"));
        assert!(reading.warnings.iter().any(|warning| warning.contains("radeon, the legacy driver")));
    }
}

#[test]
fn a_whole_tree_has_one_card_of_amd_and_no_connector() {
    let own = read_own_capture("amd/procfs-drm");
    assert_eq!((own.devices.len(), own.devices[0].uuid.as_deref()), (1, Some("GPU-0123456789abcdef")));
    assert_eq!(own.warnings, ["Intel GPUs are not supported yet: 0000:00:02.0 (i915, 8086:5917)"]);
    let Some(reading) = read_capture("amd/procfs-drm") else { return };
    let [card] = reading.devices.as_slice() else { panic!("{reading:?}") };
    assert_eq!(card.uuid.as_deref(), Some("GPU-0123456789abcdef"));
    assert_eq!(card.utilization, Reported::Value(Percent(4_000)));
    assert_eq!(card.memory.used, Reported::Value(Bytes(1_490_378_752)));
    assert!(card.temperature_c.is_absent());
    assert_eq!(reading.warnings, ["Intel GPUs are not supported yet: 0000:00:02.0 (i915, 8086:5917)"]);
}

#[test]
fn cards_of_other_makers_are_listed_or_warned_of() {
    let intel = read_own_capture("amd/procfs-drm");
    assert!(intel.warnings[0].starts_with("Intel GPUs are not supported yet: ") && intel.warnings[0].contains("5917"));
    let Some(nvidia) = read_capture("nvidia/lact-sysfs/rtx4080") else { return };
    let card = &nvidia.devices[0];
    assert_eq!((card.vendor, card.driver.as_deref()), (Vendor::Nvidia, Some("nvidia")));
    assert_eq!((card.pci.unwrap().to_string().as_str(), &card.health), ("0000:09:00.0", &None));
    for (folder, id) in [("a380-i915", "56a5"), ("a380-xe", "56a5"), ("b580", "e20b"), ("tigerlake", "9a49")] {
        let reading = read_capture(&format!("intel/lact-sysfs/{folder}")).unwrap();
        assert!(reading.devices.is_empty(), "{folder}");
        let [warning] = reading.warnings.as_slice() else { panic!("{reading:?}") };
        assert!(warning.starts_with("Intel GPUs are not supported yet: ") && warning.contains(id), "{warning}");
    }
}

#[test]
fn two_nodes_at_one_place_with_identities_of_their_own_are_two_devices() {
    let Some(reading) = read_capture("amd/k8s-device-plugin-kfd/topology-parsing") else { return };
    let [one, other] = reading.devices.as_slice() else { panic!("{reading:?}") };
    assert_eq!(one.pci, other.pci);
    assert_eq!((one.partition.as_ref(), other.partition.as_ref()), (None, None));
    assert_eq!((one.minor, other.minor), (Some(128), Some(129)));
    assert_eq!(one.name.as_deref(), Some("AMD Radeon Instinct MI25"));
    assert_eq!(one.uuid.as_deref(), Some("GPU-c34ec50444dd0a6c"));
    assert_eq!(one.memory.total, Reported::Value(Bytes(17_163_091_968)));
    assert_eq!(reading.identities().len(), 2);
}

#[test]
fn two_hives_are_joined_by_the_host_only() {
    let Some(reading) = read_capture("amd/k8s-device-plugin-kfd/topo-mi210-xgmi-pcie") else { return };
    assert_eq!(reading.devices.len(), 8);
    assert!(reading.devices.iter().all(|device| device.name.as_deref() == Some("AMD Instinct MI210")));
    assert!(reading.devices.iter().all(|device| device.memory.total.is_absent() && device.health.is_none()));
    let numa: Vec<Option<u32>> = reading.devices.iter().map(|device| device.numa).collect();
    assert_eq!(numa, [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    for link in &reading.links {
        let together = (link.a < 4) == (link.b < 4);
        let expected = if together { LinkKind::Xgmi(1) } else { LinkKind::CrossNuma };
        assert_eq!(link.kind, expected, "{link:?}");
    }
    assert_eq!(reading.links.len(), 28);
}

#[test]
fn eight_cards_in_four_parts_each_are_thirty_two_devices() {
    let own = read_own_capture("amd/k8s-device-plugin-kfd/cpx");
    let partitions: Vec<_> = own.devices.iter().map(|device| (device.pci, device.partition.clone())).collect();
    let part = |id| Some(DevicePartition::Amd { id, mode: Some("CPX".into()), parts: Some(2) });
    assert_eq!(partitions, [(own.devices[0].pci, part(0)), (own.devices[0].pci, part(1))]);
    assert_eq!(own.links.iter().map(|link| link.kind).collect::<Vec<_>>(), [LinkKind::Xgmi(1)]);
    let Some(reading) = read_capture("amd/k8s-device-plugin-kfd/topology-parsing-mi308") else { return };
    assert_eq!(reading.devices.len(), 32);
    let mut parts: BTreeMap<String, Vec<u16>> = BTreeMap::new();
    for device in &reading.devices {
        let address = device.pci.unwrap();
        assert_eq!(address.function, 0);
        let Some(DevicePartition::Amd { id, mode, parts: count }) = &device.partition else { panic!("{device:?}") };
        assert_eq!((mode.as_deref(), *count), (Some("CPX"), Some(4)));
        parts.entry(address.to_string()).or_default().push(*id);
        assert_eq!(device.name.as_deref(), Some("AMD Instinct MI308X"));
    }
    assert_eq!(parts.len(), 8);
    assert!(parts.values().all(|ids| *ids == [0, 1, 2, 3]), "{parts:?}");
    let minors: Vec<u32> = reading.devices.iter().filter_map(|device| device.minor).take(6).collect();
    assert_eq!(minors, [128, 129, 130, 131, 136, 137]);
    assert_eq!(reading.devices[0].memory.total, Reported::Value(Bytes(51_539_607_552)));
    assert_eq!(reading.devices[31].memory.total, Reported::Value(Bytes(51_522_830_336)));
    assert_eq!(reading.devices[31].pci.unwrap().to_string(), "0001:c9:00.0");

    let identities: std::collections::BTreeSet<_> = reading.identities().into_iter().collect();
    assert_eq!(identities.len(), 32);
    // Partitions of one card are nearer than those of two.
    let kind = |a, b| reading.links.iter().find(|link| (link.a, link.b) == (a, b)).unwrap().kind;
    assert_eq!((kind(0, 1), kind(0, 4)), (LinkKind::Xgmi(1), LinkKind::Xgmi(3)));
    assert_eq!(reading.links.len(), 32 * 31 / 2);
}

#[test]
fn fdinfo_has_the_card_and_its_memory() {
    let own = std::fs::read_to_string(own_captures().join("amd/open.fdinfo")).unwrap();
    let fdinfo = format("fdinfo");
    assert!(fdinfo.matches(&own));
    let read = |text: &str| fdinfo.parse(text).unwrap().unwrap();
    assert_eq!(read(&own).warnings, ["0000:c5:00.0: client 196 uses 1024 MiB of device memory"]);
    let Some(folder) = real_captures() else { return };
    let text = std::fs::read_to_string(folder.join("amd/xrocmtop/fdinfo/llama_server.fdinfo")).unwrap();
    assert!(fdinfo.matches(&text));
    let reading = read(&text);
    assert_eq!(reading.devices[0].pci.unwrap().to_string(), "0000:c5:00.0");
    assert_eq!(reading.warnings, ["0000:c5:00.0: client 196416 uses 29269 MiB of device memory"]);
}

#[test]
fn a_part_of_a_tree_and_a_tree_of_one_card_are_recognised() {
    for place in ["amd/lact-sysfs/big/card0", "amd/lact-sysfs/big/card0/device", "amd/procfs-drm/sys"] {
        assert_eq!(read(&own_captures().join(place)).devices.len(), 1, "{place}");
    }
    assert!(format("sysfs").read_tree(&own_captures().join("nvidia")).is_none());
    let Some(folder) = real_captures() else { return };
    for place in ["amd/lact-sysfs/phoenix/card1", "amd/lact-sysfs/vega56/card0/device", "amd/procfs-drm/sys"] {
        assert_eq!(read(&folder.join(place)).devices.len(), 1, "{place}");
    }
    let both = read(&folder.join("amd/lact-sysfs/phoenix/kfd"));
    assert_eq!(both.devices[0].memory.host_total, Reported::Value(Bytes(31_433_977_856)));
    for place in ["amd/lact-sysfs", "amd/telegraf", "slurm"] {
        assert!(format("sysfs").read_tree(&folder.join(place)).is_none(), "{place}");
    }
}
