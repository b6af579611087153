//! One cgroup from creation to removal: its processes, adding a process, killing all, waiting until it is empty. A
//! cgroup created before a restart of the program can be opened again; orphaned cgroups of killed programs are removed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::process::Signal;

use super::detect::{AGENT_LEAF, BASE_DIRECTORY, UsableHierarchy, foreign_processes, own_processes};
use super::limit::{write_control_file, write_file};
use super::{CgroupError, CgroupIoContext, CgroupLimits, CgroupManager, CgroupVersion};
use crate::limits::{
    CGROUP_KILL_TIMEOUT, EMPTY_POLL_INTERVAL, KILL_ROUND_INTERVAL, LEAF_MOVE_ROUNDS, MAX_CGROUP_DEPTH,
    MAX_CGROUP_NAME_LENGTH, MAX_ORPHANED_CGROUPS, ORPHANED_CGROUP_AGE,
};
use crate::process::{ProcFs, ProcessHandle, ProcessId};
use crate::wait_until_ready;

/// One of our cgroups: created by [`super::CgroupManager::create`] or opened by [`super::CgroupManager::open`].
///
/// Dropping it leaves the cgroup in the kernel; [`ProcessCgroup::remove`] removes it.
#[derive(Debug)]
pub struct ProcessCgroup {
    name: String,
    /// Directories of the cgroup, one per hierarchy; the first one tracks its processes.
    directories: Vec<CgroupDirectory>,
}

/// Directory of the cgroup in one hierarchy.
#[derive(Debug)]
pub(super) struct CgroupDirectory {
    pub hierarchy: UsableHierarchy,
    pub path: PathBuf,
}

impl CgroupManager {
    /// Creates an empty cgroup with these limits. After an error no part of it remains.
    pub fn create(&self, name: &str, limits: &CgroupLimits) -> Result<ProcessCgroup, CgroupError> {
        check_name(name)?;
        if !self.can_create() {
            return Err(CgroupError::NotPossible { why: self.unavailable_reason.clone() });
        }
        let mut made = Vec::new();
        for hierarchy in &self.hierarchies {
            match create_directory(hierarchy, name) {
                Ok(part) => made.push(part),
                Err(error) => {
                    remove_directories(&made);
                    return Err(error);
                }
            }
        }
        let group = ProcessCgroup { name: name.to_owned(), directories: made };
        if let Err(error) = group.set_limits(limits) {
            remove_directories(&group.directories);
            return Err(error);
        }
        Ok(group)
    }

    /// Opens a cgroup created by this or a former run of the program; `None` if there is none of that name.
    pub fn open(&self, name: &str) -> Result<Option<ProcessCgroup>, CgroupError> {
        check_name(name)?;
        let directories = self.hierarchies.iter().map(|hierarchy| cgroup_directory(hierarchy, name));
        let directories: Vec<CgroupDirectory> = directories.filter(|part| part.path.is_dir()).collect();
        Ok((!directories.is_empty()).then(|| ProcessCgroup { name: name.to_owned(), directories }))
    }

    /// Lists the names of all cgroups, also those of former runs.
    pub fn cgroup_names(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = BTreeSet::new();
        for base in self.base_paths() {
            let groups = child_cgroups(&base)?;
            let found = groups.iter().filter_map(|group| group.file_name()?.to_str());
            names.extend(found.filter(|name| check_name(name).is_ok()).map(str::to_owned));
        }
        Ok(names.into_iter().collect())
    }
}

fn check_name(name: &str) -> Result<(), CgroupError> {
    // No dots: the kernel's own files in the same directory have them.
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fits = (1..=MAX_CGROUP_NAME_LENGTH).contains(&name.len()) && name.chars().all(allowed);
    // These two would clash with the controllers' own files of v1 (`tasks`, …), which have no dot either.
    if !fits || name == "tasks" || name == "notify_on_release" {
        return Err(CgroupError::InvalidName { name: name.to_owned() });
    }
    Ok(())
}

fn cgroup_directory(hierarchy: &UsableHierarchy, name: &str) -> CgroupDirectory {
    CgroupDirectory { path: hierarchy.base().join(name), hierarchy: hierarchy.clone() }
}

