//! Captured output of `nvidia-smi`, from our own captures and from real machines.

use std::fs;

use gpupool_core::{Bytes, DeviceHealth, LinkKind, Percent};
use gpupool_devices::capture::CaptureFormat;
use gpupool_devices::{
    DetectedDevice, DevicePartition, Milliwatts, ProcessActivity, Reported, SourceReading, UsedMemoryScope,
};

use crate::capture_fixtures::{own_captures, real_captures};

/// Returns the text of a capture, if present; `own/` is the folder of our own.
fn text(file: &str) -> Option<String> {
    let path = match file.strip_prefix("own/") {
        Some(file) => own_captures().join("nvidia").join(file),
        None => real_captures()?.join("nvidia").join(file),
    };
    Some(String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned())
}

fn read(file: &str) -> Option<SourceReading> {
    Some(parse(&text(file)?))
}

fn parse(text: &str) -> SourceReading {
    CaptureFormat::detect(text).and_then(|format| format.parse(text)).unwrap().unwrap()
}

fn mib(amount: u64) -> Reported<Bytes> {
    Reported::Value(Bytes(amount << 20))
}

fn watts(thousandths: u64) -> Reported<Milliwatts> {
    Reported::Value(Milliwatts(thousandths))
}

fn minors(snapshot: &SourceReading) -> Vec<u32> {
    snapshot.devices.iter().map(|device| device.minor.unwrap()).collect()
}

fn is_instance(device: &&DetectedDevice) -> bool {
    matches!(device.partition, Some(DevicePartition::Mig { .. }))
}

#[test]
fn every_xml_document_has_its_devices() {
    for (file, name, total, power, driver) in [
        ("own/two_gpus.xml", "NVIDIA GeForce RTX 4090", 24210, None, "535.104.05"),
        ("telegraf/3090-v13.xml", "NVIDIA GeForce RTX 3090", 24576, Some(35_060), "590.44.01"),
        ("telegraf/a10g.xml", "NVIDIA A10G", 23028, Some(25_580), "515.105.01"),
        ("telegraf/dual_2070-v13.xml", "NVIDIA GeForce RTX 2070", 8192, Some(9_230), "590.44.01"),
        ("telegraf/gt-1030.xml", "NVIDIA GeForce GT 1030", 1998, None, "470.74"),
        ("telegraf/quadro-p2000-v12.xml", "Quadro P2000", 5120, Some(4_610), "525.125.06"),
        ("telegraf/quadro-p400.xml", "Quadro P400", 1998, None, "418.43"),
        ("telegraf/rtx-3060-v12.xml", "NVIDIA GeForce RTX 3060", 12288, Some(11_600), "570.124.04"),
        ("telegraf/rtx-3080-v12.xml", "NVIDIA GeForce RTX 3080", 10240, Some(22_780), "536.40"),
        ("telegraf/rtx-3080-v13.xml", "NVIDIA GeForce RTX 3080", 10240, Some(139_620), "595.58.03"),
        ("telegraf/tesla-t4.xml", "Tesla T4", 15360, Some(26_780), "515.105.01"),
        ("vertex/nvidia-smi.xml", "NVIDIA GeForce GTX 1070 Ti", 8116, Some(17_220), "470.82.00"),
        ("hadoop-yarn/nvidia-smi-sample-output.xml", "Tesla P100-PCIE-12GB", 11567, Some(24_840), "375.66"),
        ("openpai/nvidia_smi_sample_ecc_unsupported.xml", "GeForce RTX 2080 Ti", 10989, Some(2_120), "410.73"),
    ] {
        let Some(snapshot) = read(file) else { return };
        let device = &snapshot.devices[0];
        assert_eq!(device.name.as_deref(), Some(name), "{file}");
        assert_eq!(device.memory.total, mib(total), "{file}");
        assert_eq!(device.power.value().map(|power| power.0), power, "{file}");
        assert_eq!(device.driver.as_deref(), Some(driver), "{file}");
        assert_eq!(device.health, Some(DeviceHealth::Healthy), "{file}");
        assert_eq!(device.index, Some(0), "{file}");
        assert_eq!(snapshot.warnings, Vec::<String>::new(), "{file}");
        let major: u32 = driver.split('.').next().unwrap().parse().unwrap();
        let means = if major < 510 { UsedMemoryScope::WithReserved } else { UsedMemoryScope::WithoutReserved };
        assert_eq!(device.memory.used_means, means, "{file}");
    }
}

