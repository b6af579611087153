//! The instances a GPU is cut into.

use super::{cell, gpu, processes, tree};
use crate::found::{Found, Partition};
use crate::snapshot::Snapshot;
use crate::xml::Element;

/// The instances of the GPU `parent`, in their order. What is wrong with the GPU is wrong with each of them.
pub(crate) fn instances(element: &Element, parent: &Found) -> Vec<Found> {
    let listed = element.children("mig_devices").flat_map(|devices| devices.children("mig_device"));
    let is_one = |instance: &&Element| ["index", "gpu_instance_id"].iter().any(|field| instance.child(field).is_some());
    listed
        .chain(element.children("mig_device"))
        .filter(is_one)
        .map(|instance| found(element, instance, parent))
        .collect()
}

fn found(gpu: &Element, instance: &Element, parent: &Found) -> Found {
    let number = |field| tree::first(instance, &[&[field]], cell::count);
    let gpu_instance = number("gpu_instance_id");
    let compute_instance = number("compute_instance_id");
    let profile = tree::first(instance, &[&["profile"], &["name"]], cell::name);
    let mut found = Found::new(parent.vendor);
    found.index = number("index");
    found.uuid = tree::first(instance, &[&["uuid"], &["mig_uuid"]], cell::name);
    found.name = parent.name.as_deref().map(|parent| name(parent, profile.as_deref()).into());
    found.pci = parent.pci;
    found.mig = Some(true);
    found.driver = parent.driver.clone();
    found.memory = gpu::memory(instance, parent.driver.as_deref());
    found.utilization = tree::told(instance, &["utilization"], &["gpu_util", "gpu"], cell::percent);
    if let Some(gpu_instance) = gpu_instance {
        found.processes = processes::in_instance(gpu, gpu_instance, compute_instance);
    }
    found.health = parent.health.clone();
    found.partition =
        Some(Partition::Mig { parent_uuid: parent.uuid.clone(), gpu_instance, compute_instance, profile });
    found
}

/// What the driver calls an instance: the name of the GPU and the profile, as far as that is known.
pub(crate) fn name(parent: &str, profile: Option<&str>) -> String {
    profile.map_or_else(|| parent.to_owned(), |profile| format!("{parent} MIG {profile}"))
}

/// Adds what a list of devices says to an answer about the same devices, before their links are known.
///
/// Only the list has the UUIDs and profiles of instances, and it has neither their places nor the numbers of their
/// instances, so they are brought together by the number of their GPU and their own.
pub(crate) fn merge_list(snapshot: &mut Snapshot, list: Snapshot) {
    let listed = places(&list);
    let mut rest = Snapshot { warnings: list.warnings, ..Snapshot::default() };
    for (device, listed) in list.devices.into_iter().zip(listed) {
        let known = places(snapshot);
        match (listed, known.iter().position(|known| known.is_some() && *known == listed)) {
            (Some(_), Some(same)) => fill(&mut snapshot.devices[same], device),
            (Some((gpu, _)), None) => add(snapshot, gpu, device),
            (None, _) => drop(rest.push(device)),
        }
    }
    snapshot.merge(rest);
}

/// Adds an instance behind its GPU and the instances that are there already.
fn add(snapshot: &mut Snapshot, gpu: u32, mut instance: Found) {
    let is_parent = |device: &Found| device.index == Some(gpu) && device.partition.is_none();
    let Some(parent) = snapshot.devices.iter().position(is_parent) else {
        snapshot.push(instance);
        return;
    };
    if let Some(parent) = snapshot.devices.get(parent) {
        instance.pci = parent.pci;
        instance.driver = parent.driver.clone();
        instance.health = parent.health.clone();
    }
    let after = snapshot.devices.iter().skip(parent + 1).take_while(|device| device.partition.is_some()).count();
    if let Some(last) = snapshot.push(instance) {
        snapshot.devices[parent + 1 + after..=last].rotate_right(1);
    }
}

/// For each device the number of its GPU and its own, where it is an instance; instances follow their GPU.
fn places(snapshot: &Snapshot) -> Vec<Option<(u32, u32)>> {
    let mut gpu = None;
    let place = |device: &Found| match device.partition {
        Some(Partition::Mig { .. }) => Some((gpu?, device.index?)),
        _ => {
            gpu = device.index;
            None
        }
    };
    snapshot.devices.iter().map(place).collect()
}

fn fill(device: &mut Found, listed: Found) {
    if let Some(Partition::Mig { profile: known @ None, .. }) = &mut device.partition
        && let Some(Partition::Mig { profile: Some(profile), .. }) = &listed.partition
    {
        *known = Some(profile.clone());
        device.name = device.name.take().map(|parent| name(&parent, Some(profile)).into());
    }
    device.fill_from(listed);
}
