//! What the devices themselves report.

use gpupool_core::device::Health;
use gpupool_core::units::Percent;

use super::{Finding, Severity};
use crate::doctor::evidence::Evidence;
use crate::found::{Found, Partition};
use crate::told::Told;

/// From this temperature on a GPU slows down soon.
const HOT_C: i16 = 90;

/// A device is not there any more.
pub(super) fn lost(evidence: &Evidence) -> Vec<Finding> {
    let remedy = "It fell off the bus or stopped answering; other devices are not affected. Let their work end, then \
                  reboot. If it happens again, look at its power supply, cooling and seating (`dmesg`, Xid 79).";
    let finding = Finding::new("device_lost", Severity::Error, "A GPU is lost.", remedy);
    among(evidence, finding, |device| {
        (device.health == Some(Health::Lost)).then(|| "the driver says it is lost".to_owned())
    })
}

/// A device says that it is not well.
pub(super) fn unhealthy(evidence: &Evidence) -> Vec<Finding> {
    let remedy = "It takes no new work. Reset it when it is free (`nvidia-smi --gpu-reset -i <number>`, `amd-smi reset \
                  -G -g <number>`) or reboot; replace it if the errors come back.";
    let finding = Finding::new("device_unhealthy", Severity::Error, "A GPU is not healthy.", remedy);
    among(evidence, finding, |device| match &device.health {
        Some(Health::Unhealthy(why)) => Some(why.to_string()),
        _ => None,
    })
}

/// A device is about to slow down.
pub(super) fn hot(evidence: &Evidence) -> Vec<Finding> {
    let remedy = "Check fans, dust and air flow; lower the power limit (`nvidia-smi -pl <watts>`, `amd-smi set \
                  --power-cap <watts>`) until it is cooler.";
    let summary = format!("A GPU is at {HOT_C} °C or more and will slow down.");
    let finding = Finding::new("device_hot", Severity::Warning, summary, remedy);
    among(evidence, finding, |device| {
        let celsius = device.temperature_c.value().filter(|celsius| **celsius >= HOT_C)?;
        Some(format!("it is at {celsius} °C"))
    })
}

/// MIG is on and nothing is cut: the mode survives a reboot, the instances do not.
pub(super) fn mig_without_instances(evidence: &Evidence) -> Vec<Finding> {
    let machine = evidence.machine();
    let is_instance = |device: &Found| matches!(device.partition, Some(Partition::Mig { .. }));
    let has_instances = |gpu: &Found| {
        machine.devices.iter().filter(|device| is_instance(device)).any(|device| {
            let Some(Partition::Mig { parent_uuid, .. }) = &device.partition else { return false };
            let by_uuid = parent_uuid.is_some() && *parent_uuid == gpu.uuid;
            by_uuid || device.pci.is_some() && device.pci == gpu.pci
        })
    };
    let remedy = "Such a GPU can do no work. Cut it again (`sudo nvidia-smi mig -cgi <profiles> -C`; nvidia-mig-parted \
                  does it at each boot), or turn MIG off: `sudo nvidia-smi -i <number> -mig 0`.";
    let summary = "MIG is on but no instance is made: the configuration is lost at each reboot.";
    let finding = Finding::new("mig_without_instances", Severity::Warning, summary, remedy);
    among(evidence, finding, |device| {
        let bare = device.mig == Some(true) && !is_instance(device) && !has_instances(device);
        bare.then(|| "MIG mode is enabled and it has no instances".to_owned())
    })
}

/// A device counts itself fully busy with nobody on it.
pub(super) fn utilization_stuck(evidence: &Evidence) -> Vec<Finding> {
    // Elsewhere than on the host the list of processes is empty for another reason.
    if evidence.in_container() || evidence.confinement.host_pids.value() == Some(&false) {
        return Vec::new();
    }
    let remedy = "The counter is known to stick after a program was killed: the load is not real. It clears when a \
                  program uses the GPU and ends, or with a reset. gpupool refuses nothing by utilization alone.";
    let summary = "A GPU reports 100 % utilization with no process on it.";
    let finding = Finding::new("utilization_stuck", Severity::Warning, summary, remedy);
    among(evidence, finding, |device| {
        let nobody = matches!(&device.processes, Told::Value(processes) if processes.is_empty());
        let full = device.utilization.value().is_some_and(|busy| *busy >= Percent::FULL);
        (nobody && full).then(|| "utilization 100 %, no processes".to_owned())
    })
}