fn create_directory(hierarchy: &UsableHierarchy, name: &str) -> Result<CgroupDirectory, CgroupError> {
    let base = hierarchy.base();
    if hierarchy.version == CgroupVersion::V2 {
        enable_controllers(hierarchy, &hierarchy.parent)?;
    }
    ensure_directory(&base)?;
    if hierarchy.version == CgroupVersion::V2 {
        enable_controllers(hierarchy, &base)?;
    }
    let part = cgroup_directory(hierarchy, name);
    match std::fs::create_dir(&part.path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(CgroupError::Exists { path: part.path }),
        other => other.context("create", &part.path).map(|()| part),
    }
}

/// Creates a directory unless it exists.
fn ensure_directory(path: &Path) -> Result<(), CgroupError> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.context("create", path),
    }
}

/// Enables the controllers that we use for the children of a v2 cgroup.
fn enable_controllers(hierarchy: &UsableHierarchy, group: &Path) -> Result<(), CgroupError> {
    let file = group.join("cgroup.subtree_control");
    for (controller, wanted) in [("memory", hierarchy.memory), ("pids", hierarchy.pids), ("dmem", hierarchy.dmem)] {
        if !wanted
            || std::fs::read_to_string(&file).context("read", &file)?.split_ascii_whitespace().any(|c| c == controller)
        {
            continue;
        }
        enable_controller(group, &file, &format!("+{controller}"))?;
    }
    Ok(())
}

fn enable_controller(group: &Path, file: &Path, order: &str) -> Result<(), CgroupError> {
    for _ in 0..LEAF_MOVE_ROUNDS {
        match write_file(file, order) {
            // The cgroup holds processes itself. If all are ours, they move one level down, repeatedly if other threads
            // start more meanwhile.
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && foreign_processes(group).is_ok_and(|n| n == 0) =>
            {
                move_into_leaf(group)?;
            }
            other => return other.context("write", file),
        }
    }
    write_control_file(file, order)
}

fn move_into_leaf(group: &Path) -> Result<(), CgroupError> {
    debug_assert!(!group.ends_with(BASE_DIRECTORY), "this process is never in the base directory");
    let leaf = group.join(AGENT_LEAF);
    ensure_directory(&leaf)?;
    let file = leaf.join("cgroup.procs");
    let inside = std::fs::read_to_string(group.join("cgroup.procs")).context("read", group)?;
    for pid in own_processes().context("list processes of", group)? {
        if !inside.lines().any(|line| line == pid.to_string()) {
            continue;
        }
        match write_file(&file, &pid.to_string()) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other.context("write", &file)?,
        }
    }
    Ok(())
}

/// Removes directories that were just created; they are empty, and a remaining one is harmless.
fn remove_directories(directories: &[CgroupDirectory]) {
    for part in directories {
        if let Err(error) = std::fs::remove_dir(&part.path) {
            tracing::warn!(path = %part.path.display(), %error, "cannot remove an incomplete cgroup");
        }
    }
}

impl ProcessCgroup {
    /// Returns the name by which [`super::CgroupManager::open`] finds the cgroup again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the directory in the hierarchy that tracks the processes.
    pub fn path(&self) -> &Path {
        &self.tracker().path
    }

