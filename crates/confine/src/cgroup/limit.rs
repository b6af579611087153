//! What a group may use and what it uses: its limits as each generation writes them, and the numbers the kernel counts.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::detect::{Place, memberships, mounts, own_directory};
use super::group::Part;
use super::{At, CgroupError, CgroupVersion, ProcessCgroup};

/// What a group may use; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes of host memory; swap is not given on top.
    pub host_memory: Option<u64>,
    /// Processes and threads at one time.
    pub pids: Option<u64>,
}

impl ProcessCgroup {
    /// Sets the limits, replacing those before; a group over its new memory limit is shrunk or killed by the kernel.
    pub fn set_limits(&self, limits: &CgroupLimits) -> Result<(), CgroupError> {
        match (self.part_with(|place| place.memory), limits.host_memory) {
            (Some(part), bytes) => write_memory(part, bytes)?,
            (None, Some(_)) => return Err(not_enforceable("host memory", "memory")),
            (None, None) => {}
        }
        match (self.part_with(|place| place.pids), limits.pids) {
            (Some(part), count) => write(&part.path.join("pids.max"), &or_max(count))?,
            (None, Some(_)) => return Err(not_enforceable("the number of processes", "pids")),
            (None, None) => {}
        }
        Ok(())
    }
}

fn write_memory(part: &Part, bytes: Option<u64>) -> Result<(), CgroupError> {
    match part.place.version {
        CgroupVersion::V2 => {
            write(&part.path.join("memory.max"), &or_max(bytes))?;
            let swap = if bytes.is_some() { "0" } else { "max" };
            write_if_there(&part.path.join("memory.swap.max"), swap)?;
            // A job that lost one of its processes rarely goes on well: all of it or nothing.
            write_if_there(&part.path.join("memory.oom.group"), "1")
        }
        CgroupVersion::V1 => {
            let memory_and_swap = part.path.join("memory.memsw.limit_in_bytes");
            let value = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
            // Memory plus swap may never be below memory: out of the way first, then down to the same number.
            write_if_there(&memory_and_swap, "-1")?;
            write(&part.path.join("memory.limit_in_bytes"), &value)?;
            write_if_there(&memory_and_swap, &value)
        }
    }
}

fn or_max(value: Option<u64>) -> String {
    value.map_or("max".to_owned(), |value| value.to_string())
}

fn not_enforceable(limit: &'static str, controller: &str) -> CgroupError {
    CgroupError::NotEnforceable { limit, why: format!("the {controller} controller is not available to this group") }
}

/// Writes one of the kernel's control files, which exist already and are never created by writing.
pub(super) fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    put(path, value).at("writing", path)
}

pub(super) fn put(path: &Path, value: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    io::Write::write_all(&mut file, value.as_bytes())
}

fn write_if_there(path: &Path, value: &str) -> Result<(), CgroupError> {
    match put(path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.at("writing", path),
    }
}

/// How much memory of one device may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemoryLimit {
    /// The device: `0000:03:00.0`, in any length of its first part.
    pub pci_address: String,
    /// Bytes, in each region of the device's memory.
    pub bytes: u64,
}

impl ProcessCgroup {
    /// Limits the memory of these devices; beyond it the driver refuses to give more. Fails on the first that cannot be
    /// limited.
    ///
    /// The `dmem` controller of v2, from kernel 6.14 on: a driver that takes part names its memory by regions such as
    /// `drm/0000:03:00.0/vram0`, and each group has a limit for each region. Written after the kernel's documentation and
    /// tried on directories that look like it: no machine with such a driver was at hand.
    pub fn limit_device_memory(&self, limits: &[DeviceMemoryLimit]) -> Result<(), CgroupError> {
        let not = |why: String| CgroupError::NotEnforceable { limit: "GPU memory", why };
        if limits.is_empty() {
            return Ok(());
        }
        let part = self.part_with(|place| place.dmem).ok_or_else(|| not(NO_CONTROLLER.to_owned()))?;
        write_limits(&part.path.join("dmem.max"), limits)?
            .map_or(Ok(()), |address| Err(not(format!("the driver of {address} does not take part in it"))))
    }
}

/// Why GPU memory is not limited where there is no controller for it.
pub(crate) const NO_CONTROLLER: &str = "no dmem controller of cgroup v2 (kernel 6.14 or newer) can be used here";

/// Writes a limit for every region of each device; gives the address of the first device that has none.
fn write_limits<'a>(file: &Path, limits: &'a [DeviceMemoryLimit]) -> Result<Option<&'a str>, CgroupError> {
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

/// Reads what a group uses. Goes on existing after the group, and then has nothing to tell.
#[derive(Debug, Clone, Default)]
pub struct CgroupMeter {
    memory: Option<PathBuf>,
    kills: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<(CgroupVersion, PathBuf)>,
}

