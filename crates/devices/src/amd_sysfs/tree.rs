//! Small kernel trees that tests build.

use std::fs;
use std::path::PathBuf;

use crate::places::Places;

/// A tree below a temporary folder, gone with it: `sys` holds what `/sys` would, `proc` what `/proc` would.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        tree.folder("");
        tree
    }

    /// Where the source should look.
    pub fn places(&self) -> Places {
        Places { sys: self.path(""), proc: self.0.path().join("proc"), ..Places::default() }
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.0.path().join("sys").join(path)
    }

    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn folder(&self, path: &str) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    pub fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    /// A file that the kernel refuses to read: nothing is mapped at the start of what it leads to.
    pub fn refuse(&self, path: &str) {
        self.link(path, "/proc/self/mem");
    }

    pub fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    /// Card `number` with all a card of amdgpu usually has; 16 GiB, 1 GiB of it used, 37 % busy, 61 °C, 42.5 of 300 W.
    pub fn amd_card(&self, number: u32, pci: &str, device: u16) {
        let card = format!("class/drm/card{number}/device");
        self.file(&format!("{card}/uevent"), format!("DRIVER=amdgpu\nPCI_ID=1002:{device:04X}\nPCI_SLOT_NAME={pci}\n"));
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

    /// A GPU node of the compute topology.
    pub fn kfd_gpu(&self, number: u32, properties: &str, gpu_id: u32, vram: u64) {
        let node = format!("class/kfd/kfd/topology/nodes/{number}");
        let properties = format!("cpu_cores_count 0\nsimd_count 64\nvendor_id 4098\n{properties}\n");
        self.file(&format!("{node}/properties"), properties);
        self.file(&format!("{node}/gpu_id"), gpu_id.to_string());
        self.file(&format!("{node}/mem_banks/0/properties"), format!("heap_type 1\nsize_in_bytes {vram}\n"));
    }

    /// A CPU node of the compute topology.
    pub fn kfd_cpu(&self, number: u32) {
        self.file(&format!("class/kfd/kfd/topology/nodes/{number}/properties"), "cpu_cores_count 64\nsimd_count 0\n");
    }

    /// A link between two nodes of the compute topology.
    pub fn kfd_link(&self, from: u32, kind: &str, number: u32, content: &str) {
        let path = format!("class/kfd/kfd/topology/nodes/{from}/{kind}/{number}/properties");
        self.file(&path, format!("node_from {from}\n{content}\n"));
    }
}
