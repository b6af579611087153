//! `nvidia-smi -L`: GPUs by index, name and UUID, with their MIG instances.

use std::sync::Arc;

use gpupool_core::Vendor;

use crate::detected_device::{DetectedDevice, DevicePartition};
use crate::nvidia_smi::errors;
use crate::nvidia_smi::gpu::{instance_name, known_name, parse_count};
use crate::reported::truncate_text;
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Name of this format in messages.
pub(super) const NAME: &str = "nvidia-smi -L";

/// Whether a text is such a list.
pub(crate) fn looks_like(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !errors::looks_like(line));
    lines.next().is_some_and(|line| parse_gpu_line(line).is_some()) && !lines.any(is_nvlink_line)
}

/// Whether a line is from `nvidia-smi nvlink -s`, which lists the links of each GPU.
fn is_nvlink_line(line: &str) -> bool {
    line.trim_start().starts_with("Link ") || line.to_ascii_lowercase().contains("nvlink")
}

/// Returns the devices of a list, without values.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::parse_with_messages(text, |text| {
        let mut reading = SourceReading::default();
        let mut parent = None;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if line.contains("(UUID:") && !line.contains(')') {
                reading.warn(format!("the list ends early: {}", truncate_text(line.trim())));
            }
            if let Some(device) = parse_gpu_line(line) {
                parent = reading.push(device);
            } else if let Some(device) =
                parse_instance(line, parent.and_then(|place: usize| reading.devices.get_mut(place)))
            {
                reading.push(device);
            } else {
                reading.warn(format!("unknown line: {}", truncate_text(line.trim())));
            }
        }
        if reading.devices.is_empty() && !reading.warnings.is_empty() {
            return Err(SourceError::malformed(NAME, reading.warnings.swap_remove(0)));
        }
        Ok(reading)
    })
}

/// Parses a line `GPU 0: NAME (UUID: GPU-…)`.
pub(crate) fn parse_gpu_line(line: &str) -> Option<DetectedDevice> {
    let (index, rest) = line.trim().strip_prefix("GPU ")?.split_once(':')?;
    let index = parse_count(index)?;
    let rest = rest.strip_prefix(' ')?;
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = Some(index);
    found.name = known_name(rest.rsplit_once(" (").map_or(rest, |(name, _)| name));
    found.uuid = parse_uuid(rest);
    Some(found)
}

/// Parses a line `MIG 1g.10gb  Device  0: (UUID: MIG-…)` below the line of its GPU, whose MIG mode is therefore on.
fn parse_instance(line: &str, parent: Option<&mut DetectedDevice>) -> Option<DetectedDevice> {
    let (profile, rest) = line.trim().strip_prefix("MIG ")?.split_once(" Device ")?;
    let (index, rest) = rest.split_once(':')?;
    let profile: Option<Arc<str>> = known_name(profile);
    let mut found = DetectedDevice::new(Vendor::Nvidia);
    found.index = parse_count(index);
    found.mig = Some(true);
    found.uuid = parse_uuid(rest);
    // Old drivers identify an instance by its GPU and the ids of its GPU and compute instances: `MIG-GPU-…/7/0`.
    let mut parts = found.uuid.as_deref().unwrap_or_default().split('/').skip(1).map(parse_count);
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

fn parse_uuid(text: &str) -> Option<Arc<str>> {
    let (_, rest) = text.rsplit_once("(UUID:")?;
    // Without its end it may be truncated.
    known_name(rest.split_once(')')?.0)
}

/// Merges a list of devices into a reading of the same devices, before their links are known.
///
/// Only the list has the UUIDs and profiles of instances, but it lacks PCI addresses and instance ids. Instances are
/// therefore matched by the index of their GPU and their own index.
pub(crate) fn merge_list(reading: &mut SourceReading, list: SourceReading) {
    let listed = mig_positions(&list);
    let mut rest = SourceReading { warnings: list.warnings, ..SourceReading::default() };
    for (device, listed) in list.devices.into_iter().zip(listed) {
        let known = mig_positions(reading);
        match (listed, known.iter().position(|known| known.is_some() && *known == listed)) {
            (Some(_), Some(same)) => merge_listed(&mut reading.devices[same], device),
            (Some((gpu, _)), None) => insert_instance(reading, gpu, device),
            (None, _) => drop(rest.push(device)),
        }
    }
    reading.merge(rest);
}

/// Inserts an instance after its GPU and the earlier instances.
fn insert_instance(reading: &mut SourceReading, gpu: u32, mut instance: DetectedDevice) {
    let is_parent = |device: &DetectedDevice| device.index == Some(gpu) && device.partition.is_none();
    let Some(parent) = reading.devices.iter().position(is_parent) else {
        reading.push(instance);
        return;
    };
    if let Some(parent) = reading.devices.get(parent) {
        instance.pci = parent.pci;
        instance.driver = parent.driver.clone();
        instance.health = parent.health.clone();
    }
    let after = reading.devices.iter().skip(parent + 1).take_while(|device| device.partition.is_some()).count();
    if let Some(last) = reading.push(instance) {
        reading.devices[parent + 1 + after..=last].rotate_right(1);
    }
}

/// Returns the index of the GPU and the own index of each instance; instances follow their GPU.
fn mig_positions(reading: &SourceReading) -> Vec<Option<(u32, u32)>> {
    let mut gpu = None;
    let place = |device: &DetectedDevice| match device.partition {
        Some(DevicePartition::Mig { .. }) => Some((gpu?, device.index?)),
        _ => {
            gpu = device.index;
            None
        }
    };
    reading.devices.iter().map(place).collect()
}

fn merge_listed(device: &mut DetectedDevice, listed: DetectedDevice) {
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
        let reading = parse(text).unwrap();
        let [parent, first, second, old] = &reading.devices[..] else { panic!("{reading:?}") };
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
        assert_eq!(reading.warnings, ["unknown line: what?"]);
    }
}
