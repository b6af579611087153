//! The process at the other end of the Unix socket, held by a pidfd.
//!
//! A kernel with SO_PEERPIDFD (6.5) returns the process that connected, at any later time. On an older kernel the start time
//! of the process is recorded when the connection is accepted, and a pidfd opened later must show the same start time. One
//! gap remains there: a process connects and ends, and a process of the same user gets its pid, all before the connection is
//! accepted.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::connection::ClientSocket;
use super::peer::PeerCredentials;

/// Start time of a process, in clock ticks since boot; together with the pid it identifies the process until the next
/// boot.
pub(super) type StartTicks = u64;

/// A process that connected to the Unix socket and was running when this handle was opened.
#[derive(Debug)]
pub struct PeerProcess {
    /// Its pid in our pid namespace.
    pub pid: u32,
    /// Its start time in clock ticks since boot (field 22 of its `stat`), which identifies it after a restart.
    pub start_ticks: u64,
    /// Readable when the process has ended.
    pub pidfd: OwnedFd,
}

/// Reason why the process of a peer cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum PeerProcessError {
    /// A pid sent over TCP would prove nothing.
    #[error(
        "the client is not connected over the Unix socket, so its process is unknown; use the socket agent.sock of the state directory"
    )]
    NotUnix,
    /// The process ended, or the connection is closed.
    #[error("the client's process or connection is gone")]
    Gone,
    /// The process is in a pid namespace that is invisible here.
    #[error("the client's process is in a pid namespace that the agent cannot see; attach from outside the container")]
    Hidden,
    /// The kernel returned an error.
    #[error("cannot find the client's process: {0}")]
    System(#[from] io::Error),
}

/// Opens the process that made this connection.
pub(super) fn open_peer(
    socket: &ClientSocket,
    credentials: &PeerCredentials,
    recorded: Option<StartTicks>,
) -> Result<PeerProcess, PeerProcessError> {
    let pid = credentials.pid.ok_or(PeerProcessError::Hidden)?;
    if kernel_returns_pidfds() {
        return open_running(pid, peer_pidfd(socket).map_err(gone_or_system)?);
    }
    open_recorded(pid, recorded)
}

/// Opens a process by its pid. Its start time must be the recorded one.
fn open_recorded(pid: u32, recorded: Option<StartTicks>) -> Result<PeerProcess, PeerProcessError> {
    let process = open_running(pid, open_pidfd(pid)?)?;
    if recorded == Some(process.start_ticks) { Ok(process) } else { Err(PeerProcessError::Gone) }
}

/// Returns the start time to record when a connection is accepted, on kernels that do not identify its process otherwise.
pub(super) fn start_to_record(credentials: &PeerCredentials) -> Option<StartTicks> {
    if kernel_returns_pidfds() {
        return None;
    }
    recorded_start(credentials)
}

/// Returns the start time of a process, unless it belongs to another user and so cannot have connected.
fn recorded_start(credentials: &PeerCredentials) -> Option<StartTicks> {
    let pid = credentials.pid?;
    let owner = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    // Root owns the directory of a process that is not dumpable.
    let fits = owner == credentials.uid || owner == 0;
    fits.then(|| start_ticks(pid)).flatten()
}

fn open_running(pid: u32, pidfd: OwnedFd) -> Result<PeerProcess, PeerProcessError> {
    let start_ticks = start_ticks(pid).ok_or(PeerProcessError::Gone)?;
    // The process still runs after its start time was read, so the start time is its own.
    if has_ended(&pidfd)? {
        return Err(PeerProcessError::Gone);
    }
    Ok(PeerProcess { pid, start_ticks, pidfd })
}

fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    Ok(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
}

fn open_pidfd(pid: u32) -> Result<OwnedFd, PeerProcessError> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(PeerProcessError::Hidden)?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|error| gone_or_system(error.into()))
}

fn gone_or_system(error: io::Error) -> PeerProcessError {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::EINVAL | libc::ENODATA) => PeerProcessError::Gone,
        _ => PeerProcessError::System(error),
    }
}

/// Reads field 22 of `/proc/PID/stat`. The name in field 2 may hold anything, so fields are counted after its last `)`.
fn start_ticks(pid: u32) -> Option<StartTicks> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

fn kernel_returns_pidfds() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let Ok((one, _other)) = std::os::unix::net::UnixStream::pair() else { return false };
        peer_pidfd(&one).is_ok()
    })
}

/// Socket option of Linux 6.5 on all architectures except sparc and parisc, which have no supported GPUs.
const SO_PEERPIDFD: libc::c_int = 77;

#[allow(unsafe_code, reason = "no crate wraps this socket option yet")]
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

    fn me() -> PeerCredentials {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        PeerCredentials { pid: Some(std::process::id()), uid, gid }
    }

    #[test]
    fn the_start_time_of_a_process_stays_and_belongs_to_its_owner() {
        let first = recorded_start(&me()).expect("this process has a start time");
        assert_eq!(recorded_start(&me()), Some(first));
        assert_eq!(recorded_start(&PeerCredentials { pid: None, ..me() }), None);
    }

    #[test]
    fn a_process_opened_by_pid_must_have_the_recorded_start_time_and_run() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let start = start_ticks(child.id()).unwrap();
        let process = open_recorded(child.id(), Some(start)).unwrap();
        assert_eq!((process.pid, process.start_ticks), (child.id(), start));
        for other in [None, Some(start + 1)] {
            let refused = open_recorded(child.id(), other);
            assert!(matches!(refused, Err(PeerProcessError::Gone)), "{other:?} gave {refused:?}");
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9));
        for after in [open_running(child.id(), process.pidfd), open_recorded(child.id(), Some(start))] {
            assert!(matches!(after, Err(PeerProcessError::Gone)), "{after:?}");
        }
    }
}
