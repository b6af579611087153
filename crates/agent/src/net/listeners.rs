//! Opens the sockets to listen on, and accepts what connects to them.
//!
//! A TCP host may have several addresses, which share one port. The Unix socket is a file: opening it replaces the socket of
//! a dead agent, and closing removes the file.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};

use super::connection::ClientSocket;
use super::peer::{Peer, PeerCredentials, PeerTransport};
use super::tls::Tls;
use super::{ADDRESSES_PER_NAME, BACKLOG, KEEPALIVE_COUNT, KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, PORT_TRIES};

/// A TCP host and port to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpBind {
    /// An address, or a name: `localhost` means IPv4 and IPv6 loopback; `::` means every address, IPv4 too.
    pub host: String,
    /// The port; 0 lets the system choose one (the same for all addresses of the host).
    pub port: u16,
}

/// Path and permissions of the Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixBind {
    /// The file, at most 107 bytes long.
    pub path: PathBuf,
    /// The permissions. By default every local user may connect: the kernel identifies the user of a connection.
    pub mode: u32,
}

impl UnixBind {
    /// Returns a socket that every user of this machine may connect to.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), mode: 0o666 }
    }
}

/// Reason why the agent cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// Neither a TCP address nor a Unix socket is given.
    #[error("nothing to listen on: give at least one TCP address or a Unix socket")]
    Nothing,
    /// A limit leaves no room for a single client.
    #[error("limit {field} is {value}, must be at least {least}")]
    Limit {
        /// Name of the limit.
        field: &'static str,
        /// Requested value.
        value: usize,
        /// Smallest allowed value.
        least: usize,
    },
    /// The host name has no address.
    #[error("host {host:?} cannot be resolved: {source}; give an address of this machine, or localhost")]
    Resolve {
        /// The name.
        host: String,
        /// Error of the resolver.
        source: io::Error,
    },
    /// Another program listens on the address.
    #[error("{address} is in use: another program listens there; choose another port, or 0 for any")]
    InUse {
        /// The address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose an address of this machine and a port that you may use")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// Another program listens on the Unix socket, which is not touched.
    #[error("{path}: another program listens on this socket; stop it, or choose another state directory")]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// The path belongs to a file of another type, which is not touched.
    #[error("{path}: exists and is not a socket; remove it, or choose another state directory")]
    NotASocket {
        /// The existing file.
        path: PathBuf,
    },
    /// The Unix socket cannot be opened.
    #[error("cannot {doing} the socket {path}: {source}")]
    Unix {
        /// The step that failed.
        doing: &'static str,
        /// The socket.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// Opens every TCP address, or none.
pub(super) async fn bind_tcp(binds: &[TcpBind]) -> Result<Vec<(SocketAddr, TcpListener)>, NetError> {
    let mut resolved = Vec::new();
    for bind in binds {
        resolved.push((resolve(bind).await?, bind.port));
    }
    let any_v4 = resolved.iter().flat_map(|(ips, _)| ips).any(|ip| *ip == IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut open = Vec::new();
    for (ips, port) in resolved {
        open.extend(bind_host(&ips, port, any_v4)?);
    }
    Ok(open)
}

async fn resolve(bind: &TcpBind) -> Result<Vec<IpAddr>, NetError> {
    if bind.host.eq_ignore_ascii_case("localhost") {
        return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let bare = bind.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&bind.host);
    if let Ok(ip) = bare.parse() {
        return Ok(vec![ip]);
    }
    let fail = |source| NetError::Resolve { host: bind.host.clone(), source };
    let found = tokio::net::lookup_host((bare, bind.port)).await.map_err(fail)?;
    let ips: BTreeSet<IpAddr> = found.map(|address| address.ip()).take(ADDRESSES_PER_NAME).collect();
    if ips.is_empty() {
        return Err(fail(io::Error::new(io::ErrorKind::NotFound, "no address")));
    }
    Ok(ips.into_iter().collect())
}

/// Opens all addresses of one host on one port. If the port that the system chose is in use on the next address, another
/// port is tried.
fn bind_host(ips: &[IpAddr], port: u16, any_v4: bool) -> Result<Vec<(SocketAddr, TcpListener)>, NetError> {
    let mut tries = if port == 0 && ips.len() > 1 { PORT_TRIES } else { 1 };
    loop {
        tries -= 1;
        match bind_once(ips, port, any_v4) {
            Err(NetError::InUse { .. }) if tries > 0 => {}
            done => return done,
        }
    }
}

fn bind_once(ips: &[IpAddr], mut port: u16, any_v4: bool) -> Result<Vec<(SocketAddr, TcpListener)>, NetError> {
    let mut open: Vec<(SocketAddr, TcpListener)> = Vec::new();
    let mut missing = None;
    for ip in ips {
        let address = SocketAddr::new(*ip, port);
        match listen_tcp(address, any_v4) {
            Ok(listener) => {
                let bound = listener.local_addr().map_err(|source| NetError::Tcp { address, source })?;
                port = bound.port();
                open.push((bound, listener));
            }
            Err(error) if ips.len() > 1 && is_missing(&error) => {
                tracing::info!(%address, %error, "this machine has no such address, so the agent does not listen on it");
                missing = Some(NetError::Tcp { address, source: error });
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(NetError::InUse { address }),
            Err(source) => return Err(NetError::Tcp { address, source }),
        }
    }
    match missing {
        Some(error) if open.is_empty() => Err(error),
        _ => Ok(open),
    }
}

/// Returns whether the machine has no such address. A machine without IPv6 still serves IPv4, and vice versa.
fn is_missing(error: &io::Error) -> bool {
    let missing = [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL, libc::EPROTONOSUPPORT];
    error.raw_os_error().is_some_and(|code| missing.contains(&code))
}

fn listen_tcp(address: SocketAddr, any_v4: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    if let IpAddr::V6(ip) = address.ip() {
        sockopt::set_ipv6_v6only(&socket, any_v4 || !ip.is_unspecified())?;
    }
    // On Linux accepted connections inherit these options, so setting them costs nothing per connection.
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The file of a listening socket. Dropping it removes the file, unless another file has replaced it.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens on the path. A socket in use, or a file that is not a socket, is not touched.
pub(super) fn bind_unix(unix: &UnixBind) -> Result<(UnixListener, SocketFile), NetError> {
    let path = &unix.path;
    let fail = |doing| move |source: io::Error| NetError::Unix { doing, path: path.clone(), source };
    let address = SocketAddrUnix::new(path).map_err(|error| fail("name")(too_long(path, error)))?;
    clear_stale(path, &address)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| fail("open")(error.into()))?;
    // The file inherits the mode of the unbound socket, so it is never more open than requested.
    rustix::fs::fchmod(socket.as_fd(), Mode::from_raw_mode(unix.mode))
        .map_err(|error| fail("set the mode of")(error.into()))?;
    rustix::net::bind(&socket, &address).map_err(|error| match error {
        Errno::ADDRINUSE => NetError::SocketInUse { path: path.clone() },
        error => fail("bind")(error.into()),
    })?;
    let file = SocketFile { path: path.clone(), identity: identity(path).map_err(fail("inspect"))? };
    // The umask cleared bits during bind.
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
        Err(error) => return Err(fail("inspect", error)),
    };
    if !there.file_type().is_socket() {
        return Err(NetError::NotASocket { path: path.to_owned() });
    }
    // Non-blocking, because a busy program would keep the agent waiting; the kernel returns "try again" instead.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| fail("probe", error.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "replacing the socket of an agent that has ended");
            std::fs::remove_file(path).map_err(|error| fail("remove the stale file of", error))
        }
        Err(Errno::NOENT) => Ok(()),
        // PROTOTYPE: a socket of another type (datagram), so it belongs to another program, running or not.
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS | Errno::PROTOTYPE) => {
            Err(NetError::SocketInUse { path: path.to_owned() })
        }
        Err(error) => Err(fail("connect to", error.into())),
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

/// One open listener.
#[derive(Debug)]
pub(super) enum OpenListener {
    Tcp { listener: TcpListener, address: SocketAddr, tls: Option<Tls> },
    Unix { listener: UnixListener, file: SocketFile },
}

/// A connection before its first byte is read.
#[derive(Debug)]
pub(super) struct AcceptedConnection {
    pub socket: Arc<ClientSocket>,
    pub peer: Peer,
    /// Present for https: the handshake uses it.
    pub tls: Option<Arc<ServerConfig>>,
}

impl OpenListener {
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp { address, .. } => Some(*address),
            Self::Unix { .. } => None,
        }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Self::Tcp { .. } => None,
            Self::Unix { file, .. } => Some(&file.path),
        }
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<AcceptedConnection>> {
        Poll::Ready(match self {
            Self::Tcp { listener, tls, .. } => {
                let (stream, remote) = ready!(listener.poll_accept(cx))?;
                let local = stream.local_addr()?;
                let socket = Arc::new(ClientSocket::Tcp(stream));
                let peer = Peer::tcp(&socket, remote, local, tls.is_some());
                Ok(AcceptedConnection { socket, peer, tls: tls.as_ref().map(Tls::config) })
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = ready!(listener.poll_accept(cx))?;
                let credentials = credentials(&stream);
                let socket = Arc::new(ClientSocket::Unix(stream));
                let peer = Peer::unix(&socket, credentials);
                Ok(AcceptedConnection { socket, peer, tls: None })
            }
        })
    }
}

