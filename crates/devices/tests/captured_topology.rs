//! Topology files, bus listings, copied trees and logs of real machines, where this machine has them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use gpupool_core::device::{Health, LinkKind, Vendor};
use gpupool_core::units::Bytes;
use gpupool_devices::topology::{hwloc, nccl};
use gpupool_devices::{Snapshot, SourceError, Told, kernel_log, pci_bus};
use kernel_log::fabric_manager;
use pci_bus::lspci;

type LooksLike = fn(&str) -> bool;
type Parse = fn(&str) -> Result<Snapshot, SourceError>;

/// The text formats of this area.
const FORMATS: [(&str, LooksLike, Parse); 5] = [
    ("nccl", nccl::looks_like, nccl::parse),
    ("hwloc", hwloc::looks_like, hwloc::parse),
    ("lspci", lspci::looks_like, lspci::parse),
    ("fabric manager", fabric_manager::looks_like, fabric_manager::parse),
    ("kernel log", kernel_log::looks_like, kernel_log::parse),
];

/// What a captured file holds, read by the only format that knows it.
fn read(captures: &Path, file: &str, format: &str) -> Snapshot {
    let text = String::from_utf8_lossy(&std::fs::read(captures.join(file)).unwrap()).into_owned();
    let knows: Vec<_> = FORMATS.iter().filter(|(_, looks_like, _)| looks_like(&text)).collect();
    assert_eq!(knows.iter().map(|(name, ..)| *name).collect::<Vec<_>>(), [format], "{file}");
    knows[0].2(&text).unwrap()
}

/// How many pairs are joined in which way.
fn links(snapshot: &Snapshot) -> BTreeMap<LinkKind, usize> {
    let mut counts = BTreeMap::new();
    for link in &snapshot.links {
        *counts.entry(link.kind).or_default() += 1;
    }
    counts
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    let mut names: Vec<_> = snapshot.devices.iter().map(|device| device.name.as_deref().unwrap_or("-")).collect();
    names.dedup();
    names
}

fn places(snapshot: &Snapshot) -> Vec<String> {
    snapshot.devices.iter().map(|device| device.pci.unwrap().to_string()).collect()
}

fn numa(snapshot: &Snapshot) -> Vec<Option<u32>> {
    snapshot.devices.iter().map(|device| device.numa).collect()
}

#[test]
fn rccl_topologies_list_amd_gpus_with_their_xgmi_links() {
    let Some(captures) = common::captures("rccl_topologies") else { return };
    let expected = [
        ("topo_16p1h_vm", 16, "gfx90a", 28),
        ("topo_3p_pcie", 3, "gfx90a", 0),
        ("topo_4p1h", 4, "gfx906", 4),
        ("topo_4p3l_ia", 8, "gfx908", 12),
        ("topo_8p1h", 8, "gfx90a", 12),
        ("topo_8p6l_6nic", 8, "gfx908", 24),
        ("topo_8p_90a_1", 8, "gfx90a", 12),
        ("topo_8p_940", 8, "gfx942", 28),
        ("topo_8p_pcie", 8, "gfx906", 0),
        ("topo_8p_rome_n4", 8, "gfx906", 8),
        ("topo_8p_ts1_n4_2", 8, "gfx906", 8),
    ];
    for (file, gpus, name, xgmi) in expected {
        let snapshot = read(&captures, &format!("amd/rccl-topo/{file}.xml"), "nccl");
        assert_eq!(snapshot.devices.len(), gpus, "{file}");
        assert_eq!(names(&snapshot), [name], "{file}");
        assert_eq!(links(&snapshot).get(&LinkKind::Xgmi(1)).copied().unwrap_or(0), xgmi, "{file}");
        assert_eq!(snapshot.links.len(), gpus * (gpus - 1) / 2, "{file}");
        let in_order = snapshot.devices.iter().enumerate().all(|(at, gpu)| gpu.index == Some(at as u32));
        assert!(in_order && snapshot.devices.iter().all(|gpu| gpu.vendor == Vendor::Amd), "{file}");
        assert_eq!(snapshot.warnings, [""; 0], "{file}");
    }
}

