//! Waiting until a group is empty: by the kernel's event in v2, by looking every now and then in v1.

use std::fs::File;
use std::io::{Read, Seek};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::error::{At, GroupError};
use super::group::{Group, has_vanished};
use super::texts::Version;
use crate::limits::EMPTY_POLL_INTERVAL;

impl Group {
    /// Waits until no process is in the group; `false` if one still is when the deadline passes.
    pub fn wait_empty(&self, deadline: Instant) -> Result<bool, GroupError> {
        match self.events()? {
            Some(events) => self.wait_for_event(events, deadline),
            None => self.wait_by_looking(deadline),
        }
    }

    /// The file whose priority readiness (`POLLPRI`, after it was read) tells that the group became empty or populated,
    /// for waiting asynchronously; `None` in v1, which has no such event, and for a removed group.
    pub fn events(&self) -> Result<Option<File>, GroupError> {
        let tracker = self.tracker();
        if tracker.version == Version::V1 {
            return Ok(None);
        }
        let path = tracker.path.join("cgroup.events");
        match File::open(&path) {
            Err(error) if has_vanished(&error) => Ok(None),
            other => other.at("opening", &path).map(Some),
        }
    }

    fn wait_for_event(&self, mut events: File, deadline: Instant) -> Result<bool, GroupError> {
        loop {
            let mut text = String::new();
            let read = events.rewind().and_then(|()| events.read_to_string(&mut text));
            match read {
                Err(error) if has_vanished(&error) => return Ok(true),
                other => other.at("reading the events of", self.path())?,
            };
            if !text.lines().any(|line| line == "populated 1") {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let mut fds = [PollFd::new(&events, PollFlags::PRI)];
            match poll(&mut fds, Some(&crate::timespec(left))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).at("waiting for", self.path()),
            }
        }
    }

    fn wait_by_looking(&self, deadline: Instant) -> Result<bool, GroupError> {
        loop {
            if self.processes()?.is_empty() {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            std::thread::sleep(left.min(EMPTY_POLL_INTERVAL));
        }
    }
}
