//! One `gpu` element of the tree, as a device.

use std::sync::Arc;

use gpupool_core::device::Vendor;

use super::{cell, health, processes, tree};
use crate::address;
use crate::found::{Found, Memory, UsedMeans};
use crate::told::Told;
use crate::xml::Element;

/// The device; `driver` is the version the head of the answer gives.
pub(crate) fn found(gpu: &Element, driver: Option<Arc<str>>) -> Found {
    let mut found = Found::new(Vendor::Nvidia);
    found.index = tree::first(gpu, &[&["index"]], cell::count);
    found.minor = tree::first(gpu, &[&["minor_number"]], cell::count);
    found.name = tree::first(gpu, &[&["product_name"]], cell::name);
    found.uuid = tree::first(gpu, &[&["uuid"], &["gpu_uuid"]], cell::name);
    let in_tree = || tree::first(gpu, &[&["pci", "pci_bus_id"], &["pci", "bus_id"]], address::parse);
    found.pci = gpu.attribute("id").and_then(address::parse).or_else(in_tree);
    found.mig = tree::first(gpu, &[&["mig_mode", "current_mig"], &["mig_mode", "current"]], cell::flag);
    found.driver = tree::first(gpu, &[&["driver_version"]], cell::name).or(driver);
    found.memory = memory(gpu, found.driver.as_deref());
    found.memory.unified = found.mig != Some(true) && has_no_memory_of_its_own(&found.memory);
    found.utilization = tree::told(gpu, &["utilization"], &["gpu_util", "gpu"], cell::percent);
    found.temperature_c = tree::told(gpu, &["temperature"], &["gpu_temp", "gpu_current_temp", "gpu"], cell::celsius);
    const POWER: [&str; 2] = ["gpu_power_readings", "power_readings"];
    // The average first: it is what the single number of older drivers is.
    const DRAW: [&str; 4] = ["power_draw", "average_power_draw", "instant_power_draw", "instantaneous_power_draw"];
    found.power = tree::told(gpu, &POWER, &DRAW, cell::watts);
    // The limit in force; `power_limit` is what was asked for.
    const LIMIT: [&str; 3] = ["enforced_power_limit", "current_power_limit", "power_limit"];
    found.power_limit = tree::told(gpu, &POWER, &LIMIT, cell::watts);
    found.processes = processes::of(gpu);
    found.health = health::of(gpu, &found);
    found
}

/// The memory of a GPU or of an instance of it.
pub(crate) fn memory(element: &Element, driver: Option<&str>) -> Memory {
    const SECTIONS: [&str; 3] = ["fb_memory_usage", "shared_fb_memory_usage", "memory_usage"];
    let amount = |field| tree::told(element, &SECTIONS, &[field], cell::memory);
    let reserved = amount("reserved");
    let used_means = used_means(&reserved, driver);
    Memory { total: amount("total"), used: amount("used"), reserved, used_means, ..Memory::default() }
}

/// Since version 510 the tool shows what the driver keeps apart from what is used.
fn used_means<T>(reserved: &Told<T>, driver: Option<&str>) -> UsedMeans {
    if reserved.value().is_some() {
        return UsedMeans::WithoutReserved;
    }
    match driver.and_then(|driver| driver.split('.').next()).and_then(cell::count) {
        Some(major) if major < 510 => UsedMeans::WithReserved,
        Some(_) => UsedMeans::WithoutReserved,
        None => UsedMeans::Unknown,
    }
}

/// Not so for a GPU cut by MIG: what is seen from inside one of its instances leaves out the memory of the whole.
fn has_no_memory_of_its_own(memory: &Memory) -> bool {
    matches!(memory.total, Told::Unsupported(_)) && !memory.total.is_absent()
}
