//! Environment variables that show a job its devices, in their order, and no others.
//!
//! These variables are a convention between programs, not isolation: a job can unset them.

use std::collections::BTreeMap;

use gpupool_core::Vendor;

use crate::detected_device::DetectedDevice;

/// CUDA's list of devices; HIP reads it too.
const CUDA: &str = "CUDA_VISIBLE_DEVICES";
/// Order in which CUDA numbers devices.
const CUDA_DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// ROCm's list of devices, applied before HIP's.
const ROCR: &str = "ROCR_VISIBLE_DEVICES";
/// Lists that apply to the result of ROCR, so they are cleared.
const HIP: [&str; 2] = ["HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];

/// Variables to set and to clear before a job starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobEnvironment {
    /// Values by variable name; `None` means that the variable must not be set.
    pub variables: BTreeMap<&'static str, Option<String>>,
    /// Limitations of the variables, for people.
    pub caveats: Vec<String>,
}

impl JobEnvironment {
    /// Returns the environment for the devices at the indices `given` of `all`, the devices of the node.
    ///
    /// NVIDIA devices are named by full UUIDs, AMD devices by unique ids. If a UUID is missing or not unique, the
    /// numbers of the vendor's runtime are used: PCI order for CUDA, the kernel's order for ROCm.
    pub fn new<'a>(all: impl IntoIterator<Item = &'a DetectedDevice>, given: &[usize]) -> Self {
        let all: Vec<&DetectedDevice> = all.into_iter().collect();
        let chosen: Vec<&DetectedDevice> = given.iter().filter_map(|&position| all.get(position).copied()).collect();
        let of = |vendor| chosen.iter().filter(move |device| device.vendor == vendor).copied().collect::<Vec<_>>();
        let (nvidia, amd) = (of(Vendor::Nvidia), of(Vendor::Amd));
        let mut environment = Self::default();
        for name in [CUDA, CUDA_DEVICE_ORDER, ROCR].iter().chain(&HIP) {
            environment.variables.insert(name, None);
        }
        if !amd.is_empty() {
            let list = visible_list(&all, &amd, Vendor::Amd, |device| device.index);
            environment.variables.insert(ROCR, Some(list));
        }
        if amd.is_empty() || !nvidia.is_empty() {
            let list = visible_list(&all, &nvidia, Vendor::Nvidia, |device| device.pci);
            environment.variables.insert(CUDA, Some(list));
            environment.variables.insert(CUDA_DEVICE_ORDER, Some("PCI_BUS_ID".to_owned()));
        }
        if nvidia.len() > 1 && nvidia.iter().any(|device| device.is_mig_instance()) {
            let one = "CUDA shows a program one MIG instance at a time: the first of the list";
            environment.caveats.push(one.to_owned());
        }
        if !amd.is_empty() && !nvidia.is_empty() {
            environment.caveats.push(format!(
                "HIP reads {CUDA} as well: a program that uses NVIDIA and AMD devices at once will not see both"
            ));
        }
        environment
    }
}

