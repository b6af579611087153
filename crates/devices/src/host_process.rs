//! Lookup of the host processes that drivers report by number.
//!
//! Drivers report process numbers of the host's PID namespace. In another namespace such a number belongs to no process
//! or to a wrong one; then the process stays unattributed, with the reason.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::detect::SourcePaths;
use crate::kernel_file;
use crate::reported::{Reported, truncate_text};
use crate::source_reading::SourceReading;

/// Result of looking up a process that a driver reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum HostProcessLookup {
    /// Not looked up yet.
    #[default]
    NotInspected,
    /// A process of this host.
    Known(Arc<ProcessFacts>),
    /// Unknown, with the reason.
    Unattributed(Arc<str>),
}

/// Facts about a process on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    /// Start time in clock ticks since boot; unique together with the pid until the next boot.
    pub start_ticks: u64,
    /// Effective user.
    pub uid: u32,
    /// Name of the user, if the machine's own list has one.
    pub user: Option<Arc<str>>,
    pub command: Arc<str>,
    pub cgroup: Option<Arc<str>>,
}

/// Resolver of process numbers, with a cache of facts that do not change.
#[derive(Debug)]
pub struct HostProcessResolver {
    proc: PathBuf,
    passwd: PathBuf,
    /// Reason why no process number is valid here; `None` if they are valid.
    invalid_reason: Option<Arc<str>>,
    cache: HashMap<u32, Arc<ProcessFacts>>,
    users: HashMap<u32, Option<Arc<str>>>,
}

/// Link target of the kernel's initial PID namespace, the same on every Linux.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Whether this process is in the host's PID namespace, whose numbers drivers use; `proc` is the mount point of procfs.
pub(crate) fn has_host_pids(proc: &Path) -> Reported<bool> {
    match fs::read_link(proc.join("self/ns/pid")) {
        Ok(namespace) => Reported::Value(namespace.as_os_str() == HOST_PID_NAMESPACE),
        Err(error) => kernel_file::from_io_error(&error),
    }
}

impl HostProcessResolver {
    /// Creates a resolver for the machine at these paths.
    pub fn new(paths: &SourcePaths) -> Self {
        let invalid_reason = match has_host_pids(&paths.proc).value() {
            Some(true) => None,
            Some(false) => Some(
                "this agent runs in its own PID namespace, but drivers report process numbers of the \
                                 host",
            ),
            None => Some("the PID namespace of this agent is unknown"),
        };
        Self {
            proc: paths.proc.clone(),
            passwd: paths.etc.join("passwd"),
            invalid_reason: invalid_reason.map(Into::into),
            cache: HashMap::new(),
            users: HashMap::new(),
        }
    }

    /// Looks up every process of a reading, and forgets processes that no longer use a device.
    pub fn resolve_processes(&mut self, reading: &mut SourceReading) {
        let mut seen = HashMap::new();
        for device in &mut reading.devices {
            let Reported::Value(processes) = &mut device.processes else { continue };
            for process in processes {
                process.host_lookup = self.look_up(process.pid);
                if let HostProcessLookup::Known(facts) = &process.host_lookup {
                    seen.insert(process.pid, facts.clone());
                }
            }
        }
        self.cache = seen;
    }

    /// Looks up the process with this number.
    pub(crate) fn look_up(&mut self, pid: u32) -> HostProcessLookup {
        if let Some(reason) = &self.invalid_reason {
            return HostProcessLookup::Unattributed(reason.clone());
        }
        match self.process_facts(pid) {
            Some(facts) => HostProcessLookup::Known(facts),
            None => HostProcessLookup::Unattributed("no such process is visible: it has exited or is hidden".into()),
        }
    }

    fn process_facts(&mut self, pid: u32) -> Option<Arc<ProcessFacts>> {
        let folder = self.proc.join(pid.to_string());
        let start_ticks = start_ticks(&read_text(&folder, "stat")?)?;
        let cgroup = read_text(&folder, "cgroup").as_deref().and_then(cgroup).map(Into::into);
        if let Some(known) = self.cache.get(&pid)
            && known.start_ticks == start_ticks
            && known.cgroup == cgroup
        {
            return Some(known.clone());
        }
        let uid = uid(&read_text(&folder, "status")?)?;
        let user = self.user_of(uid);
        let command = command(&folder).into();
        Some(Arc::new(ProcessFacts { start_ticks, uid, user, command, cgroup }))
    }

    /// Returns the name of a user from the machine's own list: a directory service could hang.
    fn user_of(&mut self, uid: u32) -> Option<Arc<str>> {
        let find_name = || user_name(&fs::read_to_string(&self.passwd).ok()?, uid).map(Into::into);
        self.users.entry(uid).or_insert_with(find_name).clone()
    }
}

