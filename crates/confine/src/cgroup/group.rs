//! One group, from its making to its removal: who is in it, moving a process in, killing all of it, waiting until it is
//! empty. A group made before a restart of the program is found again; one whose program was killed is removed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::process::Signal;

use super::detect::{LEAF, OURS, Place, ours, strangers};
use super::limit::{put, write};
use super::{At, CgroupError, CgroupLimits, CgroupManager, CgroupVersion};
use crate::limits::{
    EMPTY_POLL_INTERVAL, GROUP_DEPTH, GROUP_KILL_PATIENCE, GROUP_NAME_LENGTH, KILL_ROUND_PAUSE, LEAF_ROUNDS,
    LEFTOVER_AGE, LEFTOVERS,
};
use crate::process::{ProcFs, ProcessHandle, ProcessId};
use crate::wait_for;

/// A group of processes that is ours: made by [`super::CgroupManager::create`] or found again by [`super::CgroupManager::open`].
///
/// Dropping it leaves the group in the kernel; [`ProcessCgroup::remove`] ends it.
#[derive(Debug)]
pub struct ProcessCgroup {
    name: String,
    /// The group's directories, one per hierarchy; the first tells who is in it.
    parts: Vec<Part>,
}

/// The group's directory in one hierarchy.
#[derive(Debug)]
pub(super) struct Part {
    pub place: Place,
    pub path: PathBuf,
}

impl CgroupManager {
    /// Makes an empty group with these limits. On an error nothing of it is left.
    pub fn create(&self, name: &str, limits: &CgroupLimits) -> Result<ProcessCgroup, CgroupError> {
        check_name(name)?;
        if !self.can_create() {
            return Err(CgroupError::NotPossible { why: self.unavailable_reason.clone() });
        }
        let mut made = Vec::new();
        for place in &self.places {
            match make(place, name) {
                Ok(part) => made.push(part),
                Err(error) => {
                    remove_parts(&made);
                    return Err(error);
                }
            }
        }
        let group = ProcessCgroup { name: name.to_owned(), parts: made };
        if let Err(error) = group.set_limits(limits) {
            remove_parts(&group.parts);
            return Err(error);
        }
        Ok(group)
    }

    /// Finds a group made earlier, by this or a former run of the program; `None` if there is none of that name.
    pub fn open(&self, name: &str) -> Result<Option<ProcessCgroup>, CgroupError> {
        check_name(name)?;
        let parts = self.places.iter().map(|place| part(place, name));
        let parts: Vec<Part> = parts.filter(|part| part.path.is_dir()).collect();
        Ok((!parts.is_empty()).then(|| ProcessCgroup { name: name.to_owned(), parts }))
    }

    /// The names of all groups there are, also those of former runs.
    pub fn cgroup_names(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = BTreeSet::new();
        for base in self.base_paths() {
            let groups = groups_in(&base)?;
            let found = groups.iter().filter_map(|group| group.file_name()?.to_str());
            names.extend(found.filter(|name| check_name(name).is_ok()).map(str::to_owned));
        }
        Ok(names.into_iter().collect())
    }
}

fn check_name(name: &str) -> Result<(), CgroupError> {
    // No dots: the kernel's own files in the same directory have them.
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fits = (1..=GROUP_NAME_LENGTH).contains(&name.len()) && name.chars().all(allowed);
    // These two would stand beside the controllers' own files of v1 (`tasks`, …), which have no dot either.
    if !fits || name == "tasks" || name == "notify_on_release" {
        return Err(CgroupError::InvalidName { name: name.to_owned() });
    }
    Ok(())
}

fn part(place: &Place, name: &str) -> Part {
    Part { path: place.base().join(name), place: place.clone() }
}

fn make(place: &Place, name: &str) -> Result<Part, CgroupError> {
    let base = place.base();
    if place.version == CgroupVersion::V2 {
        hand_down_controllers(place, &place.parent)?;
    }
    make_directory(&base)?;
    if place.version == CgroupVersion::V2 {
        hand_down_controllers(place, &base)?;
    }
    let part = part(place, name);
    match std::fs::create_dir(&part.path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(CgroupError::Exists { path: part.path }),
        other => other.at("making", &part.path).map(|()| part),
    }
}

/// Makes a directory unless it is there.
fn make_directory(path: &Path) -> Result<(), CgroupError> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.at("making", path),
    }
}

/// Lets the children of a v2 group have the controllers we use.
fn hand_down_controllers(place: &Place, group: &Path) -> Result<(), CgroupError> {
    let file = group.join("cgroup.subtree_control");
    for (controller, wanted) in [("memory", place.memory), ("pids", place.pids), ("dmem", place.dmem)] {
        if !wanted
            || std::fs::read_to_string(&file).at("reading", &file)?.split_ascii_whitespace().any(|c| c == controller)
        {
            continue;
        }
        hand_down(group, &file, &format!("+{controller}"))?;
    }
    Ok(())
}

