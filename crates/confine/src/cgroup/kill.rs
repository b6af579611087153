//! Killing a group: at one stroke where the kernel offers it, else frozen first so that nothing can fork away.

use std::time::Instant;

use rustix::process::Signal;

use super::error::{At, GroupError};
use super::group::{Group, Part, has_vanished, with_subgroups};
use super::limit::put;
use super::texts::Version;
use crate::limits::{GROUP_KILL_PATIENCE, KILL_ROUND_PAUSE};
use crate::process::{ProcessHandle, ProcessId};

impl Group {
    /// Kills every process of the group, and of groups below it. With `cgroup.kill` they may still be ending when this
    /// returns: [`Group::wait_empty`] waits for that. An empty or removed group is fine.
    pub fn kill(&self) -> Result<(), GroupError> {
        for part in self.parts() {
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

    fn kill_at_one_stroke(&self) -> Result<bool, GroupError> {
        let file = self.tracker().path.join("cgroup.kill");
        match put(&file, "1") {
            Ok(()) => Ok(true),
            // Kernels before 5.14, and v1.
            Err(error) if has_vanished(&error) => Ok(false),
            Err(error) => Err(error).at("writing", &file),
        }
    }

    fn kill_in_rounds(&self) -> Result<(), GroupError> {
        let give_up = Instant::now() + GROUP_KILL_PATIENCE;
        loop {
            let left = self.processes()?;
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= give_up {
                return Err(GroupError::StillAlive { path: self.path().to_owned(), left });
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
        let Some(part) = self.part_with(|part| part.freezer) else {
            return;
        };
        for directory in with_subgroups(&part.path).unwrap_or_default() {
            let (file, value) = freezer_file(part, frozen);
            if let Err(error) = put(&directory.join(file), value) {
                tracing::debug!(group = %directory.display(), %error, frozen, "could not freeze or thaw");
            }
        }
    }

    fn signal_all(&self) -> Result<(), GroupError> {
        for pid in self.processes()? {
            let Some(id) = ProcessId::of(pid).at("looking up a process of", self.path())? else {
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

fn freezer_file(part: &Part, frozen: bool) -> (&'static str, &'static str) {
    match (part.version, frozen) {
        (Version::V2, true) => ("cgroup.freeze", "1"),
        (Version::V2, false) => ("cgroup.freeze", "0"),
        (Version::V1, true) => ("freezer.state", "FROZEN"),
        (Version::V1, false) => ("freezer.state", "THAWED"),
    }
}
