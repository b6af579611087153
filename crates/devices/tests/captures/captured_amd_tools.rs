//! Captured output of AMD's tools on real machines, compared with values checked by eye.

use gpupool_core::{Bytes, LinkKind, Percent};
use gpupool_devices::capture::CaptureFormat;
use gpupool_devices::{DetectedDevice, Milliwatts, Reported, SourceReading};

use crate::capture_fixtures::{capture_roots, own_captures, real_captures};

/// Reading of a capture by the only format that matches; `None` if the capture is absent. Files in `own` are ours.
fn read(file: &str, format: &str) -> Option<SourceReading> {
    let path = match file.strip_prefix("own/") {
        Some(file) => own_captures().join("amd").join(file),
        None => real_captures()?.join("amd").join(file),
    };
    let text = std::fs::read_to_string(path).unwrap();
    let known: Vec<CaptureFormat> = CaptureFormat::all().filter(|format| format.matches(&text)).collect();
    assert_eq!(known.iter().map(|known| known.name()).collect::<Vec<_>>(), [format], "{file}");
    Some(known[0].parse(&text).unwrap().unwrap())
}

fn names(reading: &SourceReading) -> Vec<&str> {
    reading.devices.iter().map(|device| device.name.as_deref().unwrap_or("")).collect()
}

fn pci(device: &DetectedDevice) -> String {
    device.pci.map(|address| address.to_string()).unwrap_or_default()
}

fn kinds(reading: &SourceReading) -> Vec<LinkKind> {
    let mut kinds: Vec<LinkKind> = reading.links.iter().map(|link| link.kind).collect();
    kinds.dedup();
    kinds
}

#[test]
fn six_mi100_are_read_with_their_topology() {
    let own = read("own/mi100.json", "rocm-smi-json").unwrap();
    assert_eq!((names(&own), kinds(&own)), (vec!["Sample MI100"; 2], vec![LinkKind::SameNuma]));
    assert_mi100(&own.devices[0]);
    let Some(reading) = read("telegraf/mi100_rocm571.json", "rocm-smi-json") else { return };
    assert_eq!(names(&reading), ["Arcturus GL-XL [Instinct MI100]"; 6]);
    assert_mi100(&reading.devices[0]);
    assert_eq!((reading.links.len(), kinds(&reading)), (15, vec![LinkKind::SameNuma]));
    for reading in [own, reading] {
        // One process is listed, without its device.
        assert!(reading.devices.iter().all(|device| matches!(device.processes, Reported::Unsupported(_))));
        assert!(reading.warnings[0].contains("104225"));
    }
}

fn assert_mi100(first: &DetectedDevice) {
    assert_eq!((pci(first).as_str(), &first.uuid, first.driver.as_deref()), ("0000:1e:00.0", &None, Some("6.2.4")));
    assert_eq!(first.memory.total, Reported::Value(Bytes(34_342_961_152)));
    assert_eq!(first.memory.used, Reported::Value(Bytes(6_782_976)));
    assert_eq!(first.memory.host_total, Reported::Value(Bytes(135_048_462_336)));
    assert_eq!(first.power, Reported::Value(Milliwatts(39_000)));
    assert_eq!(first.power_limit, Reported::Value(Milliwatts(290_000)));
    assert_eq!(first.temperature_c, Reported::Value(31));
}

#[test]
fn one_card_has_a_name_in_three_versions_of_rocm_smi() {
    for (version, name) in [
        ("430", "AMD Radeon RX 6700 / 6700 XT / 6750 XT / 6800M"),
        ("571", "Navi 22 [Radeon RX 6700/6700 XT / 6800M]"),
        ("612", "Navi 22 [Radeon RX 6700/6700 XT / 6800M]"),
    ] {
        let file = format!("telegraf/rx6700xt_rocm{version}.json");
        let Some(reading) = read(&file, "rocm-smi-json") else { return };
        assert_eq!(names(&reading), [name]);
        let card = &reading.devices[0];
        assert_eq!(card.memory.total, Reported::Value(Bytes(12_868_124_672)));
        assert_eq!(
            (card.power.clone(), card.temperature_c.clone()),
            (Reported::Value(Milliwatts(6000)), Reported::Value(45))
        );
        assert_eq!(card.power_limit, Reported::Value(Milliwatts(211_000)));
    }
}

#[test]
fn a_card_without_a_series_is_named_by_what_there_is() {
    for file in ["own/nameless.json", "telegraf/vega-10-XT.json"] {
        let Some(reading) = read(file, "rocm-smi-json") else { return };
        assert_eq!(names(&reading), ["AMD Radeon Pro WX 9100"]);
        assert_eq!(reading.devices[0].uuid.as_deref(), Some("GPU-02150e7d042a1124"));
        assert_eq!(reading.devices[0].memory.total, Reported::Value(Bytes(17_163_091_968)));
        assert_eq!(reading.devices[0].power, Reported::Value(Milliwatts(15_000)));
    }
}

