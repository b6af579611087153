//! What AMD's tools printed on real machines, read back: values checked by eye against the captures.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod amd_tools_forms;
mod common;

use gpupool_core::device::{Health, LinkKind};
use gpupool_core::units::{Bytes, Percent};
use gpupool_devices::{Found, Partition, Snapshot, Told, Watts};

use amd_tools_forms::{FORMS, Form};

/// What a capture says, read by the one parser that knows it; `None` where there are no captures.
fn read(file: &str, form: &str) -> Option<Snapshot> {
    let text = std::fs::read_to_string(common::captures(file)?.join("amd").join(file)).unwrap();
    let known: Vec<&Form> = FORMS.iter().filter(|(_, looks_like, _)| looks_like(&text)).collect();
    assert_eq!(known.iter().map(|known| known.0).collect::<Vec<_>>(), [form], "{file}");
    Some(known[0].2(&text).unwrap())
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.devices.iter().map(|device| device.name.as_deref().unwrap_or("")).collect()
}

fn pci(device: &Found) -> String {
    device.pci.map(|address| address.to_string()).unwrap_or_default()
}

fn kinds(snapshot: &Snapshot) -> Vec<LinkKind> {
    let mut kinds: Vec<LinkKind> = snapshot.links.iter().map(|link| link.kind).collect();
    kinds.dedup();
    kinds
}

#[test]
fn six_mi100_are_read_with_their_topology() {
    let Some(snapshot) = read("telegraf/mi100_rocm571.json", "rocm-smi JSON") else { return };
    assert_eq!(names(&snapshot), ["Arcturus GL-XL [Instinct MI100]"; 6]);
    let first = &snapshot.devices[0];
    assert_eq!((pci(first).as_str(), &first.uuid, first.driver.as_deref()), ("0000:1e:00.0", &None, Some("6.2.4")));
    assert_eq!(first.memory.total, Told::Value(Bytes(34_342_961_152)));
    assert_eq!(first.memory.used, Told::Value(Bytes(6_782_976)));
    assert_eq!(first.memory.host_total, Told::Value(Bytes(135_048_462_336)));
    assert_eq!(first.power, Told::Value(Watts(39_000)));
    assert_eq!(first.power_limit, Told::Value(Watts(290_000)));
    assert_eq!(first.temperature_c, Told::Value(31));
    assert_eq!((snapshot.links.len(), kinds(&snapshot)), (15, vec![LinkKind::SameNuma]));
    // One process is listed, and not where it runs.
    assert!(snapshot.devices.iter().all(|device| matches!(device.processes, Told::Unsupported(_))));
    assert!(snapshot.warnings[0].contains("104225"));
}

#[test]
fn one_card_has_a_name_in_three_versions_of_rocm_smi() {
    for (version, name) in [
        ("430", "AMD Radeon RX 6700 / 6700 XT / 6750 XT / 6800M"),
        ("571", "Navi 22 [Radeon RX 6700/6700 XT / 6800M]"),
        ("612", "Navi 22 [Radeon RX 6700/6700 XT / 6800M]"),
    ] {
        let file = format!("telegraf/rx6700xt_rocm{version}.json");
        let Some(snapshot) = read(&file, "rocm-smi JSON") else { return };
        assert_eq!(names(&snapshot), [name]);
        let card = &snapshot.devices[0];
        assert_eq!(card.memory.total, Told::Value(Bytes(12_868_124_672)));
        assert_eq!((card.power.clone(), card.temperature_c.clone()), (Told::Value(Watts(6000)), Told::Value(45)));
        assert_eq!(card.power_limit, Told::Value(Watts(211_000)));
    }
}

#[test]
fn a_card_without_a_series_is_named_by_what_there_is() {
    let Some(snapshot) = read("telegraf/vega-10-XT.json", "rocm-smi JSON") else { return };
    assert_eq!(names(&snapshot), ["AMD Radeon Pro WX 9100"]);
    assert_eq!(snapshot.devices[0].uuid.as_deref(), Some("GPU-02150e7d042a1124"));
    assert_eq!(snapshot.devices[0].memory.total, Told::Value(Bytes(17_163_091_968)));
    assert_eq!(snapshot.devices[0].power, Told::Value(Watts(15_000)));
}

