//! What `nvidia-smi` printed on real machines is read as it is.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::fs;

use gpupool_core::device::{Health, LinkKind};
use gpupool_core::units::{Bytes, Percent};
use gpupool_devices::capture::Format;
use gpupool_devices::found::Doing;
use gpupool_devices::nvidia_smi::{help, nvlink};
use gpupool_devices::{Found, Partition, Snapshot, Told, UsedMeans, Watts};

/// The text of a capture, or `None` where there are none.
fn text(file: &str) -> Option<String> {
    let path = common::captures(file)?.join("nvidia").join(file);
    Some(String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned())
}

fn read(file: &str) -> Option<Snapshot> {
    Some(parse(&text(file)?))
}

fn parse(text: &str) -> Snapshot {
    Format::guess(text).and_then(|format| format.parse(text)).unwrap().unwrap()
}

fn mib(amount: u64) -> Told<Bytes> {
    Told::Value(Bytes(amount << 20))
}

fn watts(thousandths: u64) -> Told<Watts> {
    Told::Value(Watts(thousandths))
}

fn minors(snapshot: &Snapshot) -> Vec<u32> {
    snapshot.devices.iter().map(|device| device.minor.unwrap()).collect()
}

fn is_instance(device: &&Found) -> bool {
    matches!(device.partition, Some(Partition::Mig { .. }))
}

#[test]
fn every_xml_document_gives_its_devices() {
    for (file, name, total, power, driver) in [
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
        assert_eq!(device.health, Some(Health::Healthy), "{file}");
        assert_eq!(device.index, Some(0), "{file}");
        assert_eq!(snapshot.warnings, Vec::<String>::new(), "{file}");
        let major: u32 = driver.split('.').next().unwrap().parse().unwrap();
        let means = if major < 510 { UsedMeans::WithReserved } else { UsedMeans::WithoutReserved };
        assert_eq!(device.memory.used_means, means, "{file}");
    }
}

#[test]
fn processes_are_those_of_the_capture() {
    let Some(snapshot) = read("telegraf/tesla-t4.xml") else { return };
    let processes = snapshot.devices[0].processes.value().unwrap();
    let [xorg, python] = &processes[..] else { panic!("{processes:?}") };
    assert_eq!((xorg.pid, xorg.doing, &xorg.memory), (675, Doing::Graphics, &mib(22)));
    assert_eq!((python.pid, python.doing, &python.memory), (5762, Doing::Compute, &mib(1005)));
    for (file, count) in [("telegraf/gt-1030.xml", 10), ("telegraf/rtx-3080-v12.xml", 5), ("telegraf/a10g.xml", 1)] {
        assert_eq!(read(file).unwrap().devices[0].processes.value().unwrap().len(), count, "{file}");
    }
}

