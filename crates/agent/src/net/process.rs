//! The process at the other end of the Unix socket, held by a pidfd.
//!
//! A kernel that knows SO_PEERPIDFD (6.5) hands out the very process that connected, at any time later. On an older
//! one the start time of the process is noted when the connection is accepted, and a pidfd opened later must show
//! the same start time. What remains there: a process that connects and ends, and whose pid is used again by a
//! process of the same user, all before the connection is accepted.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::connection::Socket;
use super::peer::Credentials;

/// Start time of a process, in clock ticks since boot; with the pid it names one process between two boots.
pub(super) type Start = u64;

/// A process that connected to the Unix socket, alive when it was asked for.
#[derive(Debug)]
pub struct PeerProcess {
    /// Its pid in our pid namespace.
    pub pid: u32,
    /// Its start time in clock ticks since boot (field 22 of its `stat`): to know it again after a restart.
    pub start_ticks: u64,
    /// Readable when the process has ended.
    pub pidfd: OwnedFd,
}

/// Reason why there is no process to hold on to.
#[derive(Debug, thiserror::Error)]
pub enum NoProcess {
    /// A pid sent over TCP would prove nothing.
    #[error("the client is not connected over the Unix socket, so its process is not known")]
    NotUnix,
    /// It ended, or the connection is closed.
    #[error("the client's process or connection is gone")]
    Gone,
    /// It lives in a pid namespace that cannot be seen from ours.
    #[error("the client's process cannot be seen from the agent's pid namespace")]
    Hidden,
    /// The kernel did not answer.
    #[error("cannot find the client's process: {0}")]
    System(#[from] io::Error),
}

/// Opens the process that made this connection.
pub(super) fn of_peer(
    socket: &Socket,
    credentials: &Credentials,
    noted: Option<Start>,
) -> Result<PeerProcess, NoProcess> {
    let pid = credentials.pid.ok_or(NoProcess::Hidden)?;
    if kernel_hands_out_pidfds() {
        return hold(pid, peer_pidfd(socket).map_err(gone_or_system)?);
    }
    open_noted(pid, noted)
}

/// Opens a process by its number; it must be the one whose start time was noted.
fn open_noted(pid: u32, noted: Option<Start>) -> Result<PeerProcess, NoProcess> {
    let process = hold(pid, open_pidfd(pid)?)?;
    if noted == Some(process.start_ticks) { Ok(process) } else { Err(NoProcess::Gone) }
}

/// Returns the start time to note when a connection is accepted, on kernels where nothing else names its process.
pub(super) fn start_to_remember(credentials: &Credentials) -> Option<Start> {
    if kernel_hands_out_pidfds() {
        return None;
    }
    noted_start(credentials)
}

/// Returns the start time of a process, unless it belongs to another user and so cannot have connected.
fn noted_start(credentials: &Credentials) -> Option<Start> {
    let pid = credentials.pid?;
    let owner = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    // Root owns the directory of a process that may not be looked into.
    let fits = owner == credentials.uid || owner == 0;
    fits.then(|| start_ticks(pid)).flatten()
}

fn hold(pid: u32, pidfd: OwnedFd) -> Result<PeerProcess, NoProcess> {
    let start_ticks = start_ticks(pid).ok_or(NoProcess::Gone)?;
    // Still running after its start time was read: then it was read from this process and no other.
    if has_ended(&pidfd)? {
        return Err(NoProcess::Gone);
    }
    Ok(PeerProcess { pid, start_ticks, pidfd })
}

fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let mut ask = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(poll(&mut ask, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
}

fn open_pidfd(pid: u32) -> Result<OwnedFd, NoProcess> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(NoProcess::Hidden)?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|error| gone_or_system(error.into()))
}

fn gone_or_system(error: io::Error) -> NoProcess {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::EINVAL | libc::ENODATA) => NoProcess::Gone,
        _ => NoProcess::System(error),
    }
}

/// Reads field 22 of `/proc/PID/stat`. The name in field 2 may hold anything, so fields are counted after its last `)`.
fn start_ticks(pid: u32) -> Option<Start> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn kernel_hands_out_pidfds() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let Ok((one, _other)) = std::os::unix::net::UnixStream::pair() else { return false };
        peer_pidfd(&one).is_ok()
    })
}

/// Socket option of Linux 6.5 on all architectures but sparc and parisc, which have no GPUs of ours.
const SO_PEERPIDFD: libc::c_int = 77;

#[allow(unsafe_code, reason = "no wrapper knows this socket option yet")]
fn peer_pidfd(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is borrowed for the call; value and length point to live variables of the stated size.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    if fd < 0 {
        return Err(Errno::SRCH.into());
    }
    // SAFETY: the kernel has just made this descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    fn me() -> Credentials {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Credentials { pid: Some(std::process::id()), uid, gid }
    }

    #[test]
    fn the_start_time_of_a_process_stays_and_belongs_to_its_owner() {
        let first = noted_start(&me()).expect("this process has a start time");
        assert_eq!(noted_start(&me()), Some(first));
        assert_eq!(noted_start(&Credentials { pid: None, ..me() }), None);
    }

    #[test]
    fn a_process_opened_by_number_must_be_the_noted_one_and_alive() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let start = start_ticks(child.id()).unwrap();
        let process = open_noted(child.id(), Some(start)).unwrap();
        assert_eq!((process.pid, process.start_ticks), (child.id(), start));
        for other in [None, Some(start + 1)] {
            let refused = open_noted(child.id(), other);
            assert!(matches!(refused, Err(NoProcess::Gone)), "{other:?} gave {refused:?}");
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9));
        for after in [hold(child.id(), process.pidfd), open_noted(child.id(), Some(start))] {
            assert!(matches!(after, Err(NoProcess::Gone)), "{after:?}");
        }
    }
}