#[test]
fn both_dies_of_an_mi250_stay_devices() {
    for (file, name) in
        [("own/mi250.json", "Sample MI250"), ("wandb/rocm-smi-mi250-1.json", "AMD INSTINCT MI250 (MCM) OAM AC MBA")]
    {
        let Some(reading) = read(file, "rocm-smi-json") else { return };
        assert_eq!(names(&reading), [name; 2]);
        assert!(reading.devices.iter().all(|die| die.uuid.as_deref() == Some("GPU-719d230578348e8c")));
        let busy: Vec<_> = reading.devices.iter().map(|die| die.utilization.clone()).collect();
        assert_eq!(busy, [Reported::Value(Percent(10_000)), Reported::Value(Percent(20_000))]);
        assert_eq!(reading.devices[0].power_limit, Reported::Value(Milliwatts(560_000)));
        // Only the temperature of the memory is there.
        assert_eq!(reading.devices[0].temperature_c, Reported::ABSENT);
        let distinct: std::collections::BTreeSet<_> = reading.identities().into_iter().collect();
        assert_eq!(distinct.len(), 2);
    }
}

#[test]
fn a_wrong_model_does_not_become_the_name() {
    let own = read("own/mi250.json", "rocm-smi-json").unwrap();
    assert!(names(&own).iter().all(|name| !name.contains("0x")));
    let Some(reading) = read("hyperqueue/lumi-mi250x-rocm-smi.json", "rocm-smi-json") else { return };
    assert_eq!(names(&reading), ["AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"; 2]);
    assert_eq!(reading.devices.iter().map(pci).collect::<Vec<_>>(), ["0000:c1:00.0", "0000:c6:00.0"]);
    assert_eq!(reading.devices[0].utilization, Reported::Value(Percent(5200)));
    assert_eq!(reading.devices[0].power, Reported::ABSENT);
    assert_eq!(reading.devices[0].memory.total, Reported::ABSENT);
}

#[test]
fn static_json_of_an_mi210_holds_a_kernel_banner() {
    for (file, name) in [
        ("own/static.json", "Sample MI210"),
        ("device-metrics-exporter/mi210-amd-smi-static.json", "AMD Instinct MI210"),
    ] {
        let Some(reading) = read(file, "amd-smi-json") else { return };
        let gpu = &reading.devices[0];
        assert_eq!(gpu.name.as_deref(), Some(name));
        assert_eq!(gpu.driver.as_deref(), Some("6.14.0-24-generic"));
        assert_eq!((gpu.uuid.clone(), gpu.pci, gpu.numa), (None, None, Some(1)));
        assert_eq!(gpu.memory.total, Reported::Value(Bytes(65_520 << 20)));
        assert_eq!(gpu.power_limit, Reported::Value(Milliwatts(300_000)));
    }
}

#[test]
fn the_shapes_of_topology_give_links() {
    let own = read("own/topology.json", "amd-smi-json").unwrap();
    assert_eq!((own.devices.len(), kinds(&own)), (3, vec![LinkKind::CrossNuma, LinkKind::Xgmi(1)]));
    for (file, kind) in [
        ("L1189-amd-smi-topology-json.txt", LinkKind::SameNuma),
        ("L1275-amd-smi-topology-a-t-json.txt", LinkKind::CrossNuma),
    ] {
        let Some(reading) = read(&format!("amdsmi-docs/{file}"), "amd-smi-json") else { return };
        assert_eq!((reading.devices.len(), reading.links.len()), (2, 1), "{file}");
        assert_eq!(kinds(&reading), [kind], "{file}");
    }
}

#[test]
fn parts_of_the_metrics_are_read_alone() {
    for file in ["own/metric.json", "amdsmi-docs/L1634-amd-smi-metric-p-json.txt"] {
        let Some(json) = read(file, "amd-smi-json") else { return };
        assert_eq!(json.devices[0].power, Reported::Value(Milliwatts(10_000)));
        assert!(json.warnings.is_empty());
    }
}

#[test]
fn a_capture_cut_off_anywhere_keeps_the_devices_before_the_cut() {
    for root in capture_roots() {
        let files = ["mi100.json", "telegraf/mi100_rocm571.json"].map(|file| root.join("amd").join(file));
        let file = files.iter().find(|file| file.is_file()).unwrap();
        let text = std::fs::read_to_string(file).unwrap();
        let format: CaptureFormat = "rocm-smi-json".parse().unwrap();
        let devices = |text: &str| format.parse(text).unwrap().map_or(0, |reading| reading.devices.len());
        let whole = devices(&text);
        let mut before = 0;
        for end in (0..text.len()).step_by(text.len() / 200 + 1).filter(|&end| text.is_char_boundary(end)) {
            let now = devices(&text[..end]);
            assert!((before..=whole).contains(&now), "{} cut at {end}: {now} after {before}", file.display());
            before = now;
        }
        assert!(before > 0, "{}", file.display());
    }
}
