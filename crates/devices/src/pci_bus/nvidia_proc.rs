//! What NVIDIA's kernel driver tells in procfs, without its library.

use std::fs;
use std::path::Path;

use gpupool_core::device::{Health, PciAddress, Vendor};
use gpupool_core::units::Bytes;

use crate::found::Found;
use crate::told::Told;
use crate::{address, kernel_file, limits};

/// The GPUs that the driver lists under `driver/nvidia/gpus` of procfs, in the order of their addresses.
pub(crate) fn gpus(proc: &Path) -> Vec<Found> {
    let folders = fs::read_dir(proc.join("driver/nvidia/gpus")).into_iter().flatten().flatten();
    let listed = folders.filter_map(|entry| Some((entry.file_name().to_str().and_then(address::parse)?, entry.path())));
    let mut listed: Vec<_> = listed.take(limits::DEVICES).collect();
    listed.sort();
    let version = driver_version(proc);
    let gpu = |(pci, folder): (PciAddress, std::path::PathBuf)| {
        let mut device = Found::new(Vendor::Nvidia);
        device.pci = Some(pci);
        device.driver = version.value().map(|version| version.as_str().into());
        let text = |file: &str| kernel_file::text(&folder.join(file)).value().cloned().unwrap_or_default();
        take_information(&mut device, &text("information"));
        take_memory(&mut device, &text("numa_status"));
        device.asleep = key(&text("power"), "Video Memory") == Some("Off");
        device
    };
    listed.into_iter().map(gpu).collect()
}

/// The version of the loaded driver, from `driver/nvidia/version` of procfs.
pub(crate) fn driver_version(proc: &Path) -> Told<String> {
    match kernel_file::text(&proc.join("driver/nvidia/version")) {
        Told::Value(text) => match version_in(text.lines().next().unwrap_or_default()) {
            Some(version) => Told::Value(version.to_owned()),
            None => Told::Failed(crate::told::words(&text)),
        },
        Told::Unsupported(words) => Told::Unsupported(words),
        Told::Failed(words) => Told::Failed(words),
    }
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …`.
pub(crate) fn version_in(line: &str) -> Option<&str> {
    let (_, after) = line.split_once("Kernel Module")?;
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    after.split_whitespace().find(is_version)
}

/// Model, UUID and minor number. A GPU the driver has not started yet shows its UUID as question marks.
fn take_information(device: &mut Found, text: &str) {
    let words = |text: &str| crate::told::words(text).into();
    device.name = key(text, "Model").filter(|model| *model != "Unknown").map(words);
    device.uuid = key(text, "GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?')).map(words);
    device.minor = key(text, "Device Minor").and_then(|minor| minor.parse().ok());
    device.pci = key(text, "Bus Location").and_then(address::parse).or(device.pci);
    if key(text, "GPU Excluded") == Some("Yes") {
        device.health = Some(Health::Unhealthy("excluded from use by a setting of the driver".into()));
    }
}

/// Where the processor can address the GPU's memory, the driver tells its size, in hexadecimal bytes.
fn take_memory(device: &mut Found, text: &str) {
    if let Some(size) = key(text, "Size").filter(|size| !size.is_empty()) {
        let digits = size.trim_start_matches("0x");
        let bytes = u64::from_str_radix(digits, 16).ok().filter(|&bytes| bytes > 0);
        device.memory.total =
            bytes.map_or_else(|| Told::Failed(crate::told::words(size)), |bytes| Told::Value(Bytes(bytes)));
    }
}

/// The value of a line `Key:   value`.
fn key<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_either_kernel_module_is_found() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@b)\nGCC 12.3.0";
        assert_eq!(version_in(closed), Some("535.183.01"));
        assert_eq!(version_in(open), Some("570.86.15"));
        assert_eq!(version_in("GCC version: 12.3.0"), None);
    }
}