/// Returns the next connection of any listener. `turn` advances, so that a busy listener does not starve the others.
pub(super) async fn accept_any(listeners: &[OpenListener], turn: &mut usize) -> io::Result<AcceptedConnection> {
    poll_fn(|cx| {
        for step in 0..listeners.len() {
            let at = (*turn + step) % listeners.len();
            if let Poll::Ready(accepted) = listeners[at].poll_accept(cx) {
                *turn = at + 1;
                return Poll::Ready(accepted);
            }
        }
        Poll::Pending
    })
    .await
}

impl AcceptedConnection {
    /// Returns the network address under which the connection is counted: for IPv6 the /64, which one client owns.
    pub(super) fn counted_address(&self) -> Option<IpAddr> {
        let PeerTransport::Tcp { remote, loopback: false, .. } = self.peer.transport() else { return None };
        Some(match remote.ip() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
        })
    }
}

fn credentials(stream: &UnixStream) -> Option<PeerCredentials> {
    let found = stream.peer_cred().ok()?;
    let pid = found.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid != 0);
    Some(PeerCredentials { pid, uid: found.uid(), gid: found.gid() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn accepted_connections_inherit_the_options_of_the_listener() {
        let listener = listen_tcp("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(&accepted).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&accepted).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepcnt(&accepted).unwrap(), KEEPALIVE_COUNT);
    }
}