/// A device that shares the host's memory.
pub(super) fn unified_memory(evidence: &Evidence) -> Vec<Finding> {
    let remedy = "Nothing: such a GPU is shared by parts of its time, not by amounts of memory.";
    let summary = "A GPU shares the memory of the host and has none of its own.";
    let finding = Finding::new("unified_memory", Severity::Note, summary, remedy);
    among(evidence, finding, |device| device.memory.unified.then(|| "its memory is the host's".to_owned()))
}

/// The finding with every device that `seen` says something of, or nothing.
fn among(evidence: &Evidence, finding: Finding, seen: impl Fn(&Found) -> Option<String>) -> Vec<Finding> {
    let machine = evidence.machine();
    let identities = machine.identities();
    let devices = machine.devices.iter().zip(&identities);
    let found: Vec<(String, String)> = devices
        .filter_map(|(device, identity)| {
            let what = seen(device)?;
            // A whole GPU is named by its place, which other findings know too; a part of one by its own identity.
            let name = match (device.pci, &device.partition) {
                (Some(address), None) => address.to_string(),
                _ => identity.to_string(),
            };
            let model = device.name.as_deref().unwrap_or("unknown model");
            Some((format!("{name} ({model}): {what}"), name))
        })
        .collect();
    if found.is_empty() {
        return Vec::new();
    }
    let (lines, names): (Vec<String>, Vec<String>) = found.into_iter().unzip();
    vec![finding.because(lines).about(names)]
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, codes, contained, device_mut, nvidia};
    use super::*;
    use crate::found::Process;

    #[test]
    fn lost_and_unhealthy_devices_are_named_and_the_others_are_not() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 1).health = Some(Health::Lost);
        assert_eq!(codes(&evidence), ["device_lost"]);
        assert_eq!(examine(&evidence)[0].devices, ["0000:c1:00.0"]);
        device_mut(&mut evidence, 1).health = Some(Health::Unhealthy("row remap failed".into()));
        assert_eq!(codes(&evidence), ["device_unhealthy"]);
        assert!(examine(&evidence)[0].evidence[0].ends_with("row remap failed"));
    }

    #[test]
    fn a_hot_device_is_found() {
        let mut evidence = amd();
        device_mut(&mut evidence, 0).temperature_c = Told::Value(HOT_C - 1);
        assert_eq!(codes(&evidence), [""; 0]);
        device_mut(&mut evidence, 0).temperature_c = Told::Value(HOT_C);
        assert_eq!(codes(&evidence), ["device_hot"]);
    }

    #[test]
    fn mig_without_instances_is_found_and_with_instances_is_fine() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).mig = Some(true);
        assert_eq!(codes(&evidence), ["mig_without_instances"]);
        let mut instance = device_mut(&mut evidence, 0).clone();
        instance.uuid = Some("MIG-1".into());
        instance.partition =
            Some(Partition::Mig { parent_uuid: None, gpu_instance: Some(1), compute_instance: Some(0), profile: None });
        evidence.sources[0].result.as_mut().unwrap().devices.insert(1, instance);
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn full_utilization_is_only_strange_with_nobody_there_and_where_one_would_see_them() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).utilization = Told::Value(Percent::FULL);
        assert_eq!(codes(&evidence), ["utilization_stuck"]);
        assert_eq!(codes(&contained(evidence.clone())), [""; 0]);
        device_mut(&mut evidence, 0).processes = Told::Value(vec![Process::default()]);
        assert_eq!(codes(&evidence), [""; 0]);
        device_mut(&mut evidence, 0).processes = Told::ABSENT;
        assert_eq!(codes(&evidence), [""; 0]);
    }

    #[test]
    fn unified_memory_is_noted() {
        let mut evidence = nvidia();
        device_mut(&mut evidence, 0).memory.unified = true;
        assert_eq!(codes(&evidence), ["unified_memory"]);
    }
}
