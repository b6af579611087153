//! Limits on the memory of devices: the `dmem` controller of v2, from kernel 6.14 on.
//!
//! A driver that takes part names its memory by regions such as `drm/0000:03:00.0/vram0`, and each group has a limit for
//! each region. Written after the kernel's documentation and tried on directories that look like it: no machine with such
//! a driver was at hand.

use std::path::Path;

use super::error::{At, GroupError};
use super::group::Group;
use super::limit::write;

/// How much memory of one device may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device: `0000:03:00.0`, in any length of its first part.
    pub pci_address: String,
    /// Bytes, in each region of the device's memory.
    pub bytes: u64,
}

impl Group {
    /// Limits the memory of these devices; beyond it the driver refuses to give more. Fails on the first that cannot be
    /// limited.
    pub fn limit_device_memory(&self, limits: &[DeviceMemory]) -> Result<(), GroupError> {
        let not = |why: String| GroupError::NotEnforceable { limit: "GPU memory", why };
        if limits.is_empty() {
            return Ok(());
        }
        let part = self.part_with(|part| part.dmem).ok_or_else(|| not(NO_CONTROLLER.to_owned()))?;
        write_limits(&part.path.join("dmem.max"), limits)?
            .map_or(Ok(()), |address| Err(not(format!("the driver of {address} does not take part in it"))))
    }
}

/// Why GPU memory is not limited where there is no controller for it.
pub(crate) const NO_CONTROLLER: &str = "no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here";

/// Writes a limit for every region of each device; gives the address of the first device that has none.
fn write_limits<'a>(file: &Path, limits: &'a [DeviceMemory]) -> Result<Option<&'a str>, GroupError> {
    // Every group lists every region, so the top group, which alone tells capacities, need not be visible.
    let regions = std::fs::read_to_string(file).at("reading", file)?;
    for limit in limits {
        let of_device = |name: &&str| name.split('/').any(|part| is_same_device(part, &limit.pci_address));
        let names = regions.lines().filter_map(|line| line.split_ascii_whitespace().next());
        let names: Vec<&str> = names.filter(of_device).collect();
        if names.is_empty() {
            return Ok(Some(&limit.pci_address));
        }
        for name in names {
            write(file, &format!("{name} {}\n", limit.bytes))?;
        }
    }
    Ok(None)
}

/// The kernel writes the domain with four digits, NVIDIA's library with eight, in capitals.
fn is_same_device(one: &str, other: &str) -> bool {
    fn parts(address: &str) -> Option<(u32, u32, u32, u32)> {
        let (bus_and_domain, function) = address.rsplit_once('.')?;
        let mut parts = bus_and_domain.split(':').map(|part| u32::from_str_radix(part, 16).ok());
        let found = (parts.next()??, parts.next()??, parts.next()??, u32::from_str_radix(function, 16).ok()?);
        parts.next().is_none().then_some(found)
    }
    parts(one).is_some_and(|one| parts(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_compared_by_what_they_mean() {
        assert!(is_same_device("0000:0a:00.0", "00000000:0A:00.0"));
        for other in ["0000:0a:00.1", "0001:0a:00.0", "0a:00.0", "", "drm", "0000:0a:00.0:1"] {
            assert!(!is_same_device("0000:0a:00.0", other), "{other}");
        }
    }

    #[test]
    fn each_region_of_the_device_is_limited_and_a_device_without_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dmem.max");
        std::fs::write(&file, "drm/0000:03:00.0/vram0 max\n").unwrap();
        let limit = |address: &str, bytes| DeviceMemory { pci_address: address.into(), bytes };
        assert_eq!(write_limits(&file, &[limit("00000000:03:00.0", 1 << 30)]).unwrap(), None);
        // The kernel takes a line at a time; a plain file shows the last one over what was there.
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("drm/0000:03:00.0/vram0 1073741824\n"));
        assert_eq!(write_limits(&file, &[limit("0000:04:00.0", 1)]).unwrap(), Some("0000:04:00.0"));
    }
}
