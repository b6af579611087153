//! `nvidia-smi -L`: GPUs by number, name and UUID, and the instances they are cut into.

use std::sync::Arc;

use gpupool_core::device::Vendor;

use super::{cell, errors, mig, nvlink};
use crate::found::{Found, Partition};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::told::words;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi -L";

/// Whether a text is such a list.
pub fn looks_like(text: &str) -> bool {
    text.lines().any(|line| gpu(line).is_some()) && !nvlink::looks_like(text)
}

/// The devices of a list. Nothing is known of their state.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let mut snapshot = Snapshot::default();
        let mut parent = None;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if line.contains("(UUID:") && !line.contains(')') {
                snapshot.warn(format!("the list ends early: {}", words(line.trim())));
            }
            if let Some(device) = gpu(line) {
                parent = snapshot.push(device);
            } else if let Some(device) = instance(line, parent.and_then(|place: usize| snapshot.devices.get_mut(place)))
            {
                snapshot.push(device);
            } else {
                snapshot.warn(format!("not understood: {}", words(line.trim())));
            }
        }
        if snapshot.devices.is_empty() && !snapshot.warnings.is_empty() {
            return Err(SourceError::malformed(NAME, snapshot.warnings.swap_remove(0)));
        }
        Ok(snapshot)
    })
}

/// A line `GPU 0: NAME (UUID: GPU-…)`.
pub(crate) fn gpu(line: &str) -> Option<Found> {
    let (index, rest) = line.trim().strip_prefix("GPU ")?.split_once(':')?;
    let index = cell::count(index)?;
    let rest = rest.strip_prefix(' ')?;
    let mut found = Found::new(Vendor::Nvidia);
    found.index = Some(index);
    found.name = cell::name(rest.rsplit_once(" (").map_or(rest, |(name, _)| name));
    found.uuid = uuid(rest);
    Some(found)
}

/// A line `MIG 1g.10gb  Device  0: (UUID: MIG-…)` below that of its GPU, which is thereby known to be cut.
fn instance(line: &str, parent: Option<&mut Found>) -> Option<Found> {
    let (profile, rest) = line.trim().strip_prefix("MIG ")?.split_once(" Device ")?;
    let (index, rest) = rest.split_once(':')?;
    let profile: Option<Arc<str>> = cell::name(profile);
    let mut found = Found::new(Vendor::Nvidia);
    found.index = cell::count(index);
    found.mig = Some(true);
    found.uuid = uuid(rest);
    // Old drivers name an instance by its GPU and the numbers of its instances: `MIG-GPU-…/7/0`.
    let mut parts = found.uuid.as_deref().unwrap_or_default().split('/').skip(1).map(cell::count);
    let (gpu_instance, compute_instance) = (parts.next().flatten(), parts.next().flatten());
    let mut parent_uuid = None;
    if let Some(parent) = parent {
        parent.mig = Some(true);
        parent_uuid = parent.uuid.clone();
        found.name = parent.name.as_deref().map(|parent| mig::name(parent, profile.as_deref()).into());
    }
    found.partition = Some(Partition::Mig { parent_uuid, gpu_instance, compute_instance, profile });
    Some(found)
}

fn uuid(text: &str) -> Option<Arc<str>> {
    let (_, rest) = text.rsplit_once("(UUID:")?;
    // Without its end it may be cut off.
    cell::name(rest.split_once(')')?.0)
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
        let expected = Partition::Mig {
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
