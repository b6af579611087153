//! The kernel's files about AMD devices as a source: live ([`AmdSysfsSource`]), or from a captured tree ([`read`]).
//!
//! Two drivers describe a card. The graphics driver has an entry `cardN` with the files of its device and sensors
//! (`drm`, `card`, `gpu_metrics`); the compute driver has a topology of nodes with memory, links and partitions
//! (`kfd`). `inventory` joins the two, `processes` finds the processes on a device.
//!
//! The source never wakes a sleeping card, so it does not read the card's sensors.

mod card;
mod drm;
mod gpu_metrics;
mod inventory;
mod kfd;
mod processes;

pub(crate) use inventory::{looks_like, read};
pub(crate) use kfd::hops;
pub(crate) use processes::{looks_like_fdinfo, parse_fdinfo};

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::amd_sysfs::inventory::{AmdInventory, OtherVendorCards};
use crate::amd_sysfs::processes::ProcessScanner;
use crate::detect::SourcePaths;
use crate::kernel_file;
use crate::source::{DeviceSource, SourceError, SourceKind};
use crate::source_reading::SourceReading;

/// AMD devices in the kernel's files; needs no tool and no library.
#[derive(Debug)]
pub struct AmdSysfsSource {
    drm: PathBuf,
    kfd: PathBuf,
    module: PathBuf,
    proc: PathBuf,
    /// Fingerprint of the tree at the last scan, and the devices found.
    scanned: Option<(TreeFingerprint, AmdInventory)>,
}

/// State that changes when devices appear, vanish or are partitioned; cheap to read before each reading.
#[derive(Debug, PartialEq, Eq)]
struct TreeFingerprint {
    cards: Vec<(u32, Option<PathBuf>)>,
    /// The driver's count of changes to the compute topology.
    generation: Option<String>,
}

impl AmdSysfsSource {
    /// Creates a source that reads below `paths.sys` and `paths.proc`.
    pub fn new(paths: &SourcePaths) -> Self {
        Self {
            drm: paths.sys.join("class/drm"),
            kfd: paths.sys.join("class/kfd/kfd"),
            module: paths.sys.join("module/amdgpu"),
            proc: paths.proc.clone(),
            scanned: None,
        }
    }

    fn scan(&self, scanner: ProcessScanner) -> Result<AmdInventory, SourceError> {
        let cards = match drm::cards(&self.drm) {
            Ok(cards) => cards,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(SourceError::NoPermission(format!("{}: {error}", self.drm.display())));
            }
            Err(_) => Vec::new(),
        };
        let nodes = self.kfd.join("topology/nodes");
        let inventory = AmdInventory::new(cards, kfd::read(&nodes), OtherVendorCards::LeftOut);
        if inventory.is_empty() && !self.module.exists() && !nodes.exists() {
            let why = format!("neither {} nor an AMD card in {} exists", self.module.display(), self.drm.display());
            return Err(SourceError::NotPresent { what: "the amdgpu driver".into(), why });
        }
        let version =
            kernel_file::read_text(&self.module.join("version")).value().map(|version| version.as_str().into());
        Ok(inventory.with_scanner(version, scanner))
    }

    fn fingerprint(&self) -> TreeFingerprint {
        let numbers = drm::card_numbers(&self.drm).unwrap_or_default();
        let target = |number: u32| fs::read_link(self.drm.join(format!("card{number}"))).ok();
        TreeFingerprint {
            cards: numbers.into_iter().map(|number| (number, target(number))).collect(),
            generation: kernel_file::read_text(&self.kfd.join("topology/generation_id")).into_value(),
        }
    }

    fn rescan(&mut self) -> Result<&mut AmdInventory, SourceError> {
        let fresh = || ProcessScanner::new(Some(self.kfd.join("proc")), Some(self.proc.clone()));
        let scanner = self.scanned.take().map_or_else(fresh, |(_, inventory)| inventory.into_process_scanner());
        let scanned = (self.fingerprint(), self.scan(scanner)?);
        Ok(&mut self.scanned.insert(scanned).1)
    }
}