#[test]
fn amd_gpus_behind_one_switch_are_nearer_than_across_the_host_bridge() {
    let Some(captures) = common::captures("amd_pcie") else { return };
    let snapshot = read(&captures, "amd/rccl-topo/topo_8p_pcie.xml", "nccl");
    assert_eq!(links(&snapshot), BTreeMap::from([(LinkKind::PcieSwitches, 12), (LinkKind::HostBridge, 16)]));
    let rome = read(&captures, "amd/rccl-topo/topo_8p_rome_n4.xml", "nccl");
    assert_eq!(numa(&rome), [1, 2, 2, 3, 5, 5, 6, 7].map(Some));
}

#[test]
fn nccl_templates_of_clouds_list_gpus_by_their_class() {
    let Some(captures) = common::captures("nccl_templates") else { return };
    let p4d = read(&captures, "nvidia/nccl-topo-aws/p4d-24xl-topo.xml", "nccl");
    assert_eq!(places(&p4d)[..3], ["0000:10:1c.0", "0000:10:1d.0", "0000:20:1c.0"]);
    let expected = [(LinkKind::PcieSwitch, 4), (LinkKind::HostBridge, 8), (LinkKind::CrossNuma, 16)];
    assert_eq!(links(&p4d), BTreeMap::from(expected));
    let ndv2 = read(&captures, "nvidia/nccl-topo-azure/ndv2-topo.xml", "nccl");
    assert_eq!(links(&ndv2), BTreeMap::from([(LinkKind::HostBridge, 12), (LinkKind::CrossNuma, 16)]));
    let ndv4 = read(&captures, "nvidia/nccl-topo-azure/ndv4-topo.xml", "nccl");
    assert_eq!(numa(&ndv4), [0, 0, 1, 1, 2, 2, 3, 3].map(Some));
    assert_eq!(places(&ndv4)[4], "000d:00:00.0");
    let none = read(&captures, "nvidia/nccl-topo-aws/g5.48xl-topo.xml", "nccl");
    assert!(none.devices.is_empty() && none.warnings.len() == 1);
}

#[test]
fn an_azure_dump_hides_where_nvlink_leads_and_its_graph_numbers_the_same_gpus() {
    let Some(captures) = common::captures("azure_ncv4") else { return };
    let topology = read(&captures, "nvidia/nccl-topo-azure/ncv4-topo.xml", "nccl");
    assert_eq!(places(&topology), ["0001:00:00.0", "0002:00:00.0", "0003:00:00.0", "0004:00:00.0"]);
    assert_eq!((names(&topology), links(&topology)), (vec!["sm_80"], BTreeMap::from([(LinkKind::CrossNuma, 6)])));
    assert_eq!(topology.warnings.len(), 4);
    let graph = read(&captures, "nvidia/nccl-topo-azure/ncv4-graph.xml", "nccl");
    let numbers = |snapshot: &Snapshot| snapshot.devices.iter().map(|gpu| gpu.index).collect::<Vec<_>>();
    assert_eq!(numbers(&graph), numbers(&topology));
}

#[test]
fn hwloc_tells_the_sixteen_gpus_of_a_dgx_2_joined_by_switches() {
    let Some(captures) = common::captures("hwloc_dgx2") else { return };
    let snapshot = read(&captures, "nvidia/hwloc/nvidiaDGX2.xml", "hwloc");
    assert_eq!((snapshot.devices.len(), names(&snapshot)), (16, vec!["Tesla V100-SXM3-32GB-H"]));
    assert_eq!(snapshot.devices[15].index, Some(15));
    assert_eq!(snapshot.devices[0].uuid.as_deref(), Some("GPU-d3977428-7a30-086b-2e20-5c1eeed647c6"));
    assert_eq!(numa(&snapshot), [[Some(0); 8], [Some(1); 8]].concat());
    assert_eq!(links(&snapshot), BTreeMap::from([(LinkKind::NvLink(6), 120)]));
}

