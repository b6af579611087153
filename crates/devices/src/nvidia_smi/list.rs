//! `nvidia-smi -L`: GPUs by number, name and UUID, and the instances they are cut into.

use std::sync::Arc;

use gpupool_core::Vendor;

use crate::detected_device::{DetectedDevice, DevicePartition};
use crate::nvidia_smi::errors;
use crate::nvidia_smi::gpu::{count, instance_name, known_name};
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi -L";

/// Whether a text is such a list.
pub(crate) fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !errors::looks_like(line));
    lines.next().is_some_and(|line| gpu(line).is_some()) && !lines.any(is_link)
}

/// Whether a line is of `nvidia-smi nvlink -s`, which lists the links below each GPU.
fn is_link(line: &str) -> bool {
    line.trim_start().starts_with("Link ") || line.to_ascii_lowercase().contains("nvlink")
}

/// The devices of a list. Nothing is known of their state.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::around(text, |text| {
        let mut snapshot = SourceReading::default();
        let mut parent = None;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if line.contains("(UUID:") && !line.contains(')') {
                snapshot.warn(format!("the list ends early: {}", truncate_text(line.trim())));
            }
            if let Some(device) = gpu(line) {
                parent = snapshot.push(device);
            } else if let Some(device) = instance(line, parent.and_then(|place: usize| snapshot.devices.get_mut(place)))
            {
                snapshot.push(device);
            } else {
                snapshot.warn(format!("not understood: {}", truncate_text(line.trim())));
            }
        }
        if snapshot.devices.is_empty() && !snapshot.warnings.is_empty() {
            return Err(SourceError::malformed(NAME, snapshot.warnings.swap_remove(0)));
        }
        Ok(snapshot)
    })
}

/// A line `GPU 0: NAME (UUID: GPU-…)`.
pub(crate) fn gpu(line: &str) -> Option<DetectedDevice> {
    let (index, rest) = line.trim().strip_prefix("GPU ")?.split_once(':')?;
    let index = count(index)?;
    let rest = rest.strip_prefix(' ')?;
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = Some(index);
    found.name = known_name(rest.rsplit_once(" (").map_or(rest, |(name, _)| name));
    found.uuid = uuid(rest);
    Some(found)
}

/// A line `MIG 1g.10gb  Device  0: (UUID: MIG-…)` below that of its GPU, which is thereby known to be cut.
fn instance(line: &str, parent: Option<&mut DetectedDevice>) -> Option<DetectedDevice> {
    let (profile, rest) = line.trim().strip_prefix("MIG ")?.split_once(" Device ")?;
    let (index, rest) = rest.split_once(':')?;
    let profile: Option<Arc<str>> = known_name(profile);
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = count(index);
    found.mig = Some(true);
    found.uuid = uuid(rest);
    // Old drivers name an instance by its GPU and the numbers of its instances: `MIG-GPU-…/7/0`.
    let mut parts = found.uuid.as_deref().unwrap_or_default().split('/').skip(1).map(count);
    let (gpu_instance, compute_instance) = (parts.next().flatten(), parts.next().flatten());
    let mut parent_uuid = None;
    if let Some(parent) = parent {
        parent.mig = Some(true);
        parent_uuid = parent.uuid.clone();
        found.name = parent.name.as_deref().map(|parent| instance_name(parent, profile.as_deref()).into());
    }
    found.partition = Some(DevicePartition::Mig { parent_uuid, gpu_instance, compute_instance, profile });
    Some(found)
}

fn uuid(text: &str) -> Option<Arc<str>> {
    let (_, rest) = text.rsplit_once("(UUID:")?;
    // Without its end it may be cut off.
    known_name(rest.split_once(')')?.0)
}

/// Adds what a list of devices says to an answer about the same devices, before their links are known.
///
/// Only the list has the UUIDs and profiles of instances, and it has neither their places nor the numbers of their
/// instances, so they are brought together by the number of their GPU and their own.
pub(crate) fn merge_list(snapshot: &mut SourceReading, list: SourceReading) {
    let listed = places(&list);
    let mut rest = SourceReading { warnings: list.warnings, ..SourceReading::default() };
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
fn add(snapshot: &mut SourceReading, gpu: u32, mut instance: DetectedDevice) {
    let is_parent = |device: &DetectedDevice| device.index == Some(gpu) && device.partition.is_none();
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
fn places(snapshot: &SourceReading) -> Vec<Option<(u32, u32)>> {
    let mut gpu = None;
    let place = |device: &DetectedDevice| match device.partition {
        Some(DevicePartition::Mig { .. }) => Some((gpu?, device.index?)),
        _ => {
            gpu = device.index;
            None
        }
    };
    snapshot.devices.iter().map(place).collect()
}

fn fill(device: &mut DetectedDevice, listed: DetectedDevice) {
    if let Some(DevicePartition::Mig { profile: known @ None, .. }) = &mut device.partition
        && let Some(DevicePartition::Mig { profile: Some(profile), .. }) = &listed.partition
    {
        *known = Some(profile.clone());
        device.name = device.name.take().map(|parent| instance_name(&parent, Some(profile)).into());
    }
    device.fill_from(listed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_and_their_instances_are_listed() {
        let text = "GPU 0: NVIDIA H100 (80 GB) (UUID: GPU-a)\n  MIG 3g.40gb     Device  0: (UUID: MIG-b)\n\
                    \x20 MIG 1g.5gb Device 2: (UUID: MIG-GPU-a/7/1)\nGPU 1: Tesla K20 (S/N: 1)\nwhat?\n";
        assert!(looks_like(text));
        let snapshot = parse(text).unwrap();
        let [parent, first, second, old] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!((parent.name.as_deref(), parent.uuid.as_deref()), (Some("NVIDIA H100 (80 GB)"), Some("GPU-a")));
        assert_eq!((parent.mig, parent.health.clone()), (Some(true), None));
        assert_eq!((first.uuid.as_deref(), first.index), (Some("MIG-b"), Some(0)));
        assert_eq!(first.name.as_deref(), Some("NVIDIA H100 (80 GB) MIG 3g.40gb"));
        let expected = DevicePartition::Mig {
            parent_uuid: Some("GPU-a".into()),
            gpu_instance: Some(7),
            compute_instance: Some(1),
            profile: Some("1g.5gb".into()),
        };
        assert_eq!(second.partition, Some(expected));
        assert_eq!((old.index, old.uuid.as_deref(), old.mig), (Some(1), None, None));
        assert_eq!(snapshot.warnings, ["not understood: what?"]);
    }
}