#[test]
fn processes_match_the_capture() {
    let own = read("own/two_gpus.xml").unwrap();
    let listed: Vec<_> = own.devices[1].processes.value().unwrap().iter().map(|process| process.pid).collect();
    assert_eq!(listed, [4242, 77]);
    let Some(snapshot) = read("telegraf/tesla-t4.xml") else { return };
    let processes = snapshot.devices[0].processes.value().unwrap();
    let [xorg, python] = &processes[..] else { panic!("{processes:?}") };
    assert_eq!((xorg.pid, xorg.activity, &xorg.memory), (675, ProcessActivity::Graphics, &mib(22)));
    assert_eq!((python.pid, python.activity, &python.memory), (5762, ProcessActivity::Compute, &mib(1005)));
    for (file, count) in [("telegraf/gt-1030.xml", 10), ("telegraf/rtx-3080-v12.xml", 5), ("telegraf/a10g.xml", 1)] {
        assert_eq!(read(file).unwrap().devices[0].processes.value().unwrap().len(), count, "{file}");
    }
}

#[test]
fn instances_follow_their_gpu_and_have_no_utilization() {
    let own = read("own/mig.xml").unwrap();
    let numbers: Vec<_> =
        own.devices.iter().filter(is_instance).map(|device| device.partition.as_ref().unwrap().number()).collect();
    assert_eq!(numbers, [1, 5].map(|gpu_instance| Some(gpu_instance * 16)));
    assert!(own.devices.iter().all(|device| device.utilization.value().is_none() && device.pci == own.devices[0].pci));
    assert_eq!((own.devices[0].mig, &own.devices[2].memory.total), (Some(true), &mib(19968)));
    assert_eq!(own.warnings, ["2 GPUs are attached and 1 are shown"]);
    let Some(snapshot) = read("telegraf/a100-sxm4-v12.xml") else { return };
    assert_eq!(snapshot.devices.len(), 5);
    assert_eq!(snapshot.devices[0].utilization, Reported::Unsupported("N/A".into()));
    assert_eq!((snapshot.devices[0].mig, snapshot.devices[0].minor), (Some(true), Some(1)));
    assert_eq!(snapshot.devices[0].memory.reserved, mib(869));
    let instances: Vec<_> = snapshot.devices.iter().filter(is_instance).collect();
    let numbers: Vec<_> = instances.iter().map(|device| device.partition.as_ref().unwrap().number()).collect();
    assert_eq!(numbers, [3, 4, 5, 6].map(|gpu_instance| Some(gpu_instance * 16)));
    assert!(instances.iter().all(|device| device.memory.total == mib(19968) && device.memory.used == mib(12)));
    assert!(
        instances.iter().all(|device| device.utilization.value().is_none() && device.pci == snapshot.devices[0].pci)
    );
    assert_eq!(snapshot.warnings, ["4 GPUs are attached and 1 are shown"]);
}

#[test]
fn sparse_documents_report_missing_fields() {
    let own = &read("own/little.xml").unwrap().devices[0];
    assert_eq!((own.name.as_deref(), own.memory.unified), (Some("GeForce GT 9"), false));
    assert!(own.memory.total.is_absent() && own.power.is_absent());
    assert_eq!(own.utilization, Reported::Unsupported("N/A".into()));
    let Some(snapshot) = read("openpai/nvidia_smi_outdated_gpu.xml") else { return };
    let device = &snapshot.devices[0];
    assert_eq!((device.name.as_deref(), device.memory.unified), (Some("GeForce GT 730"), false));
    assert!(device.memory.total.is_absent() && device.power.is_absent());
    assert_eq!(device.utilization, Reported::Unsupported("N/A".into()));
    let trimmed = read("telegraf/gtx-1070-ti.xml").unwrap();
    assert_eq!((trimmed.devices[0].driver.clone(), trimmed.devices[0].minor), (None, None));
    assert_eq!(trimmed.devices[0].memory.total, mib(4096));
    let empty = read("hadoop-yarn/nvidia-smi-output-missing-tags.xml").unwrap();
    assert_eq!((empty.devices.len(), empty.devices[0].pci, empty.warnings.len()), (1, None, 2));
    let sample = read("openpai/nvidia_smi_sample.xml").unwrap();
    assert_eq!(sample.devices.len(), 2);
    assert_eq!(sample.warnings, ["6 GPUs are attached and 2 are shown"]);
}

