//! Making groups, and finding those made before a restart.

use std::io;
use std::path::Path;

use super::detect::Cgroups;
use super::error::{At, GroupError};
use super::group::{Group, Part};
use super::limit::{Limits, put, write};
use super::place::{LEAF, OURS, Place, ours, strangers};
use super::texts::Version;
use crate::limits::{GROUP_NAME_LENGTH, LEAF_ROUNDS};

impl Cgroups {
    /// Makes an empty group with these limits. On an error nothing of it is left.
    pub fn create(&self, name: &str, limits: &Limits) -> Result<Group, GroupError> {
        check_name(name)?;
        if !self.can_create() {
            return Err(GroupError::NotPossible { why: self.why_not.clone() });
        }
        let mut made = Vec::new();
        for place in &self.places {
            match make(place, name) {
                Ok(part) => made.push(part),
                Err(error) => {
                    remove_parts(made);
                    return Err(error);
                }
            }
        }
        let group = Group::new(name, made);
        if let Err(error) = group.set_limits(limits) {
            remove_parts(group.into_parts());
            return Err(error);
        }
        Ok(group)
    }

    /// Finds a group made earlier, by this or a former run of the program; `None` if there is none of that name.
    pub fn open(&self, name: &str) -> Result<Option<Group>, GroupError> {
        check_name(name)?;
        let parts: Vec<Part> = self.places.iter().map(|place| part(place, name)).collect();
        let there: Vec<Part> = parts.into_iter().filter(|part| part.path.is_dir()).collect();
        Ok((!there.is_empty()).then(|| Group::new(name, there)))
    }

    /// The names of all groups there are, also those of former runs.
    pub fn names(&self) -> Result<Vec<String>, GroupError> {
        let mut names = std::collections::BTreeSet::new();
        for base in self.bases() {
            let entries = match std::fs::read_dir(&base) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.at("listing", &base)?,
            };
            for entry in entries {
                let entry = entry.at("listing", &base)?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    names.extend(entry.file_name().into_string().ok().filter(|name| check_name(name).is_ok()));
                }
            }
        }
        Ok(names.into_iter().collect())
    }
}

fn check_name(name: &str) -> Result<(), GroupError> {
    // No dots: the kernel's own files in the same directory have them.
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fits = (1..=GROUP_NAME_LENGTH).contains(&name.len()) && name.chars().all(allowed);
    // These two would stand beside the controllers' own files of v1 (`tasks`, …), which have no dot either.
    if !fits || name == "tasks" || name == "notify_on_release" {
        return Err(GroupError::InvalidName { name: name.to_owned() });
    }
    Ok(())
}

fn part(place: &Place, name: &str) -> Part {
    Part {
        version: place.version,
        path: place.base().join(name),
        base: place.base(),
        memory: place.memory,
        pids: place.pids,
        cpu: place.cpu,
        dmem: place.dmem,
        freezer: place.freezer,
    }
}

fn make(place: &Place, name: &str) -> Result<Part, GroupError> {
    let base = place.base();
    if place.version == Version::V2 {
        hand_down_controllers(place, &place.parent)?;
    }
    match std::fs::create_dir(&base) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.at("making", &base)?,
    }
    if place.version == Version::V2 {
        hand_down_controllers(place, &base)?;
    }
    let part = part(place, name);
    match std::fs::create_dir(&part.path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(GroupError::Exists { path: part.path }),
        other => other.at("making", &part.path).map(|()| part),
    }
}

/// Lets the children of a v2 group have the controllers we use.
fn hand_down_controllers(place: &Place, group: &Path) -> Result<(), GroupError> {
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

fn hand_down(group: &Path, file: &Path, order: &str) -> Result<(), GroupError> {
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

fn move_into_leaf(group: &Path) -> Result<(), GroupError> {
    debug_assert!(!group.ends_with(OURS), "we never sit in the directory of the groups");
    let leaf = group.join(LEAF);
    match std::fs::create_dir(&leaf) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.at("making", &leaf)?,
    }
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
fn remove_parts(parts: Vec<Part>) {
    for part in parts {
        if let Err(error) = std::fs::remove_dir(&part.path) {
            tracing::warn!(path = %part.path.display(), %error, "a half-made group could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for name in ["", ".", "..", "a/b", "../x", "memory.max", "tasks", "ü", "a b", &"x".repeat(65)] {
            assert!(matches!(check_name(name), Err(GroupError::InvalidName { .. })), "{name:?} was allowed");
        }
        for name in ["lease-1", "L_9", &"x".repeat(64)] {
            check_name(name).unwrap();
        }
    }
}
