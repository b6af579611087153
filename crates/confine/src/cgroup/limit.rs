//! Limits of a cgroup, as each generation writes them, and its usage, as the kernel counts it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::detect::{UsableHierarchy, own_directory, parse_memberships, parse_mounts};
use super::group::CgroupDirectory;
use super::{CgroupError, CgroupIoContext, CgroupVersion, ProcessCgroup};

/// Limits of a cgroup; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes of host memory; swap is not added.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time.
    pub pids: Option<u64>,
}

impl ProcessCgroup {
    /// Replaces the limits; the kernel shrinks or kills a cgroup that exceeds its new memory limit.
    pub fn set_limits(&self, limits: &CgroupLimits) -> Result<(), CgroupError> {
        match (self.directory_with(|hierarchy| hierarchy.memory), limits.host_memory) {
            (Some(part), bytes) => write_memory_limit(part, bytes)?,
            (None, Some(_)) => return Err(not_enforceable("host memory", "memory")),
            (None, None) => {}
        }
        match (self.directory_with(|hierarchy| hierarchy.pids), limits.pids) {
            (Some(part), count) => write_control_file(&part.path.join("pids.max"), &or_max(count))?,
            (None, Some(_)) => return Err(not_enforceable("the number of processes", "pids")),
            (None, None) => {}
        }
        Ok(())
    }
}

fn write_memory_limit(part: &CgroupDirectory, bytes: Option<u64>) -> Result<(), CgroupError> {
    match part.hierarchy.version {
        CgroupVersion::V2 => {
            write_control_file(&part.path.join("memory.max"), &or_max(bytes))?;
            let swap = if bytes.is_some() { "0" } else { "max" };
            write_if_present(&part.path.join("memory.swap.max"), swap)?;
            // A job that lost one of its processes rarely works: kill all or none.
            write_if_present(&part.path.join("memory.oom.group"), "1")
        }
        CgroupVersion::V1 => {
            let memory_and_swap = part.path.join("memory.memsw.limit_in_bytes");
            let value = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
            // Memory plus swap may never be below memory: remove its limit first, then set the same number.
            write_if_present(&memory_and_swap, "-1")?;
            write_control_file(&part.path.join("memory.limit_in_bytes"), &value)?;
            write_if_present(&memory_and_swap, &value)
        }
    }
}

fn or_max(value: Option<u64>) -> String {
    value.map_or("max".to_owned(), |value| value.to_string())
}

fn not_enforceable(limit: &'static str, controller: &str) -> CgroupError {
    CgroupError::NotEnforceable { limit, why: format!("the {controller} controller is not available to this cgroup") }
}

/// Writes a control file of the kernel, which must exist already.
pub(super) fn write_control_file(path: &Path, value: &str) -> Result<(), CgroupError> {
    write_file(path, value).context("write", path)
}

pub(super) fn write_file(path: &Path, value: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    io::Write::write_all(&mut file, value.as_bytes())
}

fn write_if_present(path: &Path, value: &str) -> Result<(), CgroupError> {
    match write_file(path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.context("write", path),
    }
}

/// Memory limit of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemoryLimit {
    /// PCI address such as `0000:03:00.0`, with a domain of any length.
    pub pci_address: String,
    /// Bytes, in each region of the device's memory.
    pub bytes: u64,
}

impl ProcessCgroup {
    /// Limits the memory of these devices; the driver refuses allocations beyond it. Fails on the first device that
    /// cannot be limited.
    ///
    /// Uses the `dmem` controller of v2, from kernel 6.14 on: a supporting driver names its memory by regions such as
    /// `drm/0000:03:00.0/vram0`, and each cgroup has a limit for each region. Written after the kernel's documentation
    /// and tested with directories of the same layout: no machine with such a driver was available.
    pub fn limit_device_memory(&self, limits: &[DeviceMemoryLimit]) -> Result<(), CgroupError> {
        let not = |why: String| CgroupError::NotEnforceable { limit: "GPU memory", why };
        if limits.is_empty() {
            return Ok(());
        }
        let part = self.directory_with(|hierarchy| hierarchy.dmem).ok_or_else(|| not(NO_DMEM_CONTROLLER.to_owned()))?;
        write_device_limits(&part.path.join("dmem.max"), limits)?
            .map_or(Ok(()), |address| Err(not(format!("the driver of {address} does not support it"))))
    }
}

/// Reason why GPU memory is not limited without a controller for it.
pub(crate) const NO_DMEM_CONTROLLER: &str = "no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here";