fn hand_down(group: &Path, file: &Path, order: &str) -> Result<(), CgroupError> {
    for _ in 0..LEAF_ROUNDS {
        match put(file, order) {
            // The group holds processes itself. If they are all ours, we move one level down, out of the way; and again
            // where other threads started more meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && strangers(group).is_ok_and(|n| n == 0) => {
                move_into_leaf(group)?;
            }
            other => return other.at("writing", file),
        }
    }
    write(file, order)
}

fn move_into_leaf(group: &Path) -> Result<(), CgroupError> {
    debug_assert!(!group.ends_with(OURS), "we never sit in the directory of the groups");
    let leaf = group.join(LEAF);
    make_directory(&leaf)?;
    let file = leaf.join("cgroup.procs");
    let inside = std::fs::read_to_string(group.join("cgroup.procs")).at("reading", group)?;
    for pid in ours().at("looking for processes in", group)? {
        if !inside.lines().any(|line| line == pid.to_string()) {
            continue;
        }
        match put(&file, &pid.to_string()) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other.at("writing", &file)?,
        }
    }
    Ok(())
}

/// Takes back directories made a moment ago; they are empty, and one that stays does no harm.
fn remove_parts(parts: &[Part]) {
    for part in parts {
        if let Err(error) = std::fs::remove_dir(&part.path) {
            tracing::warn!(path = %part.path.display(), %error, "a half-made group could not be removed");
        }
    }
}

impl ProcessCgroup {
    /// Its name, by which [`super::CgroupManager::open`] finds it again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its directory in the hierarchy that tells who is in it.
    pub fn path(&self) -> &Path {
        &self.tracker().path
    }

    /// Moves a process in. Its children of later are in too; those it has already are not.
    pub fn add_process(&self, process: ProcessId) -> Result<(), CgroupError> {
        if process.pid <= 1 || process.pid == std::process::id() {
            return Err(self.refused(format!("process {} is never put into a group that may be killed", process.pid)));
        }
        let gone = || CgroupError::ProcessGone(process);
        // Held while it is moved, so that an ended process is not mistaken for the next one with its pid.
        let held = ProcessHandle::open(process).at("opening process of", self.path())?.ok_or_else(gone)?;
        for part in &self.parts {
            match write(&part.path.join("cgroup.procs"), &process.pid.to_string()) {
                Err(CgroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => return Err(gone()),
                other => other?,
            }
        }
        if held.has_exited().at("watching process of", self.path())? { Err(gone()) } else { Ok(()) }
    }

    /// The pids of all processes in the group and in groups the job made below it.
    pub fn processes(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = BTreeSet::new();
        for part in &self.parts {
            for directory in with_subgroups(&part.path)? {
                let file = directory.join("cgroup.procs");
                let text = match std::fs::read_to_string(&file) {
                    Err(error) if has_vanished(&error) => continue,
                    other => other.at("reading", &file)?,
                };
                // A process of another pid namespace shows as 0: it cannot be named, only killed with the group.
                pids.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()).filter(|&pid| pid != 0));
            }
        }
        Ok(pids.into_iter().collect())
    }

    /// Whether any process is in the group.
    pub fn is_populated(&self) -> Result<bool, CgroupError> {
        let tracker = self.tracker();
        if tracker.place.version == CgroupVersion::V1 {
            return Ok(!self.processes()?.is_empty());
        }
        let file = tracker.path.join("cgroup.events");
        Ok(says_populated(&std::fs::read_to_string(&file).at("reading", &file)?))
    }

    /// Removes the empty group from the kernel; one that still holds processes is an error and stays.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let left = self.processes()?;
        if !left.is_empty() {
            return Err(CgroupError::StillAlive { path: self.path().to_owned(), left });
        }
        for part in &self.parts {
            self.check_is_ours(part)?;
            for directory in with_subgroups(&part.path)?.iter().rev() {
                match std::fs::remove_dir(directory) {
                    Err(error) if has_vanished(&error) => {}
                    other => other.at("removing", directory)?,
                }
            }
        }
        Ok(())
    }

    /// The guard before anything that destroys: the directory lies strictly below the directory of our groups.
    fn check_is_ours(&self, part: &Part) -> Result<(), CgroupError> {
        let base = part.place.base();
        let inside = part.path.parent() == Some(base.as_path()) && base.ends_with(OURS);
        if inside { Ok(()) } else { Err(self.refused(format!("it does not lie in {}", base.display()))) }
    }

    fn refused(&self, why: String) -> CgroupError {
        CgroupError::Refused { path: self.path().to_owned(), why }
    }

    fn tracker(&self) -> &Part {
        &self.parts[0]
    }

    pub(super) fn part_with(&self, wanted: impl Fn(&Place) -> bool) -> Option<&Part> {
        self.parts.iter().find(|part| wanted(&part.place))
    }
}