#[test]
fn both_dies_of_an_mi250_stay_devices() {
    let Some(snapshot) = read("wandb/rocm-smi-mi250-1.json", "rocm-smi JSON") else { return };
    assert_eq!(names(&snapshot), ["AMD INSTINCT MI250 (MCM) OAM AC MBA"; 2]);
    assert!(snapshot.devices.iter().all(|die| die.uuid.as_deref() == Some("GPU-719d230578348e8c")));
    let busy: Vec<_> = snapshot.devices.iter().map(|die| die.utilization.clone()).collect();
    assert_eq!(busy, [Told::Value(Percent(10_000)), Told::Value(Percent(20_000))]);
    assert_eq!(snapshot.devices[0].power_limit, Told::Value(Watts(560_000)));
    // Only the temperature of the memory is there.
    assert_eq!(snapshot.devices[0].temperature_c, Told::ABSENT);
    let distinct: std::collections::BTreeSet<_> = snapshot.identities().into_iter().collect();
    assert_eq!(distinct.len(), 2);
}

#[test]
fn a_wrong_model_does_not_become_the_name() {
    let Some(snapshot) = read("hyperqueue/lumi-mi250x-rocm-smi.json", "rocm-smi JSON") else { return };
    assert_eq!(names(&snapshot), ["AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"; 2]);
    assert_eq!(snapshot.devices.iter().map(pci).collect::<Vec<_>>(), ["0000:c1:00.0", "0000:c6:00.0"]);
    assert_eq!(snapshot.devices[0].utilization, Told::Value(Percent(5200)));
    assert_eq!(snapshot.devices[0].power, Told::ABSENT);
    assert_eq!(snapshot.devices[0].memory.total, Told::ABSENT);
}

#[test]
fn four_mi300x_are_the_same_in_three_tools() {
    let Some(all) = read("thamada-gls/MI300X_x4_smi.a.txt", "rocm-smi text") else { return };
    let Some(concise) = read("thamada-gls/MI300X_x4_smi.txt", "rocm-smi text") else { return };
    let Some(runtime) = read("thamada-gls/MI300X_x4_rocminfo.txt", "rocminfo") else { return };
    assert_eq!(names(&all), ["AMD Instinct MI300X OAM"; 4]);
    assert_eq!(names(&concise), ["AMD Instinct MI300X"; 4]);
    for (one, other) in all.devices.iter().zip(&runtime.devices) {
        assert_eq!((&one.uuid, one.pci), (&other.uuid, other.pci));
        assert_eq!(other.memory.total, Told::Value(Bytes(201_310_208 << 10)));
        assert_eq!((one.partition.clone(), other.health.clone()), (None, None));
        assert_eq!(one.driver.as_deref(), Some("6.7.0"));
    }
    assert_eq!(pci(&runtime.devices[3]), "0000:85:00.0");
    let powers: Vec<_> = concise.devices.iter().map(|device| device.power.clone()).collect();
    assert_eq!(powers, [133_000, 131_000, 131_000, 137_000].map(|watts| Told::Value(Watts(watts))));
    assert_eq!(all.devices[1].power, Told::Value(Watts(130_000)));
    assert_eq!(all.devices[3].temperature_c, Told::Value(39));
    assert_eq!(concise.devices[0].power_limit, Told::Value(Watts(750_000)));
    assert_eq!(concise.devices[0].memory.total, Told::ABSENT);
    assert!(all.devices.iter().all(|device| matches!(device.processes, Told::Unsupported(_))));
}

#[test]
fn twelve_partitions_sit_at_four_places() {
    let Some(snapshot) = read("rocm_smi_lib-docs/L197-rocm-smi-showhw.txt", "rocm-smi text") else { return };
    assert_eq!(snapshot.devices.len(), 12);
    assert_eq!(snapshot.devices[5].partition, Some(Partition::Amd { id: 2, mode: None, parts: Some(3) }));
    assert_eq!(pci(&snapshot.devices[5]), "0001:01:00.0");
    let distinct: std::collections::BTreeSet<_> = snapshot.identities().into_iter().collect();
    assert_eq!(distinct.len(), 12);
    assert!(snapshot.devices.iter().all(|device| device.health.is_none()));
}