impl DeviceSource for AmdSysfsSource {
    fn kind(&self) -> SourceKind {
        SourceKind::AmdSysfs
    }

    fn read(&mut self) -> Result<SourceReading, SourceError> {
        let fingerprint = self.fingerprint();
        let unchanged = self.scanned.as_mut().filter(|(scanned, _)| *scanned == fingerprint);
        if let Some((_, inventory)) = unchanged {
            let (reading, is_stale) = inventory.read();
            if !is_stale {
                return Ok(reading);
            }
        }
        Ok(self.rescan()?.read().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::{DevicePartition, Milliwatts};
    use crate::reported::Reported;
    use gpupool_core::{Bytes, DeviceHealth, Percent, Vendor};

    fn source(tree: &SysfsTree) -> AmdSysfsSource {
        AmdSysfsSource::new(&tree.paths())
    }

    fn names(reading: &SourceReading) -> Vec<String> {
        reading.devices.iter().map(|device| device.pci.unwrap().to_string()).collect()
    }

    #[test]
    fn the_source_is_absent_without_a_driver_and_a_card() {
        let tree = SysfsTree::new();
        assert_eq!(source(&tree).read().unwrap_err().code(), "not_here");
        tree.file("class/drm/card0/device/vendor", "0x1a03");
        assert_eq!(source(&tree).read().unwrap_err().code(), "not_here");
        tree.folder("module/amdgpu");
        assert_eq!(source(&tree).read().unwrap(), SourceReading::default());
    }

    #[test]
    fn only_amd_cards_are_listed_with_their_driver_version() {
        let tree = SysfsTree::new();
        tree.amd_card(1, "0000:03:00.0", 0x744c);
        tree.amd_card(2, "0000:04:00.0", 0x744c);
        tree.file("class/drm/card0/device/vendor", "0x10de");
        tree.file("class/drm/card3/device/vendor", "0x8086");
        tree.file("module/amdgpu/version", "6.8.5\n");
        let reading = source(&tree).read().unwrap();
        assert_eq!(names(&reading), ["0000:03:00.0", "0000:04:00.0"]);
        assert_eq!(reading.devices[0].driver.as_deref(), Some("6.8.5"));
        assert_eq!(reading.warnings, Vec::<String>::new());
    }

    #[test]
    fn added_and_removed_cards_appear_in_the_next_reading() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut source = source(&tree);
        assert_eq!(names(&source.read().unwrap()), ["0000:03:00.0"]);
        tree.amd_card(1, "0000:04:00.0", 0x744c);
        assert_eq!(names(&source.read().unwrap()), ["0000:03:00.0", "0000:04:00.0"]);
        tree.remove("class/drm/card0");
        assert_eq!(names(&source.read().unwrap()), ["0000:04:00.0"]);
    }

    #[test]
    fn files_that_moved_are_found_again() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut source = source(&tree);
        source.read().unwrap();
        let hwmon = tree.path("class/drm/card0/device/hwmon");
        fs::rename(hwmon.join("hwmon5"), hwmon.join("hwmon6")).unwrap();
        assert_eq!(source.read().unwrap().devices[0].temperature_c, Reported::Value(61));
    }