/// The directory and all groups below it, parents first.
fn with_subgroups(top: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let mut found = vec![top.to_owned()];
    let mut level = vec![top.to_owned()];
    for _ in 0..GROUP_DEPTH {
        let mut below = Vec::new();
        for directory in level {
            below.extend(groups_in(&directory)?);
        }
        if below.is_empty() {
            break;
        }
        found.extend(below.iter().cloned());
        level = below;
    }
    Ok(found)
}

/// The groups directly in this directory; none where it is gone.
fn groups_in(directory: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if has_vanished(&error) => return Ok(Vec::new()),
        other => other.at("listing", directory)?,
    };
    let groups = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(groups.map(|entry| entry.path()).collect())
}

/// The group was removed while we looked; reading an open file of it then says "no such device".
fn has_vanished(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

impl ProcessCgroup {
    /// Kills every process of the group, and of groups below it: at one stroke where the kernel offers it, else frozen
    /// first so that nothing can fork away. With `cgroup.kill` they may still be ending when this returns:
    /// [`ProcessCgroup::wait_empty`] waits for that. An empty or removed group is fine.
    pub fn kill(&self) -> Result<(), CgroupError> {
        for part in &self.parts {
            self.check_is_ours(part)?;
        }
        let ours = std::process::id();
        if self.processes()?.iter().any(|&pid| pid == 1 || pid == ours) {
            return Err(self.refused("it holds process 1 or this program".to_owned()));
        }
        if self.kill_at_one_stroke()? {
            // A process moved out of the tracking hierarchy alone is still known by the others.
            return self.signal_all();
        }
        self.kill_in_rounds()
    }

    fn kill_at_one_stroke(&self) -> Result<bool, CgroupError> {
        let file = self.tracker().path.join("cgroup.kill");
        match put(&file, "1") {
            Ok(()) => Ok(true),
            // Kernels before 5.14, and v1.
            Err(error) if has_vanished(&error) => Ok(false),
            Err(error) => Err(error).at("writing", &file),
        }
    }

    fn kill_in_rounds(&self) -> Result<(), CgroupError> {
        let give_up = Instant::now() + GROUP_KILL_PATIENCE;
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
            // Thawed also after an error: nobody may be left frozen for ever, and v1 kills only what runs.
            self.freeze(false);
            signalled?;
            std::thread::sleep(KILL_ROUND_PAUSE);
        }
    }

    /// Freezing is a help, not a need: without it the rounds still win over anything but a fork bomb.
    fn freeze(&self, frozen: bool) {
        let Some(part) = self.part_with(|place| place.freezer) else { return };
        let (file, value) = match (part.place.version, frozen) {
            (CgroupVersion::V2, true) => ("cgroup.freeze", "1"),
            (CgroupVersion::V2, false) => ("cgroup.freeze", "0"),
            (CgroupVersion::V1, true) => ("freezer.state", "FROZEN"),
            (CgroupVersion::V1, false) => ("freezer.state", "THAWED"),
        };
        for directory in with_subgroups(&part.path).unwrap_or_default() {
            if let Err(error) = put(&directory.join(file), value) {
                tracing::debug!(group = %directory.display(), %error, frozen, "could not freeze or thaw");
            }
        }
    }

    fn signal_all(&self) -> Result<(), CgroupError> {
        for pid in self.processes()? {
            let Some(id) = ProcessId::of_pid(pid).at("looking up a process of", self.path())? else {
                continue;
            };
            let held = ProcessHandle::open(id).at("opening a process of", self.path())?;
            // Asked again now that it is held: the pid listed above may have passed to a stranger in between.
            let Some(held) = held else { continue };
            if self.processes()?.contains(&pid) {
                held.signal(Signal::KILL).at("killing a process of", self.path())?;
            }
        }
        Ok(())
    }
}

