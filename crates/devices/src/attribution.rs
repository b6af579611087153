//! Which process of this host a driver means when it names a number.
//!
//! Drivers name processes by their number in the host's PID namespace. Seen from another namespace that number means
//! nothing, or worse, some other process; then a process stays unattributed, and the reason is said.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::detect::SourcePaths;
use crate::kernel_file;
use crate::reported::{Reported, truncate_text};
use crate::source_reading::SourceReading;

/// The process of this host that a driver means by a number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum HostProcessLookup {
    /// It was not looked up.
    #[default]
    NotInspected,
    /// A process of this host.
    Known(Arc<ProcessFacts>),
    /// It cannot be told; the text says why.
    Unattributed(Arc<str>),
}

/// What the host knows of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    /// When it started, in clock ticks since boot; with the pid it is unique until the next boot.
    pub start_ticks: u64,
    /// Whose it is.
    pub uid: u32,
    /// The name of that user, where the machine's own list knows one.
    pub user: Option<Arc<str>>,
    /// Its command line.
    pub command: Arc<str>,
    /// Its control group.
    pub cgroup: Option<Arc<str>>,
}

/// Looks processes up, and remembers what does not change.
#[derive(Debug)]
pub struct HostProcessResolver {
    proc: PathBuf,
    passwd: PathBuf,
    /// Why no number can be trusted here, where none can.
    blind: Option<Arc<str>>,
    known: HashMap<u32, Arc<ProcessFacts>>,
    users: HashMap<u32, Option<Arc<str>>>,
}

/// The inode of the PID namespace the kernel starts with, the same on every Linux.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Whether this process is in the host's PID namespace, in which drivers number processes; `proc` is where procfs is.
pub(crate) fn has_host_pids(proc: &Path) -> Reported<bool> {
    match fs::read_link(proc.join("self/ns/pid")) {
        Ok(namespace) => Reported::Value(namespace.as_os_str() == HOST_PID_NAMESPACE),
        Err(error) => kernel_file::from_io_error(&error),
    }
}

impl HostProcessResolver {
    /// For the machine at these places.
    pub fn new(places: &SourcePaths) -> Self {
        let blind = match has_host_pids(&places.proc).value() {
            Some(true) => None,
            Some(false) => Some("this agent runs in a PID namespace of its own; process numbers are those of the host"),
            None => Some("the PID namespace of this agent cannot be told"),
        };
        Self {
            proc: places.proc.clone(),
            passwd: places.etc.join("passwd"),
            blind: blind.map(Into::into),
            known: HashMap::new(),
            users: HashMap::new(),
        }
    }

    /// Looks up every process of a snapshot, and forgets processes that are on no device any more.
    pub fn resolve_processes(&mut self, snapshot: &mut SourceReading) {
        let mut seen = HashMap::new();
        for device in &mut snapshot.devices {
            let Reported::Value(processes) = &mut device.processes else { continue };
            for process in processes {
                process.host_lookup = self.look_up(process.pid);
                if let HostProcessLookup::Known(facts) = &process.host_lookup {
                    seen.insert(process.pid, facts.clone());
                }
            }
        }
        self.known = seen;
    }

    /// Looks up the process with this number.
    pub(crate) fn look_up(&mut self, pid: u32) -> HostProcessLookup {
        if let Some(reason) = &self.blind {
            return HostProcessLookup::Unattributed(reason.clone());
        }
        match self.facts(pid) {
            Some(facts) => HostProcessLookup::Known(facts),
            None => {
                HostProcessLookup::Unattributed("no such process is visible here: it has ended, or is hidden".into())
            }
        }
    }

    fn facts(&mut self, pid: u32) -> Option<Arc<ProcessFacts>> {
        let folder = self.proc.join(pid.to_string());
        let start_ticks = start_ticks(&read(&folder, "stat")?)?;
        let cgroup = read(&folder, "cgroup").as_deref().and_then(cgroup).map(Into::into);
        if let Some(known) = self.known.get(&pid)
            && known.start_ticks == start_ticks
            && known.cgroup == cgroup
        {
            return Some(known.clone());
        }
        let uid = uid(&read(&folder, "status")?)?;
        let user = self.user(uid);
        let command = command(&folder).into();
        Some(Arc::new(ProcessFacts { start_ticks, uid, user, command, cgroup }))
    }