    /// Adds a process. Its later children are members too; its existing children are not.
    pub fn add_process(&self, process: ProcessId) -> Result<(), CgroupError> {
        if process.pid <= 1 || process.pid == std::process::id() {
            return Err(self.refused(format!("process {} may not be added to a cgroup", process.pid)));
        }
        let gone = || CgroupError::ProcessGone(process);
        // The handle stays open during the move, so that a process that reuses the pid is not mistaken for this one.
        let held = ProcessHandle::open(process).context("open a process of", self.path())?.ok_or_else(gone)?;
        for part in &self.directories {
            match write_control_file(&part.path.join("cgroup.procs"), &process.pid.to_string()) {
                Err(CgroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => return Err(gone()),
                other => other?,
            }
        }
        if held.has_exited().context("poll a process of", self.path())? { Err(gone()) } else { Ok(()) }
    }

    /// Returns the pids of all processes in the cgroup and in cgroups that the job created below it.
    pub fn processes(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = BTreeSet::new();
        for part in &self.directories {
            for directory in cgroup_subtree(&part.path)? {
                let file = directory.join("cgroup.procs");
                let text = match std::fs::read_to_string(&file) {
                    Err(error) if has_vanished(&error) => continue,
                    other => other.context("read", &file)?,
                };
                // A process of another pid namespace shows as 0: it has no usable pid and can only be killed with the
                // cgroup.
                pids.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()).filter(|&pid| pid != 0));
            }
        }
        Ok(pids.into_iter().collect())
    }

    /// Whether the cgroup holds any process.
    pub fn is_populated(&self) -> Result<bool, CgroupError> {
        let tracker = self.tracker();
        if tracker.hierarchy.version == CgroupVersion::V1 {
            return Ok(!self.processes()?.is_empty());
        }
        let file = tracker.path.join("cgroup.events");
        Ok(parse_populated(&std::fs::read_to_string(&file).context("read", &file)?))
    }

    /// Removes the empty cgroup from the kernel; a populated cgroup is an error and stays.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let left = self.processes()?;
        if !left.is_empty() {
            return Err(CgroupError::StillAlive { path: self.path().to_owned(), left });
        }
        for part in &self.directories {
            self.check_is_ours(part)?;
            for directory in cgroup_subtree(&part.path)?.iter().rev() {
                match std::fs::remove_dir(directory) {
                    Err(error) if has_vanished(&error) => {}
                    other => other.context("remove", directory)?,
                }
            }
        }
        Ok(())
    }

    /// Checks, before any destructive operation, that the directory lies directly in the directory of our cgroups.
    fn check_is_ours(&self, part: &CgroupDirectory) -> Result<(), CgroupError> {
        let base = part.hierarchy.base();
        let inside = part.path.parent() == Some(base.as_path()) && base.ends_with(BASE_DIRECTORY);
        if inside { Ok(()) } else { Err(self.refused(format!("it is not in {}", base.display()))) }
    }

    fn refused(&self, why: String) -> CgroupError {
        CgroupError::Refused { path: self.path().to_owned(), why }
    }

    fn tracker(&self) -> &CgroupDirectory {
        &self.directories[0]
    }

    pub(super) fn directory_with(&self, wanted: impl Fn(&UsableHierarchy) -> bool) -> Option<&CgroupDirectory> {
        self.directories.iter().find(|part| wanted(&part.hierarchy))
    }
}

/// Returns the directory and all cgroups below it, parents first.
fn cgroup_subtree(top: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let mut found = vec![top.to_owned()];
    let mut level = vec![top.to_owned()];
    for _ in 0..MAX_CGROUP_DEPTH {
        let mut below = Vec::new();
        for directory in level {
            below.extend(child_cgroups(&directory)?);
        }
        if below.is_empty() {
            break;
        }
        found.extend(below.iter().cloned());
        level = below;
    }
    Ok(found)
}

/// Returns the cgroups directly in this directory; none if it is gone.
fn child_cgroups(directory: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if has_vanished(&error) => return Ok(Vec::new()),
        other => other.context("list", directory)?,
    };
    let groups = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(groups.map(|entry| entry.path()).collect())
}