#[test]
fn unified_memory_is_not_device_memory() {
    let device = &read("own/unified.xml").unwrap().devices[0];
    assert!(device.memory.unified);
    assert_eq!(device.memory.total, Reported::Unsupported("Not Supported".into()));
    assert_eq!(device.power_limit, Reported::Unsupported("N/A".into()));
    assert_eq!((device.pci.unwrap().domain, &device.power), (0xf, &watts(10_000)));
    assert_eq!(device.processes.value().unwrap()[0].memory, mib(196));
}

#[test]
fn minor_numbers_do_not_follow_the_index() {
    assert_eq!(minors(&read("own/remap.xml").unwrap()), [4, 3]);
}

#[test]
fn a_pending_row_remapping_is_unhealthy_but_a_slowdown_is_not() {
    let snapshot = read("own/remap.xml").unwrap();
    let reason = "row remapping is pending; reset the GPU";
    assert_eq!(snapshot.devices[0].health, Some(DeviceHealth::Unhealthy(reason.into())));
    assert_eq!(snapshot.devices[1].health, Some(DeviceHealth::Healthy));
    assert_eq!(snapshot.warnings, ["GPU 1 is slowed down by its hardware: power brake"]);
}

#[test]
fn a_csv_is_mapped_by_its_header() {
    let own = read("own/gpus.csv").unwrap();
    assert_eq!((own.devices.len(), own.devices[1].index, &own.devices[1].memory.used), (2, Some(1), &mib(1234)));
    assert_eq!((&own.devices[0].power, &own.devices[0].power_limit), (&watts(32_700), &watts(250_000)));
    assert_eq!(
        (&own.devices[0].temperature_c, &own.devices[0].utilization),
        (&Reported::Value(36), &Reported::Value(Percent(2_000)))
    );
    let Some(snapshot) = read("vertex/sample-output.csv") else { return };
    let device = &snapshot.devices[0];
    assert_eq!(device.name.as_deref(), Some("NVIDIA GeForce RTX 2080 SUPER"));
    assert_eq!((&device.memory.total, &device.memory.used), (&mib(8192), &mib(876)));
    assert_eq!((&device.temperature_c, &device.utilization), (&Reported::Value(36), &Reported::Value(Percent(2_000))));
    assert_eq!((&device.power, &device.power_limit), (&watts(32_700), &watts(250_000)));
    let two = read("nvidia_gpu_exporter/query.txt").unwrap();
    assert_eq!((two.devices.len(), two.devices[1].index, &two.devices[1].memory.used), (2, Some(1), &mib(1234)));
}

#[test]
fn matrices_have_links_and_numa_nodes() {
    let own = read("own/topo.txt").unwrap();
    let numa: Vec<_> = own.devices.iter().map(|device| device.numa.unwrap()).collect();
    assert_eq!((numa, own.links.len()), (vec![0, 0, 1, 1], 6));
    assert_eq!((own.links[0].kind, own.links[5].kind), (LinkKind::SameNuma, LinkKind::NvLink(4)));
    let Some(cube) = read("topo-m/hadoop-topo-m-aws-p3.16xlarge-8xV100.txt") else { return };
    assert_eq!((cube.devices.len(), cube.links.len()), (8, 28));
    let count = |kind| cube.links.iter().filter(|link| link.kind == kind).count();
    assert_eq!((count(LinkKind::NvLink(1)), count(LinkKind::NvLink(2)), count(LinkKind::HostBridge)), (8, 8, 12));
    assert!(cube.devices.iter().all(|device| device.numa.is_none()));
    let two_nodes = read("topo-m/stelline-asus-esc8000a-4xRTX6000Ada.txt").unwrap();
    let numa: Vec<_> = two_nodes.devices.iter().map(|device| device.numa.unwrap()).collect();
    assert_eq!((numa, two_nodes.links.len()), (vec![0, 0, 1, 1], 6));
    assert_eq!(two_nodes.links[0].kind, LinkKind::SameNuma);
}

#[test]
fn a_list_of_fields_is_not_a_list_of_devices() {
    let Some(text) = text("nvidia_gpu_exporter/fields.txt") else { return };
    assert!(CaptureFormat::detect(&text).is_none());
}