/// Returns the list for a runtime: UUIDs if each is unique, else indices in the runtime's own order.
fn visible_list<K: Ord>(
    all: &[&DetectedDevice],
    chosen: &[&DetectedDevice],
    vendor: Vendor,
    order: impl Fn(&DetectedDevice) -> Option<K>,
) -> String {
    let carriers = |uuid: &str| all.iter().filter(|device| device.uuid.as_deref() == Some(uuid)).count();
    let by_uuid: Option<Vec<String>> = chosen
        .iter()
        .map(|device| device.uuid.as_deref().filter(|uuid| carriers(uuid) == 1).map(ToOwned::to_owned))
        .collect();
    let by_position = || {
        let counts =
            |device: &&DetectedDevice| device.vendor == vendor && !device.is_mig_instance() && order(device).is_some();
        let mut ordered: Vec<&DetectedDevice> = all.iter().copied().filter(counts).collect();
        ordered.sort_by_key(|device| order(device));
        let position = |device: &&DetectedDevice| ordered.iter().position(|other| std::ptr::eq(*other, *device));
        chosen.iter().filter_map(position).map(|position| position.to_string()).collect()
    };
    by_uuid.unwrap_or_else(by_position).join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::parse_pci_address;
    use crate::detected_device::DevicePartition;

    fn device(vendor: Vendor, index: u32, uuid: Option<&str>, pci: &str) -> DetectedDevice {
        let mut found = DetectedDevice::new(vendor);
        found.index = Some(index);
        found.uuid = uuid.map(Into::into);
        found.pci = parse_pci_address(pci);
        found
    }

    fn set<'a>(environment: &'a JobEnvironment, name: &str) -> Option<&'a str> {
        environment.variables.get(name).unwrap_or_else(|| panic!("{name} is left as it was")).as_deref()
    }

    #[test]
    fn an_nvidia_job_gets_full_uuids_in_the_order_they_were_given() {
        let all = [
            device(Vendor::Nvidia, 0, Some("GPU-a"), "0000:01:00.0"),
            device(Vendor::Nvidia, 1, Some("GPU-b"), "0000:02:00.0"),
        ];
        let environment = JobEnvironment::new(&all, &[1, 0]);
        assert_eq!(set(&environment, "CUDA_VISIBLE_DEVICES"), Some("GPU-b,GPU-a"));
        assert_eq!(set(&environment, "CUDA_DEVICE_ORDER"), Some("PCI_BUS_ID"));
        assert_eq!(set(&environment, "ROCR_VISIBLE_DEVICES"), None);
    }

    #[test]
    fn without_uuids_of_their_own_devices_are_numbered_in_pci_order_whatever_order_they_were_listed_in() {
        let masked = Some("GPU-00000000");
        let all =
            [device(Vendor::Nvidia, 0, masked, "0000:81:00.0"), device(Vendor::Nvidia, 1, masked, "0000:01:00.0")];
        assert_eq!(set(&JobEnvironment::new(&all, &[0]), "CUDA_VISIBLE_DEVICES"), Some("1"));
    }

    #[test]
    fn an_amd_job_gets_only_rocr_and_the_others_are_cleared() {
        let all = [
            device(Vendor::Amd, 0, Some("GPU-0123456789abcdef"), "0000:c1:00.0"),
            device(Vendor::Nvidia, 0, Some("GPU-n"), "0000:01:00.0"),
        ];
        let environment = JobEnvironment::new(&all, &[0]);
        assert_eq!(set(&environment, "ROCR_VISIBLE_DEVICES"), Some("GPU-0123456789abcdef"));
        for cleared in ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"] {
            assert_eq!(set(&environment, cleared), None);
        }
    }

    #[test]
    fn partitions_of_one_amd_card_are_told_apart_by_number() {
        let part = |index| device(Vendor::Amd, index, Some("GPU-same"), "0000:c1:00.0");
        let all = [part(0), part(1), part(2), part(3)];
        assert_eq!(set(&JobEnvironment::new(&all, &[3, 1]), "ROCR_VISIBLE_DEVICES"), Some("3,1"));
    }

    #[test]
    fn a_job_without_a_device_sees_none() {
        assert_eq!(set(&JobEnvironment::new(&[], &[]), "CUDA_VISIBLE_DEVICES"), Some(""));
    }

    #[test]
    fn limitations_of_the_variables_are_caveats() {
        let mig = |uuid| {
            let mut found = device(Vendor::Nvidia, 0, Some(uuid), "0000:01:00.0");
            found.partition = Some(DevicePartition::Mig {
                parent_uuid: None,
                gpu_instance: Some(1),
                compute_instance: Some(0),
                profile: None,
            });
            found
        };
        let all = [mig("MIG-a"), mig("MIG-b"), device(Vendor::Amd, 0, Some("GPU-amd"), "0000:c1:00.0")];
        assert_eq!(JobEnvironment::new(&all, &[0, 1]).caveats.len(), 1);
        assert_eq!(JobEnvironment::new(&all, &[0]).caveats.len(), 0);
        assert_eq!(JobEnvironment::new(&all, &[0, 2]).caveats.len(), 1);
    }
}
