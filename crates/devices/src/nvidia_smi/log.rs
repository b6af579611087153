//! The tree of a whole answer, as devices.

use super::{cell, gpu, health, mig, tree};
use crate::found::Found;
use crate::snapshot::Snapshot;
use crate::xml::Element;

/// The devices of a tree; `cut` says why it ends early, where it does.
///
/// The number of a device is its place in the answer unless the answer gives one: the tool lists devices in the order
/// of their numbers. Where it shows fewer than are attached it was asked for some of them, and which cannot be told.
pub(crate) fn snapshot(root: &Element, cut: Option<&str>) -> Snapshot {
    let mut snapshot = Snapshot::default();
    let gpus: Vec<&Element> = root.children("gpu").collect();
    let attached = tree::first(root, &[&["attached_gpus"]], cell::count);
    if let Some(cut) = cut {
        snapshot.warn(format!("the answer ends early: {cut}"));
    }
    let differ = attached.is_some_and(|attached| attached as usize != gpus.len());
    if let Some(attached) = attached.filter(|_| differ) {
        snapshot.warn(format!("{attached} GPUs are attached and {} are shown", gpus.len()));
    }
    let driver = tree::first(root, &[&["driver_version"]], cell::name);
    for (place, element) in gpus.into_iter().enumerate() {
        let mut found = gpu::found(element, driver.clone());
        if found.index.is_none() && (!differ || cut.is_some()) {
            found.index = u32::try_from(place).ok();
        }
        if found.pci.is_none() && found.uuid.is_none() {
            snapshot.warn(format!("GPU {place} has neither a PCI address nor a UUID"));
        }
        if let Some(cause) = health::slowdown(element) {
            snapshot.warn(format!("GPU {place} is slowed down by its hardware: {cause}"));
        }
        let is_same = |known: &Found| known.pci == found.pci && known.uuid == found.uuid;
        if found.pci.is_some() && snapshot.devices.iter().any(is_same) {
            snapshot.warn(format!("GPU {place} is listed before; only the first is taken"));
            continue;
        }
        let instances = mig::instances(element, &found);
        for device in std::iter::once(found).chain(instances) {
            if snapshot.push(device).is_none() {
                return snapshot;
            }
        }
    }
    snapshot
}