#[test]
fn the_layouts_of_the_concise_table_are_read() {
    let Some(two) = read("rocm_smi_lib-docs/L183-rocm-smi.txt", "rocm-smi text") else { return };
    assert_eq!(names(&two), ["AMD Radeon RX 6800 / 6800 XT / 6900 XT", "AMD Radeon Pro W6800"]);
    let powers: Vec<_> = two.devices.iter().map(|device| (device.power.clone(), device.power_limit.clone())).collect();
    let watts = |watts| Told::Value(Watts(watts));
    assert_eq!(powers, [(watts(6000), watts(150_000)), (watts(8000), watts(213_000))]);
    let Some(one) = read("rocm_smi_lib-docs/L356-rocm-smi.txt", "rocm-smi text") else { return };
    assert_eq!(names(&one), ["Aqua Vanjaram [Insti"]);
    assert_eq!((one.devices[0].temperature_c.clone(), one.devices[0].power.clone()), (Told::Value(40), watts(102_000)));
    let Some(ids) = read("rocm_smi_lib-docs/L252-rocm-smi-i.txt", "rocm-smi text") else { return };
    assert_eq!(names(&ids), ["Aqua Vanjaram [Instinct MI300A]"; 4]);
}

#[test]
fn static_text_of_four_mi300a_leaves_the_cpus_out() {
    let Some(snapshot) = read("amdsmi-docs/L693-amd-smi-static.txt", "amd-smi text") else { return };
    assert_eq!(names(&snapshot), ["MI300A"; 4]);
    let last = &snapshot.devices[3];
    assert_eq!((pci(last).as_str(), last.numa), ("0003:01:00.0", Some(3)));
    assert_eq!(last.uuid.as_deref(), Some("GPU-f4c44c2be5e66537"));
    assert_eq!(last.driver.as_deref(), Some("6.9.0-rc5+"));
    assert_eq!(last.memory.total, Told::Value(Bytes(64_289 << 20)));
    assert_eq!(last.power_limit, Told::Value(Watts(550_000)));
    assert_eq!((last.partition.clone(), last.health.clone()), (None, None));
}

#[test]
fn static_json_of_an_mi210_holds_a_kernel_banner() {
    let Some(snapshot) = read("device-metrics-exporter/mi210-amd-smi-static.json", "amd-smi JSON") else { return };
    let gpu = &snapshot.devices[0];
    assert_eq!(gpu.name.as_deref(), Some("AMD Instinct MI210"));
    assert_eq!(gpu.driver.as_deref(), Some("6.14.0-24-generic"));
    assert_eq!((gpu.uuid.clone(), gpu.pci, gpu.numa), (None, None, Some(1)));
    assert_eq!(gpu.memory.total, Told::Value(Bytes(65_520 << 20)));
    assert_eq!(gpu.power_limit, Told::Value(Watts(300_000)));
}

#[test]
fn a_monitor_of_32_partitions_is_read_by_its_columns() {
    let Some(snapshot) = read("amdsmi-docs/L610-amd-smi-monitor-p-t-v.txt", "amd-smi text") else { return };
    assert_eq!(snapshot.devices.len(), 32);
    let last = &snapshot.devices[31];
    assert_eq!((last.index, last.power.clone()), (Some(31), Told::Value(Watts(227_000))));
    assert_eq!(last.temperature_c, Told::Value(51));
    assert_eq!(last.memory.used, Told::Value(Bytes(283 << 20)));
    assert_eq!(last.memory.total, Told::Value(Bytes(196_300 << 20)));
    assert_eq!(last.health, Some(Health::Healthy));
}

#[test]
fn the_shapes_of_topology_give_links() {
    for (file, parser, devices, links, kind) in [
        ("L1189-amd-smi-topology-json.txt", "amd-smi JSON", 2, 1, LinkKind::SameNuma),
        ("L1275-amd-smi-topology-a-t-json.txt", "amd-smi JSON", 2, 1, LinkKind::CrossNuma),
        ("L1668-amd-smi-topology.txt", "amd-smi text", 8, 28, LinkKind::Xgmi(1)),
        ("L1598-amd-smi-xgmi.txt", "amd-smi text", 8, 28, LinkKind::Xgmi(1)),
    ] {
        let Some(snapshot) = read(&format!("amdsmi-docs/{file}"), parser) else { return };
        assert_eq!((snapshot.devices.len(), snapshot.links.len()), (devices, links), "{file}");
        assert_eq!(kinds(&snapshot), [kind], "{file}");
    }
    let Some(other) = read("amdsmi-docs/L366-amd-smi-topology-cndz.txt", "amd-smi text") else { return };
    assert_eq!((other.devices.len(), other.links.len()), (8, 0));
}

