//! What the kernel and the files of its drivers say: modules, versions, the persistence daemon, log lines.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::doctor::evidence::{names_in, root_of};
use crate::kernel_file;
use crate::pci_bus::nvidia_proc;
use crate::places::Places;
use crate::told::Told;

/// The modules that matter to GPUs.
const WATCHED: [&str; 8] = ["nvidia", "nvidia_uvm", "nouveau", "amdgpu", "radeon", "vfio_pci", "i915", "xe"];

/// Bytes read of the kernel's log, and of one message in it, which the kernel bounds at 8 KiB.
const LOG_BYTES: usize = 8 << 20;
const LOG_MESSAGE_BYTES: usize = 16 << 10;

/// The versions of NVIDIA's kernel module and of its management library; they must be equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaVersions {
    /// What `/proc/driver/nvidia/version` says.
    pub kernel_text: Told<String>,
    /// Version of the loaded kernel module.
    pub kernel: Told<String>,
    /// Version of the library, by the name of its file.
    pub library: Told<String>,
}

impl NvidiaVersions {
    pub(super) fn read(places: &Places) -> Self {
        let kernel_text = kernel_file::text(&places.proc.join("driver/nvidia/version"));
        let by_text = nvidia_proc::driver_version(&places.proc);
        let kernel = by_text.or(kernel_file::text(&places.sys.join("module/nvidia/version")));
        Self { kernel_text, kernel, library: library_version(places) }
    }

    /// Whether the two are known and differ; tools shorten versions, so `535.171` equals `535.171.04`.
    pub(crate) fn differ(&self) -> bool {
        match (self.kernel.value(), self.library.value()) {
            (Some(kernel), Some(library)) => kernel.split('.').zip(library.split('.')).any(|(a, b)| a != b),
            _ => false,
        }
    }
}

/// What the kernel still has of its log. Empty where the user may not read it.
///
/// Each read gives one message, and waiting for the next is refused; a message that was overwritten meanwhile is passed
/// over.
pub(super) fn log(dev: &Path) -> String {
    let without_waiting = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let opened = File::options().read(true).custom_flags(without_waiting).open(dev.join("kmsg"));
    let Ok(mut file) = opened else { return String::new() };
    let (mut text, mut message) = (Vec::new(), vec![0; LOG_MESSAGE_BYTES]);
    while text.len() < LOG_BYTES {
        match file.read(&mut message) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&message[..length]),
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// `libnvidia-ml.so.1` is a link to a file whose name ends in the version; the library itself is not opened.
fn library_version(places: &Places) -> Told<String> {
    const FOLDERS: [&str; 6] = [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu",
        "usr/lib/powerpc64le-linux-gnu",
        "usr/lib64",
        "usr/lib",
        "run/opengl-driver/lib",
    ];
    let root = root_of(places);
    let given = places.nvml.is_absolute().then(|| places.nvml.clone());
    let usual = FOLDERS.iter().map(|folder| root.join(folder).join("libnvidia-ml.so.1"));
    let version = |link: PathBuf| {
        let file = std::fs::canonicalize(link).ok()?;
        let version = file.file_name()?.to_str()?.strip_prefix("libnvidia-ml.so.")?.to_owned();
        version.contains('.').then_some(version)
    };
    given.into_iter().chain(usual).find_map(version).map_or(Told::ABSENT, Told::Value)
}

/// Which of the watched modules are loaded or built in.
pub(super) fn modules(proc: &Path, sys: &Path) -> Told<BTreeSet<String>> {
    let listed = kernel_file::text(&proc.join("modules"));
    let in_sys = sys.join("module");
    if listed.value().is_none() && !in_sys.is_dir() {
        return listed.map(|_| BTreeSet::new());
    }
    let is_listed = |name: &str| {
        listed.value().is_some_and(|text| text.lines().any(|line| line.split_whitespace().next() == Some(name)))
    };
    let loaded = WATCHED.iter().filter(|name| is_listed(name) || in_sys.join(name).is_dir());
    Told::Value(loaded.map(|name| (*name).to_owned()).collect())
}

/// The release of the running kernel.
pub(super) fn release(proc: &Path) -> Told<String> {
    let version = || {
        let text = kernel_file::text(&proc.join("version"));
        text.map(|text| text.split_whitespace().nth(2).unwrap_or_default().to_owned())
    };
    kernel_file::text(&proc.join("sys/kernel/osrelease")).or(version())
}

/// Whether NVIDIA's persistence daemon runs: by the socket it keeps, or by its name among the processes.
pub(super) fn persistence_daemon(places: &Places) -> Told<bool> {
    if root_of(places).join("run/nvidia-persistenced/socket").exists() {
        return Told::Value(true);
    }
    // The kernel cuts names of tasks at 15 characters.
    const NAME: &str = "nvidia-persiste";
    match names_in(&places.proc) {
        Ok(names) => {
            let is_process = |name: &&String| name.bytes().all(|byte| byte.is_ascii_digit());
            let is_daemon = |pid: &String| {
                kernel_file::text(&places.proc.join(pid).join("comm")).value().is_some_and(|name| name == NAME)
            };
            Told::Value(names.iter().filter(is_process).any(is_daemon))
        }
        Err(error) => kernel_file::missing(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortened_version_is_the_same_version() {
        let versions = |kernel: &str, library: &str| NvidiaVersions {
            kernel: Told::Value(kernel.to_owned()),
            library: Told::Value(library.to_owned()),
            ..NvidiaVersions::default()
        };
        assert!(!versions("535.171.04", "535.171").differ());
        assert!(versions("535.171.04", "535.183.01").differ());
        assert!(!NvidiaVersions::default().differ());
    }
}