    /// The name of a user, by the machine's own list: asking a directory service could hang.
    fn user(&mut self, uid: u32) -> Option<Arc<str>> {
        let look = || user_name(&fs::read_to_string(&self.passwd).ok()?, uid).map(Into::into);
        self.users.entry(uid).or_insert_with(look).clone()
    }
}

/// The name of a user in a list like `/etc/passwd`.
pub(crate) fn user_name(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

fn read(folder: &Path, name: &str) -> Option<String> {
    kernel_file::read_text(&folder.join(name)).into_value()
}

/// The start time in a `stat` file. The command in it may hold blanks and brackets, so fields count from its end.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, after_command) = stat.rsplit_once(')')?;
    after_command.split_whitespace().nth(19)?.parse().ok()
}

/// The effective user in a `status` file.
fn uid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The control group in a `cgroup` file: of the unified hierarchy, else of the memory controller, else the first.
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

/// The command line, or the short name in brackets where there is none.
fn command(folder: &Path) -> String {
    let line = kernel_file::read_bytes(&folder.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ");
    if !line.is_empty() {
        return truncate_text(&line).into_owned();
    }
    read(folder, "comm").map_or_else(String::new, |name| format!("[{name}]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detected_device::{DetectedDevice, DeviceProcess};
    use gpupool_core::Vendor;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A machine with a namespace and one process, 42.
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
        let places =
            SourcePaths { proc: dir.path().join("proc"), etc: dir.path().join("etc"), ..SourcePaths::default() };
        (dir, places)
    }

    #[test]
    fn a_process_of_this_host_is_known_with_start_user_command_and_cgroup() {
        let (_dir, places) = machine(HOST_PID_NAMESPACE);
        let HostProcessLookup::Known(facts) = HostProcessResolver::new(&places).look_up(42) else { panic!("unknown") };
        assert_eq!((facts.start_ticks, facts.uid, facts.user.as_deref()), (987_654, 1001, Some("alice")));
        assert_eq!((&*facts.command, facts.cgroup.as_deref()), ("python train.py", Some("/user.slice/job")));
    }

    #[test]
    fn a_number_that_was_given_to_another_process_means_the_other_process() {
        let (dir, places) = machine(HOST_PID_NAMESPACE);
        let mut resolver = HostProcessResolver::new(&places);
        let mut snapshot = SourceReading::default();
        let mut device = DetectedDevice::new(Vendor::Nvidia);
        device.processes = Reported::Value(vec![DeviceProcess { pid: 42, ..DeviceProcess::default() }]);
        snapshot.push(device);
        resolver.resolve_processes(&mut snapshot);
        let stat = dir.path().join("proc/42/stat");
        fs::write(stat, "42 (z) S 1 1 1 0 -1 0 1 0 0 0 1 1 0 0 20 0 1 0 999999 1 1\n").unwrap();
        fs::write(dir.path().join("proc/42/cmdline"), "other\0").unwrap();
        let HostProcessLookup::Known(facts) = resolver.look_up(42) else { panic!("unknown") };
        assert_eq!((facts.start_ticks, &*facts.command), (999_999, "other"));
    }

    #[test]
    fn in_a_namespace_of_its_own_nothing_is_attributed_not_even_a_number_that_exists() {
        let (_dir, places) = machine("pid:[4026532999]");
        assert!(matches!(HostProcessResolver::new(&places).look_up(42), HostProcessLookup::Unattributed(_)));
    }

    #[test]
    fn a_process_that_is_gone_is_unattributed() {
        let (_dir, places) = machine(HOST_PID_NAMESPACE);
        assert!(matches!(HostProcessResolver::new(&places).look_up(43), HostProcessLookup::Unattributed(_)));
    }

    #[test]
    fn the_cgroup_that_says_most_is_taken() {
        assert_eq!(cgroup("12:cpu:/a\n5:memory:/m\n0::/\n"), Some("/m"));
        assert_eq!(cgroup("0::/u\n5:memory:/m\n"), Some("/u"));
        assert_eq!(cgroup("nonsense"), None);
    }
}