/// Returns the name of a user in a list like `/etc/passwd`.
pub(crate) fn user_name(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

fn read_text(folder: &Path, name: &str) -> Option<String> {
    kernel_file::read_text(&folder.join(name)).into_value()
}

/// Parses the start time in a `stat` file. The command may contain spaces and brackets, so fields count from its end.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, after_command) = stat.rsplit_once(')')?;
    after_command.split_whitespace().nth(19)?.parse().ok()
}

/// Parses the effective user in a `status` file.
fn uid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Parses a `cgroup` file: the group in the unified hierarchy, else of the memory controller, else the first.
fn cgroup(text: &str) -> Option<&str> {
    let mut groups: Vec<(u8, &str)> = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let rank = match controllers {
            _ if path == "/" => 3,
            "" => 0,
            _ if controllers.split(',').any(|name| name == "memory") => 1,
            _ => 2,
        };
        groups.push((rank, path));
    }
    groups.into_iter().min_by_key(|(rank, _)| *rank).map(|(_, path)| path)
}

/// Returns the command line, or the short name in brackets if there is none.
fn command(folder: &Path) -> String {
    let line = kernel_file::read_bytes(&folder.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ");
    if !line.is_empty() {
        return truncate_text(&line).into_owned();
    }
    read_text(folder, "comm").map_or_else(String::new, |name| format!("[{name}]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::{DetectedDevice, DeviceProcess};
    use gpupool_core::Vendor;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// Creates a machine with a namespace and one process, 42.
    fn machine(namespace: &str) -> (TempDir, SourcePaths) {
        let dir = TempDir::new().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        fs::create_dir_all(dir.path().join("proc/self/ns")).unwrap();
        symlink(namespace, dir.path().join("proc/self/ns/pid")).unwrap();
        write("proc/42/stat", "42 (a (b) c) S 1 1 1 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 1 0 987654 1 1\n");
        write("proc/42/status", "Name:\ta\nUid:\t1000\t1001\t1000\t1000\n");
        write("proc/42/cmdline", "python\0train.py\0");
        write("proc/42/cgroup", "5:memory:/old\n0::/user.slice/job\n");
        write("etc/passwd", "root:x:0:0::/:/bin/sh\nalice:x:1001:1001::/home:/bin/sh\n");
        let paths =
            SourcePaths { proc: dir.path().join("proc"), etc: dir.path().join("etc"), ..SourcePaths::default() };
        (dir, paths)
    }

    #[test]
    fn a_process_of_this_host_is_known_with_start_user_command_and_cgroup() {
        let (_dir, paths) = machine(HOST_PID_NAMESPACE);
        let HostProcessLookup::Known(facts) = HostProcessResolver::new(&paths).look_up(42) else { panic!("unknown") };
        assert_eq!((facts.start_ticks, facts.uid, facts.user.as_deref()), (987_654, 1001, Some("alice")));
        assert_eq!((&*facts.command, facts.cgroup.as_deref()), ("python train.py", Some("/user.slice/job")));
    }

    #[test]
    fn a_reused_pid_is_the_new_process() {
        let (dir, paths) = machine(HOST_PID_NAMESPACE);
        let mut resolver = HostProcessResolver::new(&paths);
        let mut reading = SourceReading::default();
        let mut device = DetectedDevice::new(Vendor::Nvidia);
        device.processes = Reported::Value(vec![DeviceProcess { pid: 42, ..DeviceProcess::default() }]);
        reading.push(device);
        resolver.resolve_processes(&mut reading);
        let stat = dir.path().join("proc/42/stat");
        fs::write(stat, "42 (z) S 1 1 1 0 -1 0 1 0 0 0 1 1 0 0 20 0 1 0 999999 1 1\n").unwrap();
        fs::write(dir.path().join("proc/42/cmdline"), "other\0").unwrap();
        let HostProcessLookup::Known(facts) = resolver.look_up(42) else { panic!("unknown") };
        assert_eq!((facts.start_ticks, &*facts.command), (999_999, "other"));
    }

    #[test]
    fn in_a_namespace_of_its_own_nothing_is_attributed_not_even_a_number_that_exists() {
        let (_dir, paths) = machine("pid:[4026532999]");
        assert!(matches!(HostProcessResolver::new(&paths).look_up(42), HostProcessLookup::Unattributed(_)));
    }

    #[test]
    fn an_exited_process_is_unattributed() {
        let (_dir, paths) = machine(HOST_PID_NAMESPACE);
        assert!(matches!(HostProcessResolver::new(&paths).look_up(43), HostProcessLookup::Unattributed(_)));
    }

    #[test]
    fn the_most_specific_cgroup_is_chosen() {
        assert_eq!(cgroup("12:cpu:/a\n5:memory:/m\n0::/\n"), Some("/m"));
        assert_eq!(cgroup("0::/u\n5:memory:/m\n"), Some("/u"));
        assert_eq!(cgroup("nonsense"), None);
    }
}
