//! The Unix socket: makes its file, replaces that of a dead agent, removes its own at the end.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixListener;

use super::error::NetError;
use super::limits::BACKLOG;

/// Where the Unix socket is and who may connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixBind {
    /// The file, at most 107 bytes long.
    pub path: PathBuf,
    /// Its permissions. Everybody may connect by default: who it is, the kernel says.
    pub mode: u32,
}

impl UnixBind {
    /// A socket everybody on this machine may connect to.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), mode: 0o666 }
    }
}

/// The file of a listening socket; removed when dropped, unless somebody put another there.
#[derive(Debug)]
pub(super) struct SocketFile {
    pub path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at the path. A socket that somebody listens on, and a file that is no socket, are left alone.
pub(super) fn bind(unix: &UnixBind) -> Result<(UnixListener, SocketFile), NetError> {
    let path = &unix.path;
    let fail = |doing| move |source: io::Error| NetError::Unix { doing, path: path.clone(), source };
    let address = SocketAddrUnix::new(path).map_err(|error| fail("name")(too_long(path, error)))?;
    clear_stale(path, &address)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| fail("open")(error.into()))?;
    // The mode of the unbound socket becomes that of the file, so it is never more open than asked for.
    rustix::fs::fchmod(socket.as_fd(), Mode::from_raw_mode(unix.mode))
        .map_err(|error| fail("set the mode of")(error.into()))?;
    rustix::net::bind(&socket, &address).map_err(|error| match error {
        Errno::ADDRINUSE => NetError::SocketInUse { path: path.clone() },
        error => fail("bind")(error.into()),
    })?;
    let file = SocketFile { path: path.clone(), identity: identity(path).map_err(fail("look at"))? };
    // The umask took bits away at bind.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(unix.mode)).map_err(fail("set the mode of"))?;
    rustix::net::listen(&socket, i32::try_from(BACKLOG).unwrap_or(i32::MAX))
        .map_err(|error| fail("listen on")(error.into()))?;
    let listener = UnixListener::from_std(socket.into()).map_err(fail("listen on"))?;
    Ok((listener, file))
}

fn clear_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), NetError> {
    let fail = |doing, source| NetError::Unix { doing, path: path.to_owned(), source };
    let there = match std::fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(fail("look at", error)),
    };
    if !there.file_type().is_socket() {
        return Err(NetError::NotASocket { path: path.to_owned() });
    }
    // Non-blocking, because a live program that is busy would keep us waiting; it answers "try again".
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| fail("probe", error.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "replacing the socket of an agent that is gone");
            std::fs::remove_file(path).map_err(|error| fail("remove the stale file of", error))
        }
        Err(Errno::NOENT) => Ok(()),
        // Of another type (datagram): somebody's, alive or not.
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS | Errno::PROTOTYPE) => {
            Err(NetError::SocketInUse { path: path.to_owned() })
        }
        Err(error) => Err(fail("find out whether somebody listens on", error.into())),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let there = std::fs::symlink_metadata(path)?;
    Ok((there.dev(), there.ino()))
}

fn too_long(path: &Path, error: Errno) -> io::Error {
    let length = path.as_os_str().len();
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{error}: the path has {length} bytes, at most 107 are allowed; choose a shorter state directory"),
    )
}