    #[test]
    fn changing_values_are_read_each_time() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        let mut source = source(&tree);
        assert_eq!(source.read().unwrap().devices[0].utilization, Reported::Value(Percent(37_000)));
        tree.file("class/drm/card0/device/gpu_busy_percent", "99\n");
        assert_eq!(source.read().unwrap().devices[0].utilization, Reported::Value(Percent(99_000)));
    }

    #[test]
    fn a_file_the_kernel_refuses_fails_alone() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.remove("class/drm/card0/device/mem_info_vram_used");
        tree.refuse("class/drm/card0/device/mem_info_vram_used");
        let device = source(&tree).read().unwrap().devices.remove(0);
        assert!(matches!(device.memory.used, Reported::Failed(_)), "{:?}", device.memory.used);
        assert_eq!(device.temperature_c, Reported::Value(61));
        assert_eq!(device.health, Some(DeviceHealth::Healthy));
    }

    #[test]
    fn a_card_and_its_compute_node_are_one_device() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:03:00.0", 0x744c);
        tree.kfd_cpu(0);
        tree.kfd_gpu(1, "location_id 768\ndrm_render_minor 128\ndevice_id 29772", 4242, 1 << 40);
        tree.file("class/kfd/kfd/proc/900/vram_4242", "4096");
        let reading = source(&tree).read().unwrap();
        let [device] = reading.devices.as_slice() else { panic!("{reading:?}") };
        assert_eq!(device.memory.total, Reported::Value(Bytes(16 << 30)));
        assert_eq!(device.processes.value().unwrap()[0].pid, 900);
    }

    /// Creates a card in four partitions, of which all but the first are devices without a PCI address.
    fn partitioned_card(tree: &SysfsTree) {
        tree.amd_card(0, "0000:0a:00.0", 0x74a1);
        tree.file("class/drm/card0/device/current_compute_partition", "QPX\n");
        tree.kfd_cpu(0);
        for part in 0..4 {
            if part > 0 {
                let device = format!("class/drm/card{part}/device");
                tree.file(&format!("{device}/uevent"), "MODALIAS=platform:amdgpu_xcp_1\n");
                tree.folder(&format!("{device}/drm/renderD{}", 128 + part));
            }
            let properties = format!(
                "location_id {}\ndrm_render_minor {}\nunique_id 99\nnum_xcc 2\ndevice_id 29857\ngfx_target_version 90402",
                0x0a00_u32 | part << 28,
                128 + part
            );
            tree.kfd_gpu(1 + part, &properties, 70 + part, 48 << 30);
        }
    }

    #[test]
    fn each_partition_of_a_card_is_a_device_with_its_own_memory() {
        let tree = SysfsTree::new();
        partitioned_card(&tree);
        let reading = source(&tree).read().unwrap();
        assert_eq!(names(&reading), ["0000:0a:00.0"; 4]);
        for (id, device) in (0..).zip(&reading.devices) {
            assert_eq!(device.partition, Some(DevicePartition::Amd { id, mode: Some("QPX".into()), parts: Some(4) }));
            assert_eq!(device.memory.total, Reported::Value(Bytes(48 << 30)));
            assert_eq!(device.temperature_c, Reported::Value(61));
            assert_eq!(device.name.as_deref(), Some("AMD Instinct MI300X"));
            assert!(matches!(device.memory.used, Reported::Unsupported(_)));
            assert!(matches!(device.utilization, Reported::Unsupported(_)));
            assert_eq!(device.vendor, Vendor::Amd);
        }
        let powers: Vec<Option<&Milliwatts>> = reading.devices.iter().map(|device| device.power.value()).collect();
        assert_eq!(powers, [Some(&Milliwatts(42_500)), None, None, None]);
    }

    #[test]
    fn a_card_partitioned_at_run_time_is_rescanned() {
        let tree = SysfsTree::new();
        tree.amd_card(0, "0000:0a:00.0", 0x74a1);
        tree.file("class/kfd/kfd/topology/generation_id", "1\n");
        let mut source = source(&tree);
        assert_eq!(source.read().unwrap().devices[0].partition, None);
        tree.remove("class/drm/card0");
        partitioned_card(&tree);
        tree.file("class/kfd/kfd/topology/generation_id", "2\n");
        assert_eq!(source.read().unwrap().devices.len(), 4);
    }

    /// A temporary folder with a copy of `/sys` in `sys` and of `/proc` in `proc`.
    pub(crate) struct SysfsTree(tempfile::TempDir);

    impl SysfsTree {
        pub(super) fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.folder("");
            tree
        }

        /// Returns the paths for the source.
        pub(super) fn paths(&self) -> SourcePaths {
            SourcePaths { sys: self.path(""), proc: self.0.path().join("proc"), ..SourcePaths::default() }
        }

        pub(super) fn path(&self, path: &str) -> PathBuf {
            self.0.path().join("sys").join(path)
        }

        pub(super) fn file(&self, path: &str, content: impl AsRef<[u8]>) {
            let path = self.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        pub(super) fn folder(&self, path: &str) {
            fs::create_dir_all(self.path(path)).unwrap();
        }

        pub(super) fn link(&self, path: &str, target: &str) {
            let path = self.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, path).unwrap();
        }

        /// Makes a file unreadable: no memory is mapped at the start of its target.
        pub(super) fn refuse(&self, path: &str) {
            self.link(path, "/proc/self/mem");
        }

        pub(super) fn remove(&self, path: &str) {
            let path = self.path(path);
            if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(path).unwrap();
            } else {
                fs::remove_file(path).unwrap();
            }
        }

        /// Creates card `number` with the usual files of amdgpu: 16 GiB, 1 GiB of it used, 37 % busy, 61 °C, 42.5 of
        /// 300 W.
        pub(super) fn amd_card(&self, number: u32, pci: &str, device: u16) {
            let card = format!("class/drm/card{number}/device");
            self.file(
                &format!("{card}/uevent"),
                format!("DRIVER=amdgpu\nPCI_ID=1002:{device:04X}\nPCI_SLOT_NAME={pci}\n"),
            );
            for (file, content) in [
                ("vendor", "0x1002"),
                ("device", &format!("{device:#06x}")),
                ("numa_node", "-1"),
                ("power/runtime_status", "active"),
                ("unique_id", &format!("{:016x}", 0xa000 + number)),
                ("mem_info_vram_total", "17179869184"),
                ("mem_info_vram_used", "1073741824"),
                ("mem_info_gtt_total", "8589934592"),
                ("mem_info_gtt_used", "4096"),
                ("gpu_busy_percent", "37"),
                ("hwmon/hwmon5/name", "amdgpu"),
                ("hwmon/hwmon5/temp1_label", "edge"),
                ("hwmon/hwmon5/temp1_input", "61000"),
                ("hwmon/hwmon5/power1_average", "42500000"),
                ("hwmon/hwmon5/power1_cap", "300000000"),
            ] {
                self.file(&format!("{card}/{file}"), format!("{content}\n"));
            }
            self.folder(&format!("{card}/drm/renderD{}", 128 + number));
        }

        /// Creates a GPU node of the compute topology.
        pub(super) fn kfd_gpu(&self, number: u32, properties: &str, gpu_id: u32, vram: u64) {
            let node = format!("class/kfd/kfd/topology/nodes/{number}");
            let properties = format!("cpu_cores_count 0\nsimd_count 64\nvendor_id 4098\n{properties}\n");
            self.file(&format!("{node}/properties"), properties);
            self.file(&format!("{node}/gpu_id"), gpu_id.to_string());
            self.file(&format!("{node}/mem_banks/0/properties"), format!("heap_type 1\nsize_in_bytes {vram}\n"));
        }

        /// Creates a CPU node of the compute topology.
        pub(super) fn kfd_cpu(&self, number: u32) {
            self.file(
                &format!("class/kfd/kfd/topology/nodes/{number}/properties"),
                "cpu_cores_count 64\nsimd_count 0\n",
            );
        }

        /// Creates a link between two nodes of the compute topology.
        pub(super) fn kfd_link(&self, from: u32, kind: &str, number: u32, content: &str) {
            let path = format!("class/kfd/kfd/topology/nodes/{from}/{kind}/{number}/properties");
            self.file(&path, format!("node_from {from}\n{content}\n"));
        }
    }
}
