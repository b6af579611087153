//! Which files of the kernel go into a bundle. Of a sleeping device only those that do not wake it.

use std::path::Path;

use gpupool_core::device::PciAddress;

use super::pile::Pile;
use crate::doctor::evidence::{Evidence, names_in};
use crate::pci_bus;
use crate::places::Places;

/// What the kernel keeps in its own memory: reading it asks nothing of the device.
const IDENTITY: [&str; 9] = [
    "numa_node",
    "vendor",
    "device",
    "class",
    "revision",
    "subsystem_vendor",
    "subsystem_device",
    "uevent",
    "power/runtime_status",
];

/// What else is read of a device on the bus.
const BUS: [&str; 7] = [
    "local_cpulist",
    "boot_vga",
    "power/control",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
];

/// What else is read of a card.
const CARD: [&str; 29] = [
    "local_cpulist",
    "unique_id",
    "product_name",
    "product_number",
    "vbios_version",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "mem_info_vis_vram_total",
    "mem_info_vis_vram_used",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
    "mem_info_vram_vendor",
    "gpu_busy_percent",
    "mem_busy_percent",
    "gpu_metrics",
    "power_state",
    "power_dpm_force_performance_level",
    "pp_dpm_sclk",
    "pp_dpm_mclk",
    "current_link_speed",
    "current_link_width",
    "current_compute_partition",
    "available_compute_partition",
    "current_memory_partition",
    "available_memory_partition",
    "xcp_id",
    "xgmi_device_id",
    "xgmi_physical_id",
    "xgmi_hive_info/xgmi_hive_id",
];

/// Files about the machine that are not of one device.
const PROC: [&str; 5] = ["modules", "version", "self/cgroup", "cgroups", "sys/kernel/osrelease"];
const SYS: [&str; 3] = ["module/nvidia/version", "module/amdgpu/version", "fs/cgroup/cgroup.controllers"];

/// No tree is followed deeper.
const DEPTH: usize = 8;

/// Copies what is useful of `/sys` and `/proc`.
pub(super) fn copy(pile: &mut Pile, places: &Places, evidence: &Evidence) {
    for file in PROC {
        pile.copy(&format!("proc/{file}"), &places.proc.join(file));
    }
    for file in SYS {
        pile.copy(&format!("sys/{file}"), &places.sys.join(file));
    }
    bus(pile, places, evidence);
    cards(pile, places);
    walk(pile, &places.sys.join("class/kfd/kfd/topology"), "sys/class/kfd/kfd/topology", DEPTH);
    nvidia(pile, places, evidence);
}

fn bus(pile: &mut Pile, places: &Places, evidence: &Evidence) {
    for gpu in evidence.gpus.value().into_iter().flatten() {
        let folder = format!("bus/pci/devices/{}", gpu.pci);
        let more: &[&str] = if gpu.asleep { &[] } else { &BUS };
        for file in IDENTITY.iter().chain(more) {
            pile.copy(&format!("sys/{folder}/{file}"), &places.sys.join(&folder).join(file));
        }
    }
}

fn cards(pile: &mut Pile, places: &Places) {
    let names = names_in(&places.sys.join("class/drm")).unwrap_or_default();
    // `card0` is a card, `card0-DP-1` a socket of it.
    let is_card = |name: &&String| {
        name.strip_prefix("card").is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    for card in names.iter().filter(is_card) {
        let device = places.sys.join("class/drm").join(card).join("device");
        let to = format!("sys/class/drm/{card}/device");
        let asleep = pci_bus::is_asleep(&device);
        let more: &[&str] = if asleep { &[] } else { &CARD };
        for file in IDENTITY.iter().chain(more) {
            pile.copy(&format!("{to}/{file}"), &device.join(file));
        }
        for node in names_in(&device.join("drm")).unwrap_or_default() {
            pile.copy(&format!("{to}/drm/{node}/dev"), &device.join("drm").join(&node).join("dev"));
        }
        if asleep {
            continue;
        }
        for monitor in names_in(&device.join("hwmon")).unwrap_or_default() {
            // One level: what is below are links back to the device.
            walk(pile, &device.join("hwmon").join(&monitor), &format!("{to}/hwmon/{monitor}"), 1);
        }
    }
}

fn nvidia(pile: &mut Pile, places: &Places, evidence: &Evidence) {
    let asleep: Vec<PciAddress> =
        evidence.gpus.value().into_iter().flatten().filter(|gpu| gpu.asleep).map(|gpu| gpu.pci).collect();
    let root = places.proc.join("driver/nvidia");
    for name in names_in(&root).unwrap_or_default() {
        if name != "gpus" {
            walk_entry(pile, &root.join(&name), &format!("proc/driver/nvidia/{name}"), DEPTH);
        }
    }
    for gpu in names_in(&root.join("gpus")).unwrap_or_default() {
        let (from, to) = (root.join("gpus").join(&gpu), format!("proc/driver/nvidia/gpus/{gpu}"));
        if crate::address::parse(&gpu).is_some_and(|address| asleep.contains(&address)) {
            pile.copy(&format!("{to}/power"), &from.join("power"));
        } else {
            walk(pile, &from, &to, DEPTH);
        }
    }
}

/// Copies a folder, following no links.
fn walk(pile: &mut Pile, from: &Path, to: &str, depth: usize) {
    let names = match names_in(from) {
        Ok(names) if depth > 0 => names,
        Ok(_) => return,
        Err(error) => return pile.miss(to, &error.to_string()),
    };
    for name in names {
        walk_entry(pile, &from.join(&name), &format!("{to}/{name}"), depth - 1);
    }
}

fn walk_entry(pile: &mut Pile, from: &Path, to: &str, depth: usize) {
    match std::fs::symlink_metadata(from) {
        Ok(facts) if facts.is_dir() => walk(pile, from, to, depth),
        Ok(facts) if facts.is_symlink() => {}
        Ok(_) => pile.copy(to, from),
        Err(error) => pile.miss(to, &error.to_string()),
    }
}