impl ProcessCgroup {
    /// A meter of this group.
    pub fn usage_meter(&self) -> CgroupMeter {
        let file = |has: fn(&Place) -> bool, name: fn(CgroupVersion) -> &'static str| {
            let part = self.part_with(has)?;
            let path = part.path.join(name(part.place.version));
            path.is_file().then_some((part.place.version, path))
        };
        let cpu_file = |version| if version == CgroupVersion::V2 { "cpu.stat" } else { "cpuacct.usage" };
        let memory_file =
            |version| if version == CgroupVersion::V2 { "memory.current" } else { "memory.usage_in_bytes" };
        CgroupMeter {
            memory: file(|place| place.memory, memory_file).map(|(_, path)| path),
            kills: file(|place| place.memory, kills_file).map(|(_, path)| path),
            pids: file(|place| place.pids, |_| "pids.current").map(|(_, path)| path),
            cpu: file(|place| place.cpu, cpu_file),
        }
    }
}

impl CgroupMeter {
    /// Bytes of host memory in use; files that were read and stay in memory are counted too.
    pub fn host_memory(&self) -> Option<u64> {
        number(self.memory.as_deref()?)
    }

    /// How many processes the kernel killed because the group was over its memory limit.
    pub fn oom_kills(&self) -> Option<u64> {
        kills_told(&text(self.kills.as_deref()?)?)
    }

    /// Processes and threads there are now.
    pub fn processes(&self) -> Option<u64> {
        number(self.pids.as_deref()?)
    }

    /// Processor time used by all processes the group ever held.
    pub fn cpu_time(&self) -> Option<Duration> {
        let (version, path) = self.cpu.as_ref()?;
        match version {
            CgroupVersion::V1 => number(path).map(Duration::from_nanos),
            CgroupVersion::V2 => usage_told(&text(path)?),
        }
    }

    /// Which generation counts processor time.
    pub fn cpu_time_version(&self) -> Option<CgroupVersion> {
        self.cpu.as_ref().map(|(version, _)| *version)
    }
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

fn usage_told(cpu_stat: &str) -> Option<Duration> {
    let micros = cpu_stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok())?;
    Some(Duration::from_micros(micros))
}

/// The group that counts a process's memory, also one that another program made: reading only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    /// The file that tells how many processes were killed for want of memory.
    kills: PathBuf,
}

impl MemoryCgroup {
    /// The one a process is in now; `None` where it has gone, or no group counts memory here.
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::of_in(&PathBuf::from(format!("/proc/{pid}")))
    }

    fn of_in(process: &Path) -> Option<Self> {
        let read = |file: &str| std::fs::read_to_string(process.join(file)).ok();
        let (mounts, memberships) = (mounts(&read("mountinfo")?), memberships(&read("cgroup")?));
        let counts = |file: PathBuf| file.is_file().then_some(Self { kills: file });
        let v1 = mounts.iter().find(|mount| mount.controllers.iter().any(|name| name == "memory"));
        if let Some(mount) = v1 {
            return counts(own_directory(mount, &memberships).join(kills_file(CgroupVersion::V1)));
        }
        let v2 = mounts.iter().find(|mount| mount.version == CgroupVersion::V2)?;
        counts(own_directory(v2, &memberships).join(kills_file(CgroupVersion::V2)))
    }

    /// How many processes the kernel killed because the group was over its limit; `None` once the group is gone.
    pub fn oom_kills(&self) -> Option<u64> {
        kills_told(&text(&self.kills)?)
    }
}

/// Where a group tells how many of its processes were killed for want of memory.
fn kills_file(version: CgroupVersion) -> &'static str {
    match version {
        CgroupVersion::V1 => "memory.oom_control",
        CgroupVersion::V2 => "memory.events",
    }
}

/// The number in `memory.events` or `memory.oom_control`.
fn kills_told(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
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
        let limit = |address: &str, bytes| DeviceMemoryLimit { pci_address: address.into(), bytes };
        assert_eq!(write_limits(&file, &[limit("00000000:03:00.0", 1 << 30)]).unwrap(), None);
        // The kernel takes a line at a time; a plain file shows the last one over what was there.
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("drm/0000:03:00.0/vram0 1073741824\n"));
        assert_eq!(write_limits(&file, &[limit("0000:04:00.0", 1)]).unwrap(), Some("0000:04:00.0"));
    }

    #[test]
    fn processor_time_is_read_out_of_the_statistics() {
        let told = usage_told("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n");
        assert_eq!(told, Some(Duration::from_millis(1500)));
        assert_eq!(usage_told("user_usec 3\n"), None);
        assert_eq!(usage_told("usage_usec -3\n"), None);
    }

    #[test]
    fn a_meter_of_nothing_tells_nothing() {
        let meter = CgroupMeter { memory: Some("/nonexistent".into()), ..CgroupMeter::default() };
        assert_eq!((meter.host_memory(), meter.processes(), meter.cpu_time()), (None, None, None));
    }

    fn machine(mountinfo: &str, cgroup: &str, file: &str, text: &str) -> (tempfile::TempDir, Option<MemoryCgroup>) {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("sys").join(file);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, text).unwrap();
        let sys = root.path().join("sys").display().to_string();
        std::fs::write(root.path().join("mountinfo"), mountinfo.replace('@', &sys)).unwrap();
        std::fs::write(root.path().join("cgroup"), cgroup).unwrap();
        let found = MemoryCgroup::of_in(root.path());
        (root, found)
    }

    #[test]
    fn the_group_is_found_in_both_worlds() {
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