#[test]
fn parts_of_the_metrics_are_read_alone() {
    let Some(power) = read("amdsmi-docs/L1014-amd-smi-metric-power.txt", "amd-smi text") else { return };
    let powers: Vec<_> = power.devices.iter().map(|device| device.power.clone()).collect();
    assert_eq!(powers, [Told::Value(Watts(11_000)), Told::Value(Watts(17_000))]);
    let Some(json) = read("amdsmi-docs/L1634-amd-smi-metric-p-json.txt", "amd-smi JSON") else { return };
    assert_eq!(json.devices[0].power, Told::Value(Watts(10_000)));
    assert!(json.warnings.is_empty());
    let Some(list) = read("amdsmi-docs/L436-amd-smi-list.txt", "amd-smi text") else { return };
    assert_eq!(list.devices.iter().map(pci).collect::<Vec<_>>(), ["0000:23:00.0", "0000:26:00.0"]);
    assert!(list.devices.iter().all(|device| device.uuid.is_none() && device.partition.is_none()));
    let Some(asic) = read("amdsmi-docs/L456-amd-smi-static-asic.txt", "amd-smi text") else { return };
    assert_eq!((names(&asic), asic.devices[0].uuid.clone()), (vec!["MI308X"], None));
    let Some(ecc) = read("amdsmi-docs/L971-amd-smi-metric-ecc-block.txt", "amd-smi text") else { return };
    assert_eq!((ecc.devices.len(), ecc.warnings.len()), (1, 0));
    let Some(throttle) = read("amdsmi-docs/L33-amd-smi-metric-throttle.txt", "amd-smi text") else { return };
    assert_eq!(throttle.devices.len(), 2);
}

#[test]
fn amdgpu_top_lists_an_apu_and_a_card_asleep() {
    let Some(snapshot) = read("amdgpu_top/sample.json", "amdgpu_top") else { return };
    assert_eq!(names(&snapshot), ["AMD Radeon Graphics", "AMD Radeon RX 9060 XT"]);
    let apu = &snapshot.devices[0];
    assert_eq!((pci(apu).as_str(), apu.minor), ("0000:13:00.0", Some(129)));
    assert_eq!(apu.memory.total, Told::Value(Bytes(512 << 20)));
    assert_eq!(apu.memory.used, Told::Value(Bytes(460 << 20)));
    assert_eq!(apu.memory.host_total, Told::Value(Bytes(16_360_796_160)));
    assert_eq!((apu.power.clone(), apu.temperature_c.clone()), (Told::Value(Watts(27_000)), Told::Value(43)));
    let processes = apu.processes.value().unwrap();
    let shell = processes.iter().find(|process| process.name.as_deref() == Some("Xwayland")).unwrap();
    assert_eq!((shell.pid, shell.memory.clone()), (2892, Told::Value(Bytes(18 << 20))));
    let asleep = &snapshot.devices[1];
    assert!(asleep.asleep && asleep.health.is_none());
    assert_eq!((pci(asleep).as_str(), asleep.minor), ("0000:03:00.0", Some(128)));
}

#[test]
fn versions_of_firmware_are_no_devices() {
    let Some(snapshot) = read("k8s-device-plugin-kfd/debugfs-parsing/amdgpu_firmware_info", "firmware") else { return };
    assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (0, 1));
}

#[test]
fn a_capture_cut_off_anywhere_keeps_the_devices_before_the_cut() {
    let Some(captures) = common::captures("cut off captures") else { return };
    for file in
        ["telegraf/mi100_rocm571.json", "thamada-gls/MI300X_x4_smi.a.txt", "amdsmi-docs/L693-amd-smi-static.txt"]
    {
        let text = std::fs::read_to_string(captures.join("amd").join(file)).unwrap();
        let parse = FORMS.iter().find(|(_, looks_like, _)| looks_like(&text)).unwrap().2;
        let whole = parse(&text).unwrap().devices.len();
        let mut before = 0;
        for end in (0..text.len()).step_by(211).filter(|&end| text.is_char_boundary(end)) {
            let devices = parse(&text[..end]).map_or(0, |snapshot| snapshot.devices.len());
            assert!((before..=whole).contains(&devices), "{file} cut at {end}: {devices} after {before}");
            before = devices;
        }
        assert!(before > 0, "{file}");
    }
}