/// Writes a limit for every region of each device; returns the address of the first device without a region.
fn write_device_limits<'a>(file: &Path, limits: &'a [DeviceMemoryLimit]) -> Result<Option<&'a str>, CgroupError> {
    // Every cgroup lists every region, so the top cgroup, which alone lists capacities, need not be visible.
    let regions = std::fs::read_to_string(file).context("read", file)?;
    for limit in limits {
        let of_device = |name: &&str| name.split('/').any(|part| is_same_device(part, &limit.pci_address));
        let names = regions.lines().filter_map(|line| line.split_ascii_whitespace().next());
        let names: Vec<&str> = names.filter(of_device).collect();
        if names.is_empty() {
            return Ok(Some(&limit.pci_address));
        }
        for name in names {
            write_control_file(file, &format!("{name} {}\n", limit.bytes))?;
        }
    }
    Ok(None)
}

/// Compares addresses: the kernel writes the domain with four digits, NVIDIA's library with eight, in capitals.
fn is_same_device(one: &str, other: &str) -> bool {
    fn parts(address: &str) -> Option<(u32, u32, u32, u32)> {
        let (bus_and_domain, function) = address.rsplit_once('.')?;
        let mut parts = bus_and_domain.split(':').map(|part| u32::from_str_radix(part, 16).ok());
        let found = (parts.next()??, parts.next()??, parts.next()??, u32::from_str_radix(function, 16).ok()?);
        parts.next().is_none().then_some(found)
    }
    parts(one).is_some_and(|one| parts(other) == Some(one))
}

/// Reader of a cgroup's usage. Outlives the cgroup and then returns `None`.
#[derive(Debug, Clone, Default)]
pub struct CgroupMeter {
    memory: Option<PathBuf>,
    oom_kills: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<(CgroupVersion, PathBuf)>,
}

impl ProcessCgroup {
    /// Returns a meter of this cgroup.
    pub fn usage_meter(&self) -> CgroupMeter {
        let file = |has: fn(&UsableHierarchy) -> bool, name: fn(CgroupVersion) -> &'static str| {
            let part = self.directory_with(has)?;
            let path = part.path.join(name(part.hierarchy.version));
            path.is_file().then_some((part.hierarchy.version, path))
        };
        let cpu_file = |version| if version == CgroupVersion::V2 { "cpu.stat" } else { "cpuacct.usage" };
        let memory_file =
            |version| if version == CgroupVersion::V2 { "memory.current" } else { "memory.usage_in_bytes" };
        CgroupMeter {
            memory: file(|hierarchy| hierarchy.memory, memory_file).map(|(_, path)| path),
            oom_kills: file(|hierarchy| hierarchy.memory, oom_kill_file).map(|(_, path)| path),
            pids: file(|hierarchy| hierarchy.pids, |_| "pids.current").map(|(_, path)| path),
            cpu: file(|hierarchy| hierarchy.cpu, cpu_file),
        }
    }
}

impl CgroupMeter {
    /// Returns the bytes of host memory in use, including file pages that stay in memory.
    pub fn host_memory(&self) -> Option<u64> {
        read_number(self.memory.as_deref()?)
    }

    /// Returns the number of processes that the kernel killed because the cgroup exceeded its memory limit.
    pub fn oom_kills(&self) -> Option<u64> {
        parse_oom_kills(&read_text(self.oom_kills.as_deref()?)?)
    }

    /// Returns the current number of processes and threads.
    pub fn processes(&self) -> Option<u64> {
        read_number(self.pids.as_deref()?)
    }

    /// Returns the CPU time of all processes that the cgroup ever held.
    pub fn cpu_time(&self) -> Option<Duration> {
        let (version, path) = self.cpu.as_ref()?;
        match version {
            CgroupVersion::V1 => read_number(path).map(Duration::from_nanos),
            CgroupVersion::V2 => parse_cpu_usage(&read_text(path)?),
        }
    }

    /// Returns the generation that counts CPU time.
    pub fn cpu_time_version(&self) -> Option<CgroupVersion> {
        self.cpu.as_ref().map(|(version, _)| *version)
    }
}

fn read_text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn read_number(path: &Path) -> Option<u64> {
    read_text(path)?.trim().parse().ok()
}

fn parse_cpu_usage(cpu_stat: &str) -> Option<Duration> {
    let micros = cpu_stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok())?;
    Some(Duration::from_micros(micros))
}

/// Read-only view of the cgroup that counts a process's memory, which another program may have created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    /// File that counts processes killed for memory.
    oom_kills: PathBuf,
}

