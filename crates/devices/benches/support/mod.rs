//! A tree of eight AMD cards for benchmarks.

use std::fs;
use std::path::{Path, PathBuf};

use gpupool_devices::{AmdSysfsSource, SourcePaths};

/// Number of cards.
pub const CARDS: u32 = 8;

/// A machine with AMD cards, as files in memory.
pub struct Tree(tempfile::TempDir);

impl Tree {
    /// Creates a machine with this many processes, of which every fiftieth computes.
    pub fn new(processes: u32) -> Self {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let tree = Self(folder.unwrap());
        fs::create_dir(tree.path("proc")).unwrap();
        for card in 0..CARDS {
            tree.card(card);
        }
        for pid in 1..=processes {
            tree.process(pid);
        }
        tree
    }

    /// Returns the source that reads the machine.
    pub fn source(&self) -> AmdSysfsSource {
        AmdSysfsSource::new(&SourcePaths { sys: self.path("sys"), proc: self.path("proc"), ..SourcePaths::default() })
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn file(&self, path: &str, content: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn card(&self, number: u32) {
        let device = format!("sys/class/drm/card{number}/device");
        let event = format!("DRIVER=amdgpu\nPCI_ID=1002:74A1\nPCI_SLOT_NAME=0000:{number:02x}:00.0\n");
        for (file, content) in [
            ("uevent", event.as_str()),
            ("vendor", "0x1002\n"),
            ("device", "0x74a1\n"),
            ("power/runtime_status", "active\n"),
            ("unique_id", "946d7e1ef9b172dd\n"),
            ("mem_info_vram_total", "206141652992\n"),
            ("mem_info_vram_used", "297570304\n"),
            ("mem_info_gtt_total", "16786171904\n"),
            ("mem_info_gtt_used", "62369792\n"),
            ("gpu_busy_percent", "3\n"),
            ("hwmon/hwmon1/temp1_label", "junction\n"),
            ("hwmon/hwmon1/temp1_input", "56000\n"),
            ("hwmon/hwmon1/power1_input", "136000000\n"),
            ("hwmon/hwmon1/power1_cap", "750000000\n"),
        ] {
            self.file(&format!("{device}/{file}"), content);
        }
        fs::create_dir_all(self.path(&format!("{device}/drm/renderD{}", 128 + number))).unwrap();
        let node = format!("sys/class/kfd/kfd/topology/nodes/{}", number + 2);
        let properties = format!("simd_count 1216\ndrm_render_minor {}\nlocation_id {}\n", 128 + number, number << 8);
        self.file(&format!("{node}/properties"), &properties);
        self.file(&format!("{node}/gpu_id"), &(1000 + number).to_string());
    }

    fn process(&self, pid: u32) {
        for fd in 0..10 {
            let entry = self.path(&format!("proc/{pid}/fd/{fd}"));
            fs::create_dir_all(entry.parent().unwrap()).unwrap();
            let computes = pid.is_multiple_of(50) && fd == 9;
            let target =
                if computes { format!("/dev/dri/renderD{}", 128 + pid / 50 % CARDS) } else { "/dev/null".into() };
            std::os::unix::fs::symlink(target, entry).unwrap();
            if computes {
                let text = format!("drm-driver:\tamdgpu\ndrm-client-id:\t{pid}\ndrm-resident-vram:\t4 MiB\n");
                self.file(&format!("proc/{pid}/fdinfo/{fd}"), &text);
                self.file(&format!("sys/class/kfd/kfd/proc/{pid}/vram_{}", 1000 + pid / 50 % CARDS), "4194304\n");
            }
        }
    }
}
