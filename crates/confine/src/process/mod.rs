//! A process known for sure: by its pid *and* the time it started, held by a pidfd.
//!
//! A pid alone is a number the kernel gives to the next process once the first has gone. Everything that is watched or
//! killed here is named by a [`ProcessId`] and held by a [`ProcessHandle`], which cannot come to mean another process.
//! No threads; a handle ends when it is dropped.

mod census;
mod kill;
mod memory;
mod procfs;
mod stat;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

pub(crate) use census::Census;
pub use kill::kill_descendants;
pub(crate) use memory::{proportional, resident};
pub use procfs::ProcFs;
pub use stat::Stat;

/// Which process: its pid and when it started. Unique until the machine is started anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// The process id as this program's pid namespace sees it.
    pub pid: u32,
    /// Clock ticks between the start of the machine and that of the process (field 22 of `/proc/PID/stat`).
    pub started: u64,
}

impl ProcessId {
    /// The process that has this pid now; `None` if there is none.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        Ok(ProcFs::here().stat(pid)?.map(|stat| stat.id()))
    }

    /// This very process.
    pub fn ours() -> io::Result<Self> {
        Self::of(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (started at tick {})", self.pid, self.started)
    }
}

/// A hold on one process: signals and waiting reach that process or nobody.
///
/// Its file descriptor becomes readable when the process has ended.
#[derive(Debug)]
pub struct ProcessHandle {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl ProcessHandle {
    /// Holds the process, or says `None`: it has ended, or its pid belongs to another process by now.
    pub fn open(id: ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = as_pid(id.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // INVAL, and NOENT on newer kernels: the number is that of a thread, not of a process.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The start time is read after the pidfd was taken: a match then proves that both mean the same process.
        match ProcFs::here().stat(id.pid)? {
            Some(stat) if stat.started == id.started && !stat.has_ended() => {}
            _ => return Ok(None),
        }
        let handle = Self { id, pidfd };
        Ok((!handle.is_gone()?).then_some(handle))
    }

    /// Which process this is.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Sends a signal; `false` if the process has gone already.
    pub fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has ended (it may still wait to be reaped by its parent).
    pub fn is_gone(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        loop {
            match poll(&mut fds, Some(&Timespec::default())) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Its parent's pid; `None` if the process has gone.
    pub fn parent(&self) -> io::Result<Option<u32>> {
        let stat = ProcFs::here().stat(self.id.pid)?;
        Ok(stat.filter(|stat| stat.started == self.id.started).map(|stat| stat.parent))
    }

    /// The real user id it runs as; `None` if the process has gone.
    pub fn uid(&self) -> io::Result<Option<u32>> {
        let uid = ProcFs::here().uid(self.id.pid)?;
        // Read first, asked after: a process alive now is the one the number was read of.
        Ok(if self.is_gone()? { None } else { uid })
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// The pid as the system calls take it; `None` for 0 and for numbers no process can have.
pub(crate) fn as_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_start_time_or_an_impossible_pid_is_nobody() {
        let ours = ProcessId::ours().unwrap();
        assert!(ProcessHandle::open(ours).unwrap().is_some());
        for stranger in [
            ProcessId { started: ours.started + 1, ..ours },
            ProcessId { started: 0, ..ours },
            ProcessId { pid: 0, started: 0 },
            ProcessId { pid: u32::MAX, started: 1 },
        ] {
            assert!(ProcessHandle::open(stranger).unwrap().is_none(), "{stranger:?} was taken for a process");
        }
    }

    #[test]
    fn a_handle_sees_the_end_and_signals_nobody_after_it() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        let handle = ProcessHandle::open(id).unwrap().unwrap();
        assert!(!handle.is_gone().unwrap());
        assert_eq!(handle.parent().unwrap(), Some(std::process::id()));
        assert_eq!(handle.uid().unwrap(), Some(rustix::process::getuid().as_raw()));

        assert!(handle.signal(Signal::KILL).unwrap());
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).unwrap();
        assert!(handle.is_gone().unwrap());
        assert!(ProcessHandle::open(id).unwrap().is_none(), "an ended process still waiting for its parent is gone");
        child.wait().unwrap();
        assert!(!handle.signal(Signal::KILL).unwrap());
        assert_eq!(handle.parent().unwrap(), None);
        assert_eq!(handle.uid().unwrap(), None);
    }
}