impl MemoryCgroup {
    /// Returns the current memory cgroup of a process; `None` if the process is gone or no cgroup counts memory.
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::from_proc_directory(&PathBuf::from(format!("/proc/{pid}")))
    }

    fn from_proc_directory(process: &Path) -> Option<Self> {
        let read = |file: &str| std::fs::read_to_string(process.join(file)).ok();
        let (mounts, memberships) = (parse_mounts(&read("mountinfo")?), parse_memberships(&read("cgroup")?));
        let counts = |file: PathBuf| file.is_file().then_some(Self { oom_kills: file });
        let v1 = mounts.iter().find(|mount| mount.controllers.iter().any(|name| name == "memory"));
        if let Some(mount) = v1 {
            return counts(own_directory(mount, &memberships).join(oom_kill_file(CgroupVersion::V1)));
        }
        let v2 = mounts.iter().find(|mount| mount.version == CgroupVersion::V2)?;
        counts(own_directory(v2, &memberships).join(oom_kill_file(CgroupVersion::V2)))
    }

    /// Returns the number of processes that the kernel killed because the cgroup exceeded its limit; `None` once the
    /// cgroup is gone.
    pub fn oom_kills(&self) -> Option<u64> {
        parse_oom_kills(&read_text(&self.oom_kills)?)
    }
}

/// Returns the name of the file that counts processes killed for memory.
fn oom_kill_file(version: CgroupVersion) -> &'static str {
    match version {
        CgroupVersion::V1 => "memory.oom_control",
        CgroupVersion::V2 => "memory.events",
    }
}

/// Parses the number in `memory.events` or `memory.oom_control`.
fn parse_oom_kills(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_compared_by_value() {
        assert!(is_same_device("0000:0a:00.0", "00000000:0A:00.0"));
        for other in ["0000:0a:00.1", "0001:0a:00.0", "0a:00.0", "", "drm", "0000:0a:00.0:1"] {
            assert!(!is_same_device("0000:0a:00.0", other), "{other}");
        }
    }

    #[test]
    fn each_region_of_a_device_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dmem.max");
        std::fs::write(&file, "drm/0000:03:00.0/vram0 max\n").unwrap();
        let limit = |address: &str, bytes| DeviceMemoryLimit { pci_address: address.into(), bytes };
        assert_eq!(write_device_limits(&file, &[limit("00000000:03:00.0", 1 << 30)]).unwrap(), None);
        // The kernel takes one line per write; in a plain file the last write overwrites the start.
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("drm/0000:03:00.0/vram0 1073741824\n"));
        assert_eq!(write_device_limits(&file, &[limit("0000:04:00.0", 1)]).unwrap(), Some("0000:04:00.0"));
    }

    #[test]
    fn cpu_time_is_parsed_from_the_statistics() {
        let usage = parse_cpu_usage("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n");
        assert_eq!(usage, Some(Duration::from_millis(1500)));
        assert_eq!(parse_cpu_usage("user_usec 3\n"), None);
        assert_eq!(parse_cpu_usage("usage_usec -3\n"), None);
    }

    #[test]
    fn a_meter_of_a_removed_cgroup_reads_nothing() {
        let meter = CgroupMeter { memory: Some("/nonexistent".into()), ..CgroupMeter::default() };
        assert_eq!((meter.host_memory(), meter.processes(), meter.cpu_time()), (None, None, None));
    }

    fn machine(mountinfo: &str, cgroup: &str, file: &str, text: &str) -> (tempfile::TempDir, Option<MemoryCgroup>) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("sys").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        let sys = root.path().join("sys").display().to_string();
        std::fs::write(root.path().join("mountinfo"), mountinfo.replace('@', &sys)).unwrap();
        std::fs::write(root.path().join("cgroup"), cgroup).unwrap();
        let found = MemoryCgroup::from_proc_directory(root.path());
        (root, found)
    }

    #[test]
    fn the_memory_cgroup_is_found_in_v1_and_v2() {
        let v2 = "30 23 0:26 / @ rw - cgroup2 cgroup2 rw\n";
        let (_root, found) = machine(v2, "0::/gpupool/x\n", "gpupool/x/memory.events", "low 0\noom 3\noom_kill 2\n");
        assert_eq!(found.unwrap().oom_kills(), Some(2));

        let hybrid = "31 30 0:30 / @/memory rw - cgroup cgroup rw,memory\n35 30 0:34 / @/unified rw - cgroup2 c rw\n";
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n";
        let (_root, found) = machine(hybrid, "4:memory:/g/x\n0::/g/x\n", "memory/g/x/memory.oom_control", text);
        assert_eq!(found.unwrap().oom_kills(), Some(1));

        let (_root, found) = machine(v2, "0::/elsewhere\n", "gpupool/x/memory.events", "");
        assert_eq!(found, None);
    }
}
