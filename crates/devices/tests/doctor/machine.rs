//! A machine in a temporary folder: an NVIDIA GPU, a sleeping AMD accelerator, an AMD card, a network card.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use gpupool_devices::SourcePaths;

/// Machine in a temporary folder that is removed on drop.
pub struct FakeMachine {
    folder: tempfile::TempDir,
    /// Paths in the folder.
    pub paths: SourcePaths,
}

/// Files and their contents.
const FILES: &[(&str, &str)] = &[
    ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n"),
    ("sys/bus/pci/devices/0000:01:00.0/device", "0x2330\n"),
    ("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n"),
    ("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n"),
    ("sys/bus/pci/devices/0000:01:00.0/uevent", "DRIVER=nvidia\nPCI_SLOT_NAME=0000:01:00.0\n"),
    ("sys/bus/pci/devices/0000:01:00.0/power/runtime_status", "active\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x1002\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/device", "0x74a1\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/class", "0x120000\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "0\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c1:00.0\n"),
    ("sys/bus/pci/devices/0000:c1:00.0/power/runtime_status", "suspended\n"),
    ("sys/bus/pci/devices/0000:e1:00.0/vendor", "0x8086\n"),
    ("sys/bus/pci/devices/0000:e1:00.0/class", "0x020000\n"),
    ("sys/class/drm/card0/device/vendor", "0x1002\n"),
    ("sys/class/drm/card0/device/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:a1:00.0\n"),
    ("sys/class/drm/card0/device/power/runtime_status", "active\n"),
    ("sys/class/drm/card0/device/unique_id", "3f7a8c0d11223344\n"),
    ("sys/class/drm/card0/device/mem_info_vram_total", "17163091968\n"),
    ("sys/class/drm/card0/device/gpu_busy_percent", "7\n"),
    ("sys/class/drm/card0/device/hwmon/hwmon3/temp1_input", "47000\n"),
    ("sys/class/drm/card0/device/drm/renderD128/dev", "226:128\n"),
    ("sys/class/drm/card0-DP-1/status", "connected\n"),
    ("sys/class/drm/card1/device/vendor", "0x1002\n"),
    ("sys/class/drm/card1/device/power/runtime_status", "suspended\n"),
    ("sys/class/drm/card1/device/gpu_busy_percent", "0\n"),
    ("sys/class/drm/card1/device/hwmon/hwmon4/temp1_input", "30000\n"),
    ("sys/class/drm/renderD128/device/vendor", "0x1002\n"),
    ("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 416\nunique_id 4574122359298077508\n"),
    ("sys/module/amdgpu/version", "6.10.5\n"),
    ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids dmem\n"),
    ("sys/fs/cgroup/init.scope/cgroup.kill", ""),
    ("proc/modules", "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\next4 3 0 - Live 0x0\n"),
    ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n"),
    ("proc/driver/nvidia/gpus/0000:01:00.0/information", "GPU UUID: GPU-6ee2b5b2-1d5a-4a7e-9b3f-0123456789ab\n"),
    ("proc/sys/kernel/osrelease", "6.8.0-45-generic\n"),
    ("proc/sys/kernel/hostname", "node-seven\n"),
    ("proc/version", "Linux version 6.8.0 (ada@node-seven) (gcc) #1\n"),
    ("proc/self/cgroup", "0::/user.slice\n"),
    ("proc/1/cgroup", "0::/init.scope\n"),
    ("proc/1/comm", "systemd\n"),
    ("proc/877/comm", "nvidia-persiste\n"),
    ("dev/nvidia0", ""),
    ("dev/nvidiactl", ""),
    ("dev/nvidia-uvm", ""),
    ("dev/nvidia-modeset", ""),
    ("dev/kfd", ""),
    ("dev/dri/renderD128", ""),
    ("dev/dri/card0", ""),
    ("etc/group", "root:x:0:\nvideo:x:44:\nrender:x:110:\n"),
    ("usr/lib64/libnvidia-ml.so.535.183.01", ""),
];

impl FakeMachine {
    /// Creates the machine. `tools` is a folder of fixtures.
    pub fn new(tools: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = SourcePaths {
            sys: at("sys"),
            proc: at("proc"),
            dev: at("dev"),
            etc: at("etc"),
            nvml: "libnvidia-ml.so.1".into(),
            nvidia_smi: fixtures(tools).join("nvidia-smi"),
            amd_smi: at("none/amd-smi"),
            rocm_smi: at("none/rocm-smi"),
        };
        let machine = Self { folder, paths };
        for (name, text) in FILES {
            machine.write(name, text.as_bytes());
        }
        machine.write("sys/class/drm/card0/device/gpu_metrics", &[120, 0, 1, 3, 0xff, 0xfe, 0, 0xff]);
        for node in ["nvidia0", "nvidiactl", "nvidia-uvm", "kfd", "dri/renderD128"] {
            fs::set_permissions(machine.at("dev").join(node), fs::Permissions::from_mode(0o666)).unwrap();
        }
        fs::create_dir_all(machine.at("proc/self/ns")).unwrap();
        symlink("pid:[4026531836]", machine.at("proc/self/ns/pid")).unwrap();
        symlink("../../../drivers/nvidia", machine.at("sys/bus/pci/devices/0000:01:00.0/driver")).unwrap();
        symlink("libnvidia-ml.so.535.183.01", machine.at("usr/lib64/libnvidia-ml.so.1")).unwrap();
        machine
    }

    /// Returns a path in the folder.
    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file and creates the folders above it.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Wakes every GPU.
    pub fn wake_all(&self) {
        self.write("sys/bus/pci/devices/0000:c1:00.0/power/runtime_status", b"active\n");
        self.write("sys/class/drm/card1/device/power/runtime_status", b"active\n");
    }
}

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/doctor").join(folder)
}