#[test]
fn instances_follow_their_gpu_and_have_no_utilization() {
    let Some(snapshot) = read("telegraf/a100-sxm4-v12.xml") else { return };
    assert_eq!(snapshot.devices.len(), 5);
    assert_eq!(snapshot.devices[0].utilization, Told::Unsupported("N/A".into()));
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
fn documents_with_little_in_them_say_what_is_missing() {
    let Some(snapshot) = read("openpai/nvidia_smi_outdated_gpu.xml") else { return };
    let device = &snapshot.devices[0];
    assert_eq!((device.name.as_deref(), device.memory.unified), (Some("GeForce GT 730"), false));
    assert!(device.memory.total.is_absent() && device.power.is_absent());
    assert_eq!(device.utilization, Told::Unsupported("N/A".into()));
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
fn the_text_gives_minor_numbers_that_are_no_order() {
    let mixed = [3, 2, 1, 0, 7, 6, 5, 4];
    for (file, name, expected) in [
        ("gpud/nvidia-smi-query.535.154.05.out.0.valid", "NVIDIA GeForce RTX 4090", &mixed[..]),
        ("gpud/nvidia-smi-query.535.154.05.out.1.valid", "NVIDIA GeForce RTX 4090", &mixed),
        ("gpud/nvidia-smi-query.535.161.08.out.0.valid", "NVIDIA H100 80GB HBM3", &[0, 1, 2, 3, 4, 5, 6, 7]),
        ("gpud/nvidia-smi-query.535.129.03.out.0.valid.a10", "NVIDIA A10", &[0]),
        ("gpud/a10-550.127.05.query.txt", "NVIDIA A10", &[0]),
        ("gpud/HWSlowdownQueryOutput.txt", "NVIDIA A10", &[0]),
        ("thamada-gls/A100SXMx4_smi.a.txt", "NVIDIA A100-SXM4-80GB", &[3, 4, 5, 6]),
        ("thamada-gls/L4_smi.a.txt", "NVIDIA L4", &[8]),
        ("thamada-gls/RTX2000Ada_smi.a.txt", "NVIDIA RTX 2000 Ada Generation", &[7]),
        ("thamada-gls/RTX3090_smi.a.txt", "NVIDIA GeForce RTX 3090", &[1, 6]),
        ("thamada-gls/RTX4090_smi.a.txt", "NVIDIA GeForce RTX 4090", &mixed),
    ] {
        let Some(snapshot) = read(file) else { return };
        assert_eq!(minors(&snapshot), expected, "{file}");
        assert!(snapshot.devices.iter().all(|device| device.name.as_deref() == Some(name)), "{file}");
        assert!(snapshot.devices.iter().all(|device| device.health.is_some()), "{file}");
        let is_new = |warning: &&String| !warning.contains("slowed down by its hardware");
        assert_eq!(snapshot.warnings.iter().find(is_new), None, "{file}");
    }
}

#[test]
fn a_gpu_whose_rows_wait_to_be_remapped_is_unhealthy_and_a_slow_one_is_not() {
    let Some(waits) = read("gpud/nvidia-smi-query.535.129.03.out.0.valid.a10") else { return };
    let reason = "row remapping is pending; reset the GPU";
    assert_eq!(waits.devices[0].health, Some(Health::Unhealthy(reason.into())));
    let slow = read("gpud/HWSlowdownQueryOutput.txt").unwrap();
    assert_eq!(slow.devices[0].health, Some(Health::Healthy));
    assert_eq!(slow.warnings, ["GPU 0 is slowed down by its hardware: the power supply asks for it"]);
}

#[test]
fn the_text_gives_every_reading() {
    let Some(snapshot) = read("gpud/nvidia-smi-query.535.154.05.out.0.valid") else { return };
    let busy = &snapshot.devices[6];
    assert_eq!(busy.pci.unwrap().to_string(), "0000:c1:00.0");
    assert_eq!((&busy.utilization, &busy.temperature_c), (&Told::Value(Percent(91_000)), &Told::Value(62)));
    assert_eq!((&busy.power, &busy.power_limit), (&watts(313_420), &watts(450_000)));
    let process = &busy.processes.value().unwrap()[0];
    assert_eq!((process.pid, &process.memory), (1_375_347, &mib(22372)));
    assert_eq!(snapshot.devices[5].processes, Told::Value(Vec::new()));
}

#[test]
fn a_part_of_the_text_and_a_text_cut_off_give_their_devices() {
    let Some(pages) = read("azurehpc-health-checks/orig_nvsmi8_output.txt") else { return };
    let domains: Vec<_> = pages.devices.iter().map(|device| device.pci.unwrap().domain).collect();
    assert_eq!(domains, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(pages.devices.iter().all(|device| device.health == Some(Health::Healthy)));
    let cut = read("gpud/nvidia-smi-query.535.183.01.out.0.invalid").unwrap();
    assert_eq!(cut.devices[0].name.as_deref(), Some("NVIDIA H100 80GB HBM3"));
    let early = "the answer ends early: the last GPU has no list of processes";
    assert_eq!(cut.warnings, [early, "8 GPUs are attached and 1 are shown"]);
}

#[test]
fn tables_give_what_they_show() {
    for (file, count, total) in [
        ("thamada-gls/A100SXMx4_smi.txt", 4, 81920),
        ("thamada-gls/A40x10_smi.txt", 10, 46068),
        ("thamada-gls/L4_smi.txt", 1, 23034),
        ("thamada-gls/RTX3090_smi.txt", 2, 24576),
        ("thamada-gls/RTX4090_smi.txt", 8, 24564),
        ("gpud/a10-550.127.05.table.txt", 1, 23028),
        ("topo-m/stelline-asus-esc8000a-4xRTX6000Ada.nvidia-smi.txt", 4, 49140),
    ] {
        let Some(snapshot) = read(file) else { return };
        assert_eq!(snapshot.devices.len(), count, "{file}");
        assert!(snapshot.devices.iter().all(|device| device.memory.total == mib(total)), "{file}");
        assert!(snapshot.devices.iter().all(|device| device.processes == Told::Value(Vec::new())), "{file}");
        assert_eq!(snapshot.warnings, Vec::<String>::new(), "{file}");
    }
    let broken_fan = read("gpud/nvidia-smi.525.125.06.out.0.valid").unwrap();
    let device = &broken_fan.devices[0];
    assert_eq!(device.name.as_deref(), Some("NVIDIA GeForce ..."));
    assert_eq!((&device.temperature_c, &device.memory.used), (&Told::Value(38), &mib(2021)));
    assert!(device.processes.is_absent());
}

#[test]
fn unified_memory_is_no_memory_of_the_device() {
    let Some(snapshot) = read("dgx-spark-gb10/cudf_pandas_demo.nvidia-smi.txt") else { return };
    let device = &snapshot.devices[0];
    assert!(device.memory.unified);
    assert_eq!(device.memory.total, Told::Unsupported("Not Supported".into()));
    assert_eq!(device.power_limit, Told::Unsupported("N/A".into()));
    assert_eq!((device.pci.unwrap().domain, &device.power), (0xf, &watts(10_000)));
    assert_eq!(device.processes.value().unwrap()[2].memory, mib(196));
}

#[test]
fn a_csv_is_mapped_by_its_head() {
    let Some(snapshot) = read("vertex/sample-output.csv") else { return };
    let device = &snapshot.devices[0];
    assert_eq!(device.name.as_deref(), Some("NVIDIA GeForce RTX 2080 SUPER"));
    assert_eq!((&device.memory.total, &device.memory.used), (&mib(8192), &mib(876)));
    assert_eq!((&device.temperature_c, &device.utilization), (&Told::Value(36), &Told::Value(Percent(2_000))));
    assert_eq!((&device.power, &device.power_limit), (&watts(32_700), &watts(250_000)));
    let two = read("nvidia_gpu_exporter/query.txt").unwrap();
    assert_eq!((two.devices.len(), two.devices[1].index, &two.devices[1].memory.used), (2, Some(1), &mib(1234)));
}

#[test]
fn several_runs_of_one_machine_become_one_answer() {
    for (file, count, name, power) in [
        ("linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05", 1, "NVIDIA GeForce RTX 2080 SUPER", 37_620),
        ("linux-x86_64__nvidia-geforce-rtx-4080-super__595.71.05", 1, "NVIDIA GeForce RTX 4080 SUPER", 25_920),
        ("linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01", 1, "NVIDIA H100 80GB HBM3", 69_850),
        ("linux-x86_64__nvidia-h100-mig__590.48.01", 5, "NVIDIA H100 80GB HBM3", 71_270),
        ("linux-x86_64__nvidia-l40s__595.80", 1, "NVIDIA L40S", 183_280),
        ("windows-x86_64__nvidia-geforce-rtx-2080-super__591.86", 1, "NVIDIA GeForce RTX 2080 SUPER", 38_920),
    ] {
        let Some(snapshot) = read(&format!("nvidia_gpu_exporter/captures/{file}.txt")) else { return };
        assert_eq!(snapshot.devices.len(), count, "{file}");
        assert_eq!(snapshot.devices[0].name.as_deref(), Some(name), "{file}");
        assert_eq!(snapshot.devices[0].power, watts(power), "{file}");
        let numa = if file.starts_with("windows") { None } else { Some(0) };
        assert_eq!(snapshot.devices[0].numa, numa, "{file}");
    }
    let vertex = read("vertex/output_ubuntu_20.04_v465.27.txt").unwrap();
    assert_eq!((vertex.devices.len(), &vertex.devices[0].memory.total), (1, &mib(7979)));
}

#[test]
fn a_machine_with_instances_gives_the_gpu_and_four_of_them() {
    let Some(snapshot) = read("nvidia_gpu_exporter/captures/linux-x86_64__nvidia-h100-mig__590.48.01.txt") else {
        return;
    };
    assert_eq!(snapshot.devices[0].utilization, Told::Unsupported("N/A".into()));
    assert_eq!(snapshot.devices[0].memory.used, mib(59));
    let instances: Vec<_> = snapshot.devices.iter().filter(is_instance).collect();
    let profiles: Vec<_> = instances
        .iter()
        .map(|device| match device.partition.as_ref().unwrap() {
            Partition::Mig { profile, gpu_instance, .. } => (profile.as_deref().unwrap(), gpu_instance.unwrap()),
            Partition::Amd { .. } => panic!("{device:?}"),
        })
        .collect();
    assert_eq!(profiles, [("3g.40gb", 2), ("2g.20gb", 3), ("1g.10gb", 9), ("1g.10gb", 10)]);
    let totals: Vec<_> = instances.iter().map(|device| device.memory.total.clone()).collect();
    assert_eq!(totals, [40448, 20096, 9984, 9984].map(mib));
    assert_eq!(instances[3].uuid.as_deref(), Some("MIG-00000003-0000-0000-0000-000000000003"));
}

#[test]
fn the_desktop_of_windows_hides_what_its_processes_use() {
    let file = "nvidia_gpu_exporter/captures/windows-x86_64__nvidia-geforce-rtx-2080-super__591.86.txt";
    let Some(snapshot) = read(file) else { return };
    assert_eq!(snapshot.devices[0].minor, None);
    let processes = snapshot.devices[0].processes.value().unwrap();
    assert_eq!(processes.len(), 10);
    assert!(processes.iter().all(|process| matches!(process.memory, Told::Unsupported(_))));
    assert!(snapshot.warnings.iter().any(|warning| warning.contains("topo -m")), "{:?}", snapshot.warnings);
}

#[test]
fn an_idle_gpu_may_claim_to_be_busy() {
    let Some(snapshot) = read("nvidia_gpu_exporter/captures/linux-x86_64__nvidia-l40s__595.80.txt") else { return };
    assert_eq!(snapshot.devices[0].utilization, Told::Value(Percent(100_000)));
    assert_eq!(snapshot.devices[0].processes, Told::Value(Vec::new()));
}

#[test]
fn matrices_give_links_and_nodes() {
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
fn the_status_of_links_lists_gpus_and_no_status_lists_none() {
    let Some(status) = read("gpud/nvidia-smi.nvlink.status.a100") else { return };
    assert_eq!((status.devices.len(), status.warnings.len()), (8, 0));
    assert_eq!(read("azurehpc-health-checks/good_nvlink_status.txt").unwrap().devices[0].index, Some(7));
    let empty = text("gpud/nvidia-smi.nvlink.status.a10").unwrap();
    assert!(Format::guess(&empty).is_none());
    assert_eq!(nvlink::parse(&empty), Ok(Snapshot::default()));
}

#[test]
fn a_list_of_fields_is_no_list_of_devices() {
    let Some(text) = text("nvidia_gpu_exporter/fields.txt") else { return };
    assert!(help::fields(&text).contains(&"memory.used") && help::fields(&text).contains(&"gpu_uuid"));
    let snapshot = parse(&text);
    assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (0, 1));
}
