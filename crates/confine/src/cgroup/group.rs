//! One group: who is in it, moving a process in, and its removal.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::error::{At, GroupError};
use super::limit::write;
use super::texts::Version;
use crate::limits::GROUP_DEPTH;
use crate::process::{ProcessHandle, ProcessId};

/// A group of processes that is ours: made by [`super::Cgroups::create`] or found again by [`super::Cgroups::open`].
///
/// Dropping it leaves the group in the kernel; [`Group::remove`] ends it.
#[derive(Debug)]
pub struct Group {
    name: String,
    /// The group's directories, one per hierarchy; the first tells who is in it.
    parts: Vec<Part>,
}

/// The group's directory in one hierarchy.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) version: Version,
    pub(super) path: PathBuf,
    /// The directory of all our groups, which `path` must lie in.
    pub(super) base: PathBuf,
    pub(super) memory: bool,
    pub(super) pids: bool,
    pub(super) cpu: bool,
    pub(super) dmem: bool,
    pub(super) freezer: bool,
}

impl Group {
    pub(super) fn new(name: &str, parts: Vec<Part>) -> Self {
        Self { name: name.to_owned(), parts }
    }

    /// Its name, by which [`super::Cgroups::open`] finds it again.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its directory in the hierarchy that tells who is in it.
    pub fn path(&self) -> &Path {
        &self.tracker().path
    }

    /// Moves a process in. Its children of later are in too; those it has already are not.
    pub fn add(&self, process: ProcessId) -> Result<(), GroupError> {
        if process.pid <= 1 || process.pid == std::process::id() {
            return Err(self.refused(format!("process {} is never put into a group that may be killed", process.pid)));
        }
        let gone = || GroupError::ProcessGone(process);
        // Held while it is moved, so that an ended process is not mistaken for the next one with its pid.
        let held = ProcessHandle::open(process).at("opening process of", self.path())?.ok_or_else(gone)?;
        for part in &self.parts {
            match write(&part.path.join("cgroup.procs"), &process.pid.to_string()) {
                Err(GroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => return Err(gone()),
                other => other?,
            }
        }
        if held.is_gone().at("watching process of", self.path())? { Err(gone()) } else { Ok(()) }
    }

    /// The pids of all processes in the group and in groups the job made below it.
    pub fn processes(&self) -> Result<Vec<u32>, GroupError> {
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
    pub fn is_populated(&self) -> Result<bool, GroupError> {
        let tracker = self.tracker();
        if tracker.version == Version::V1 {
            return Ok(!self.processes()?.is_empty());
        }
        let file = tracker.path.join("cgroup.events");
        let text = std::fs::read_to_string(&file).at("reading", &file)?;
        Ok(text.lines().any(|line| line == "populated 1"))
    }

    /// Removes the empty group from the kernel; one that still holds processes is an error and stays.
    pub fn remove(&self) -> Result<(), GroupError> {
        let left = self.processes()?;
        if !left.is_empty() {
            return Err(GroupError::StillAlive { path: self.path().to_owned(), left });
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
    pub(super) fn check_is_ours(&self, part: &Part) -> Result<(), GroupError> {
        let inside = part.path.parent() == Some(part.base.as_path()) && part.base.ends_with(super::place::OURS);
        if inside { Ok(()) } else { Err(self.refused(format!("it does not lie in {}", part.base.display()))) }
    }

    pub(super) fn refused(&self, why: String) -> GroupError {
        GroupError::Refused { path: self.path().to_owned(), why }
    }

    pub(super) fn tracker(&self) -> &Part {
        &self.parts[0]
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(super) fn part_with(&self, wanted: impl Fn(&Part) -> bool) -> Option<&Part> {
        self.parts.iter().find(|part| wanted(part))
    }

    pub(super) fn into_parts(self) -> Vec<Part> {
        self.parts
    }
}

/// The directory and all groups below it, parents first.
pub(super) fn with_subgroups(top: &Path) -> Result<Vec<PathBuf>, GroupError> {
    let mut found = vec![top.to_owned()];
    let mut level = vec![top.to_owned()];
    for _ in 0..GROUP_DEPTH {
        let mut below = Vec::new();
        for directory in level {
            let entries = match std::fs::read_dir(&directory) {
                Err(error) if has_vanished(&error) => continue,
                other => other.at("listing", &directory)?,
            };
            let entries = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            below.extend(entries.map(|entry| entry.path()));
        }
        if below.is_empty() {
            break;
        }
        found.extend(below.iter().cloned());
        level = below;
    }
    Ok(found)
}

/// The group was removed while we looked; reading an open file of it then says "no such device".
pub(super) fn has_vanished(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}