/// Whether the cgroup was removed meanwhile; reading an open file of it then fails with "no such device".
fn has_vanished(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

impl ProcessCgroup {
    /// Kills every process in the cgroup and in cgroups below it: with `cgroup.kill` if the kernel has it, otherwise by
    /// signals while the cgroup is frozen, so that no process can fork. With `cgroup.kill` processes may still be
    /// exiting when this returns: [`ProcessCgroup::wait_empty`] waits for them. An empty or removed cgroup is no error.
    pub fn kill(&self) -> Result<(), CgroupError> {
        for part in &self.directories {
            self.check_is_ours(part)?;
        }
        let ours = std::process::id();
        if self.processes()?.iter().any(|&pid| pid == 1 || pid == ours) {
            return Err(self.refused("it holds process 1 or this program".to_owned()));
        }
        if self.try_cgroup_kill()? {
            // A process moved out of the tracking hierarchy is still in the others.
            return self.signal_all();
        }
        self.freeze_and_kill()
    }

    fn try_cgroup_kill(&self) -> Result<bool, CgroupError> {
        let file = self.tracker().path.join("cgroup.kill");
        match write_file(&file, "1") {
            Ok(()) => Ok(true),
            // Kernels before 5.14, and v1.
            Err(error) if has_vanished(&error) => Ok(false),
            Err(error) => Err(error).context("write", &file),
        }
    }

    fn freeze_and_kill(&self) -> Result<(), CgroupError> {
        let give_up = Instant::now() + CGROUP_KILL_TIMEOUT;
        loop {
            let left = self.processes()?;
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= give_up {
                return Err(CgroupError::StillAlive { path: self.path().to_owned(), left });
            }
            self.freeze(true);
            let signalled = self.signal_all();
            // Thawed also after an error: no process may stay frozen, and v1 kills only running processes.
            self.freeze(false);
            signalled?;
            std::thread::sleep(KILL_ROUND_INTERVAL);
        }
    }

    /// Freezes or thaws the cgroup. Freezing is optional: without it the rounds still defeat everything but a fork
    /// bomb.
    fn freeze(&self, frozen: bool) {
        let Some(part) = self.directory_with(|hierarchy| hierarchy.freezer) else { return };
        let (file, value) = match (part.hierarchy.version, frozen) {
            (CgroupVersion::V2, true) => ("cgroup.freeze", "1"),
            (CgroupVersion::V2, false) => ("cgroup.freeze", "0"),
            (CgroupVersion::V1, true) => ("freezer.state", "FROZEN"),
            (CgroupVersion::V1, false) => ("freezer.state", "THAWED"),
        };
        for directory in cgroup_subtree(&part.path).unwrap_or_default() {
            if let Err(error) = write_file(&directory.join(file), value) {
                tracing::debug!(cgroup = %directory.display(), %error, frozen, "cannot freeze or thaw");
            }
        }
    }

    fn signal_all(&self) -> Result<(), CgroupError> {
        for pid in self.processes()? {
            let Some(id) = ProcessId::of_pid(pid).context("look up a process of", self.path())? else {
                continue;
            };
            let held = ProcessHandle::open(id).context("open a process of", self.path())?;
            // Checked again with the open handle: the listed pid may belong to another process by now.
            let Some(held) = held else { continue };
            if self.processes()?.contains(&pid) {
                held.signal(Signal::KILL).context("kill a process of", self.path())?;
            }
        }
        Ok(())
    }
}

impl ProcessCgroup {
    /// Waits until the cgroup is empty: by the kernel's event in v2, by polling in v1. `false` if it is not empty at
    /// the deadline.
    pub fn wait_empty(&self, deadline: Instant) -> Result<bool, CgroupError> {
        let mut events = self.open_events()?;
        loop {
            let is_empty = match &mut events {
                Some(events) => !self.reread_populated(events)?,
                None => self.processes()?.is_empty(),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if is_empty || left.is_zero() {
                return Ok(is_empty);
            }
            match &events {
                Some(events) => _ = wait_until_ready(events, PollFlags::PRI, left).context("wait for", self.path())?,
                None => std::thread::sleep(left.min(EMPTY_POLL_INTERVAL)),
            }
        }
    }

    /// Reads the events again, which re-arms the kernel's notification.
    fn reread_populated(&self, events: &mut File) -> Result<bool, CgroupError> {
        let mut text = String::new();
        match events.rewind().and_then(|()| events.read_to_string(&mut text)) {
            Err(error) if has_vanished(&error) => return Ok(false),
            other => other.context("read the events of", self.path())?,
        };
        Ok(parse_populated(&text))
    }

    /// Opens the file whose priority readiness (`POLLPRI`, after a read) signals that the cgroup became empty or
    /// populated, for asynchronous waiting; `None` in v1, which has no such event, and for a removed cgroup.
    pub fn open_events(&self) -> Result<Option<File>, CgroupError> {
        let tracker = self.tracker();
        if tracker.hierarchy.version == CgroupVersion::V1 {
            return Ok(None);
        }
        let path = tracker.path.join("cgroup.events");
        match File::open(&path) {
            Err(error) if has_vanished(&error) => Ok(None),
            other => other.context("open", &path).map(Some),
        }
    }
}

fn parse_populated(events: &str) -> bool {
    events.lines().any(|line| line == "populated 1")
}

/// Cgroups of programs that were killed before they could remove them.
///
/// The cgroup of a job is named after the job's process, `run-PID-STARTED` or `worker-PID-STARTED`. If that process is
/// gone and the cgroup is empty, its owner is gone too, or about to remove it. Such cgroups are therefore checked twice
/// and removed if nothing changed: a living owner may still want to read the cause of its job's end.
#[derive(Debug)]
pub(crate) struct OrphanedCgroups {
    cgroups: CgroupManager,
    names: Vec<String>,
    due: Instant,
}

impl OrphanedCgroups {
    /// Finds the cgroups at the first check.
    pub fn find(cgroups: &CgroupManager) -> Self {
        let names = cgroups.cgroup_names().unwrap_or_default();
        let names = names.into_iter().filter(|name| is_orphaned(cgroups, name)).take(MAX_ORPHANED_CGROUPS).collect();
        Self { cgroups: cgroups.clone(), names, due: Instant::now() + ORPHANED_CGROUP_AGE }
    }

    /// Returns the time of the second check; `None` if there are no orphaned cgroups.
    pub fn due(&self) -> Option<Instant> {
        (!self.names.is_empty()).then_some(self.due)
    }

    /// Checks again and removes the cgroups.
    pub fn remove(self) {
        for name in self.names.iter().filter(|name| is_orphaned(&self.cgroups, name)) {
            let Ok(Some(group)) = self.cgroups.open(name) else { continue };
            match group.remove() {
                Ok(()) => tracing::debug!(name, "removed the cgroup of a killed program"),
                // In use by another program, or used again: harmless if it stays.
                Err(error) => tracing::debug!(name, %error, "an orphaned cgroup remains"),
            }
        }
    }
}

fn is_orphaned(cgroups: &CgroupManager, name: &str) -> bool {
    let Some(process) = parse_process_id(name) else { return false };
    // An unreadable process may exist.
    let is_there =
        ProcFs::system().stat(process.pid).map_or(true, |stat| stat.is_some_and(|stat| stat.id() == process));
    let is_empty =
        || cgroups.open(name).ok().flatten().is_some_and(|group| group.processes().is_ok_and(|all| all.is_empty()));
    !is_there && is_empty()
}

/// Parses the process that a cgroup is named after.
fn parse_process_id(name: &str) -> Option<ProcessId> {
    let rest = name.strip_prefix("run-").or_else(|| name.strip_prefix("worker-"))?;
    let (pid, started) = rest.split_once('-')?;
    Some(ProcessId { pid: pid.parse().ok()?, started: started.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_directory_are_rejected() {
        for name in ["", ".", "..", "a/b", "../x", "memory.max", "tasks", "ü", "a b", &"x".repeat(65)] {
            assert!(matches!(check_name(name), Err(CgroupError::InvalidName { .. })), "{name:?} was allowed");
        }
        for name in ["lease-1", "L_9", &"x".repeat(64)] {
            check_name(name).unwrap();
        }
    }

    #[test]
    fn only_names_of_job_cgroups_hold_a_process_id() {
        assert_eq!(parse_process_id("run-12-345"), Some(ProcessId { pid: 12, started: 345 }));
        assert_eq!(parse_process_id("worker-7-8"), Some(ProcessId { pid: 7, started: 8 }));
        for name in ["lease-1", "run-12", "run-x-1", "worker-1-2-3", "86910653-lease-1", "test-run-1-2"] {
            assert_eq!(parse_process_id(name), None, "{name}");
        }
    }
}