impl ProcessCgroup {
    /// Waits until no process is in the group: by the kernel's event in v2, by looking every now and then in v1. `false` if
    /// one still is when the deadline passes.
    pub fn wait_empty(&self, deadline: Instant) -> Result<bool, CgroupError> {
        let mut events = self.open_events()?;
        loop {
            let is_empty = match &mut events {
                Some(events) => !self.is_populated_now(events)?,
                None => self.processes()?.is_empty(),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if is_empty || left.is_zero() {
                return Ok(is_empty);
            }
            match &events {
                Some(events) => drop(wait_for(events, PollFlags::PRI, left).at("waiting for", self.path())?),
                None => std::thread::sleep(left.min(EMPTY_POLL_INTERVAL)),
            }
        }
    }

    /// Reads the events again, by which the kernel tells the next change of them.
    fn is_populated_now(&self, events: &mut File) -> Result<bool, CgroupError> {
        let mut text = String::new();
        match events.rewind().and_then(|()| events.read_to_string(&mut text)) {
            Err(error) if has_vanished(&error) => return Ok(false),
            other => other.at("reading the events of", self.path())?,
        };
        Ok(says_populated(&text))
    }

    /// The file whose priority readiness (`POLLPRI`, after it was read) tells that the group became empty or populated,
    /// for waiting asynchronously; `None` in v1, which has no such event, and for a removed group.
    pub fn open_events(&self) -> Result<Option<File>, CgroupError> {
        let tracker = self.tracker();
        if tracker.place.version == CgroupVersion::V1 {
            return Ok(None);
        }
        let path = tracker.path.join("cgroup.events");
        match File::open(&path) {
            Err(error) if has_vanished(&error) => Ok(None),
            other => other.at("opening", &path).map(Some),
        }
    }
}

fn says_populated(events: &str) -> bool {
    events.lines().any(|line| line == "populated 1")
}

/// Groups of programs that were killed before they could remove them.
///
/// A group of a job is named for the job's process, `run-PID-STARTED` or `worker-PID-STARTED`. Where that process is gone and
/// nobody is in the group, its owner is gone as well, or about to remove it. So such groups are looked at twice, and removed
/// if nothing changed: an owner that lives may still want to read how its job died.
#[derive(Debug)]
pub(crate) struct Leftovers {
    cgroups: CgroupManager,
    names: Vec<String>,
    due: Instant,
}

impl Leftovers {
    /// Looks once.
    pub fn look(cgroups: &CgroupManager) -> Self {
        let names = cgroups.cgroup_names().unwrap_or_default();
        let names = names.into_iter().filter(|name| is_nobodys(cgroups, name)).take(LEFTOVERS).collect();
        Self { cgroups: cgroups.clone(), names, due: Instant::now() + LEFTOVER_AGE }
    }

    /// When to look again; never, where there are none.
    pub fn due(&self) -> Option<Instant> {
        (!self.names.is_empty()).then_some(self.due)
    }

    /// Looks again, and removes them.
    pub fn remove(self) {
        for name in self.names.iter().filter(|name| is_nobodys(&self.cgroups, name)) {
            let Ok(Some(group)) = self.cgroups.open(name) else { continue };
            match group.remove() {
                Ok(()) => tracing::debug!(name, "removed the group of a program that was killed"),
                // Somebody else's, or used again: no harm where it stays.
                Err(error) => tracing::debug!(name, %error, "a group that was left stays"),
            }
        }
    }
}

fn is_nobodys(cgroups: &CgroupManager, name: &str) -> bool {
    let Some(process) = process_of(name) else { return false };
    // One that cannot be looked up may be there.
    let is_there =
        ProcFs::system().stat(process.pid).map_or(true, |stat| stat.is_some_and(|stat| stat.id() == process));
    let is_empty =
        || cgroups.open(name).ok().flatten().is_some_and(|group| group.processes().is_ok_and(|all| all.is_empty()));
    !is_there && is_empty()
}

/// The process a group is named for.
fn process_of(name: &str) -> Option<ProcessId> {
    let rest = name.strip_prefix("run-").or_else(|| name.strip_prefix("worker-"))?;
    let (pid, started) = rest.split_once('-')?;
    Some(ProcessId { pid: pid.parse().ok()?, started: started.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for name in ["", ".", "..", "a/b", "../x", "memory.max", "tasks", "ü", "a b", &"x".repeat(65)] {
            assert!(matches!(check_name(name), Err(CgroupError::InvalidName { .. })), "{name:?} was allowed");
        }
        for name in ["lease-1", "L_9", &"x".repeat(64)] {
            check_name(name).unwrap();
        }
    }

    #[test]
    fn only_groups_of_jobs_name_a_process() {
        assert_eq!(process_of("run-12-345"), Some(ProcessId { pid: 12, started: 345 }));
        assert_eq!(process_of("worker-7-8"), Some(ProcessId { pid: 7, started: 8 }));
        for name in ["lease-1", "run-12", "run-x-1", "worker-1-2-3", "86910653-lease-1", "test-run-1-2"] {
            assert_eq!(process_of(name), None, "{name}");
        }
    }
}