#[test]
fn hwloc_tells_memory_in_every_unit_and_nvlink_lanes_by_generation() {
    let Some(captures) = common::captures("hwloc_power") else { return };
    let power8 = read(&captures, "nvidia/hwloc/power8gpudistances.xml", "hwloc");
    assert_eq!(places(&power8), ["0002:01:00.0", "0003:01:00.0", "000a:01:00.0", "000b:01:00.0"]);
    assert_eq!(power8.devices[0].memory.total, Told::Value(Bytes(16_671_616 * 1024)));
    assert_eq!(links(&power8), BTreeMap::from([(LinkKind::NvLink(2), 2), (LinkKind::CrossNuma, 4)]));
    let lassen = read(&captures, "nvidia/mpibind-hwloc/coral-lassen.xml", "hwloc");
    assert_eq!(
        (names(&lassen), numa(&lassen)),
        (vec!["Tesla V100-SXM2-16GB"], vec![Some(0), Some(0), Some(8), Some(8)])
    );
    assert_eq!(lassen.devices[0].memory.total, Told::Value(Bytes(16_515_072 * 1024)));
    assert_eq!(links(&lassen), BTreeMap::from([(LinkKind::PcieSwitch, 2), (LinkKind::CrossNuma, 4)]));
    let pascal = read(&captures, "nvidia/mpibind-hwloc/cts1-pascal.xml", "hwloc");
    assert_eq!((pascal.devices.len(), names(&pascal)), (2, vec!["Tesla P100-PCIE-16GB"]));
    let corona = read(&captures, "amd/mpibind-hwloc/epyc-corona.xml", "hwloc");
    assert_eq!(
        (corona.devices.len(), names(&corona), numa(&corona)),
        (4, vec!["Vega 20"], [1, 2, 5, 7].map(Some).to_vec())
    );
    assert_eq!(corona.devices[0].memory.total, Told::Value(Bytes(33_538_048 * 1024)));
}

#[test]
fn a_copied_power9_tree_and_hwlocs_text_of_it_agree() {
    let Some(captures) = common::captures("power9_tree") else { return };
    let packed = std::fs::File::open(captures.join("nvidia/hwloc/nvidiagpunumanodes.tar.bz2")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    tar::Archive::new(bzip2::read::BzDecoder::new(packed)).unpack(folder.path()).unwrap();
    assert!(pci_bus::tree::looks_like(folder.path()));
    let tree = pci_bus::tree::read(folder.path()).unwrap();
    assert_eq!(tree.devices.len(), 6);
    let sound = |gpu: &gpupool_devices::Found| {
        gpu.vendor == Vendor::Nvidia && gpu.memory.total == Told::Value(Bytes(16128 << 20)) && gpu.health.is_none()
    };
    assert!(tree.devices.iter().all(sound), "{:?}", tree.devices);
    let text = read(&captures, "nvidia/hwloc/nvidiagpunumanodes.console", "hwloc");
    assert_eq!((places(&tree), numa(&tree)), (places(&text), numa(&text)));
    assert_eq!(numa(&tree), [0, 0, 0, 8, 8, 8].map(Some));
}

#[test]
fn lspci_lists_gpus_and_neither_virtual_displays_nor_switches() {
    let Some(captures) = common::captures("lspci") else { return };
    let a10 = read(&captures, "nvidia/gpud/lspci.nn.a10", "lspci");
    assert_eq!((places(&a10), names(&a10)), (vec!["0000:06:00.0".to_owned()], vec!["GA102GL [A10]"]));
    let a100 = read(&captures, "nvidia/gpud/lspci.nn.a100", "lspci");
    assert_eq!((a100.devices.len(), names(&a100)), (8, vec!["GA100 [A100 SXM4 80GB]"]));
    assert_eq!(places(&a100)[4], "000b:00:00.0");
}

#[test]
fn faults_of_programs_leave_a_gpu_healthy_and_its_silence_does_not() {
    let Some(captures) = common::captures("kernel_logs") else { return };
    let faults = read(&captures, "nvidia/gpud/dmesg.decode.iso.log.0", "kernel log");
    assert_eq!(places(&faults), ["0000:38:00.0"]);
    assert_eq!(faults.devices[0].health, Some(Health::Healthy));
    assert!(
        faults.warnings[0].contains("Xid 13 ×629") && faults.warnings[1].contains("Xid 43 ×7"),
        "{:?}",
        faults.warnings
    );
    let silent = read(&captures, "nvidia/gpud/dmesg-with-xid-119.log", "kernel log");
    assert_eq!(silent.devices[0].uuid.as_deref(), Some("GPU-509665ad-b600-ac93-3616-d754b23d636d"));
    assert!(matches!(&silent.devices[0].health, Some(Health::Unhealthy(why)) if why.contains("119")));
    let fabric = read(&captures, "nvidia/gpud/fabricmanager.log", "fabric manager");
    assert!(fabric.devices.is_empty() && fabric.warnings[0].contains("error 12028"), "{:?}", fabric.warnings);
}
