//! Variables that hide devices from programs: stale, contradictory, or hiding all.

use gpupool_core::device::Vendor;

use super::{Finding, Severity};
use crate::doctor::evidence::Evidence;
use crate::found::{Found, Partition};

const CUDA: &str = "CUDA_VISIBLE_DEVICES";
const ROCR: &str = "ROCR_VISIBLE_DEVICES";
const HIP: &str = "HIP_VISIBLE_DEVICES";
const NVIDIA: &str = "NVIDIA_VISIBLE_DEVICES";

/// An entry that names no device; the list ends there.
pub(super) fn invalid_entries(evidence: &Evidence) -> Vec<Finding> {
    let devices = evidence.machine().devices;
    let vendors = [(CUDA, Vendor::Nvidia), (ROCR, Vendor::Amd), (HIP, Vendor::Amd)];
    let finding = |(name, vendor): (&'static str, Vendor)| {
        let value = evidence.variables.get(name).filter(|value| !hides_all(value))?;
        let known: Vec<&Found> = devices.iter().filter(|device| device.vendor == vendor).collect();
        let seen_by_hip = (name == HIP).then(|| evidence.variables.get(ROCR)).flatten();
        let count = match seen_by_hip {
            Some(left) => entries(left).count(),
            None => known.iter().filter(|device| !is_mig(device)).count(),
        };
        if known.is_empty() {
            return None;
        }
        let wrong = entries(value).position(|entry| !names_a_device(entry, count, &known))?;
        let entry = entries(value).nth(wrong)?;
        let summary = format!("{name} names a device that does not exist, so programs see {wrong} devices of it.");
        let remedy = format!(
            "Unset {name} or correct it. The list ends at the first entry that is invalid; numbers go from 0 to {}.",
            count.saturating_sub(1)
        );
        let lines = [format!("{name}={value}"), format!("no device is meant by {entry:?}")];
        Some(Finding::new("visible_devices_invalid", Severity::Warning, summary, remedy).because(lines))
    };
    vendors.into_iter().filter_map(finding).collect()
}

/// A variable that hides every device.
pub(super) fn hide_all(evidence: &Evidence) -> Vec<Finding> {
    let finding = |(name, value): (&&'static str, &String)| {
        let hides = match *name {
            // What the container runtime reads; outside of a container it means nothing.
            NVIDIA => evidence.in_container() && matches!(value.trim(), "" | "none" | "void"),
            _ => hides_all(value),
        };
        if !hides {
            return None;
        }
        let remedy = match *name {
            NVIDIA => "Start the container with `--gpus all` or NVIDIA_VISIBLE_DEVICES=all.".to_owned(),
            _ => format!("Unset it (`unset {name}`) if programs started from here should see GPUs."),
        };
        let summary = format!("{name} hides every GPU from programs.");
        let line = [format!("{name}={value:?}")];
        Some(Finding::new("visible_devices_hide_all", Severity::Warning, summary, remedy).because(line))
    };
    evidence.variables.iter().filter_map(finding).collect()
}

/// Two variables of which the second counts in what the first leaves.
pub(super) fn both_amd(evidence: &Evidence) -> Vec<Finding> {
    let (Some(rocr), Some(hip)) = (evidence.variables.get(ROCR), evidence.variables.get(HIP)) else {
        return Vec::new();
    };
    let summary = format!("{ROCR} and {HIP} are both set, and the second counts in what the first leaves.");
    let remedy = format!("Keep {ROCR} and unset {HIP}: set to the same number they can leave no device at all.");
    let lines = [format!("{ROCR}={rocr}"), format!("{HIP}={hip}")];
    vec![Finding::new("visible_devices_both", Severity::Warning, summary, remedy).because(lines)]
}

fn entries(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim)
}

fn hides_all(value: &str) -> bool {
    let first = entries(value).next().unwrap_or_default();
    first.is_empty() || first.starts_with('-') || first == "NoDevFiles"
}

/// Whether an entry is a number below `count` or the beginning of a UUID that one device has.
fn names_a_device(entry: &str, count: usize, known: &[&Found]) -> bool {
    if let Ok(number) = entry.parse::<usize>() {
        return number < count;
    }
    // The older name of a MIG instance is that of its GPU with two numbers.
    if let Some((gpu, _)) = entry.strip_prefix("MIG-").and_then(|name| name.split_once('/')) {
        return known.iter().any(|device| device.uuid.as_deref() == Some(gpu));
    }
    let has_prefix = |uuid: &str| uuid.get(..entry.len()).is_some_and(|start| start.eq_ignore_ascii_case(entry));
    // Where a UUID is not known it may be the one that is meant.
    !entry.is_empty() && known.iter().any(|device| device.uuid.as_deref().is_none_or(has_prefix))
}

fn is_mig(device: &Found) -> bool {
    matches!(device.partition, Some(Partition::Mig { .. }))
}

#[cfg(test)]
mod tests {
    use super::super::examine;
    use super::super::samples::{amd, codes, contained, nvidia};
    use super::*;

    fn with(mut evidence: Evidence, variables: &[(&'static str, &str)]) -> Evidence {
        evidence.variables = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        evidence
    }

    #[test]
    fn lists_of_devices_that_exist_are_fine() {
        for value in [
            "0",
            "1,0",
            "GPU-0",
            "GPU-00000000-0000-0000-0000-000000000001",
            "MIG-GPU-00000000-0000-0000-0000-000000000001/1/0",
        ] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), [""; 0], "{value}");
        }
        assert_eq!(codes(&with(amd(), &[(ROCR, "GPU-00000000000000a1,0")])), [""; 0]);
        assert_eq!(codes(&with(amd(), &[(HIP, "1")])), [""; 0]);
    }

    #[test]
    fn an_entry_that_names_no_device_is_found() {
        for value in ["2", "0,7", "GPU-deadbeef", "0,,1", "MIG-GPU-dead/1/0"] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), ["visible_devices_invalid"], "{value}");
        }
        assert_eq!(codes(&with(amd(), &[(ROCR, "5")])), ["visible_devices_invalid"]);
        let finding = &examine(&with(nvidia(), &[(CUDA, "0,7")]))[0];
        assert!(finding.summary.contains("see 1 devices"), "{}", finding.summary);
    }

    #[test]
    fn a_list_that_hides_all_is_found() {
        for value in ["", "-1", "NoDevFiles"] {
            assert_eq!(codes(&with(nvidia(), &[(CUDA, value)])), ["visible_devices_hide_all"], "{value}");
        }
        assert_eq!(codes(&with(nvidia(), &[(NVIDIA, "void")])), [""; 0]);
        assert_eq!(codes(&with(contained(nvidia()), &[(NVIDIA, "void")])), ["visible_devices_hide_all"]);
    }

    #[test]
    fn two_variables_of_amd_at_once_are_found_and_counted_one_in_the_other() {
        assert_eq!(codes(&with(amd(), &[(ROCR, "0,1"), (HIP, "1")])), ["visible_devices_both"]);
        let nothing_left = codes(&with(amd(), &[(ROCR, "1"), (HIP, "1")]));
        assert_eq!(nothing_left, ["visible_devices_invalid", "visible_devices_both"]);
    }
}
