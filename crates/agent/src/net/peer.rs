//! The identity of the other end of a connection: its addresses, and its user as the kernel reports it.
//!
//! The kernel reports the user of a Unix peer at accept. For a loopback connection NETLINK sock_diag reports it: one
//! request names the peer's socket by its two addresses, and the reply with the socket's user is available when the
//! call returns. A reply counts only for a socket that is still connected and still open in a process: for a closed
//! socket the kernel reports user 0, which must never be taken for root.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::DIAG_BYTES;
use super::connection::ClientSocket;
use super::peer_process::{self, PeerProcess, PeerProcessError, StartTicks};

/// The other end of a connection; in the extensions of every request. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Peer(Arc<PeerDetails>);

#[derive(Debug)]
struct PeerDetails {
    transport: PeerTransport,
    credentials: Option<PeerCredentials>,
    /// Start time of a Unix peer, if only that distinguishes it from a later process with the same pid.
    start: Option<StartTicks>,
    socket: Weak<ClientSocket>,
    /// The reply of the kernel, after the first call.
    user: OnceLock<PeerUser>,
}

/// The user at the other end.
#[derive(Debug, Clone, Copy)]
enum PeerUser {
    Known(u32),
    /// The other end was closed before the kernel reported its user.
    Gone,
    Unknown,
}

/// Connection of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerTransport {
    /// Over TCP.
    Tcp {
        /// The peer's address (IPv4 if it uses IPv4).
        remote: SocketAddr,
        /// The address it connected to.
        local: SocketAddr,
        /// Whether both addresses are of the loopback interface.
        loopback: bool,
        /// Whether it uses https.
        tls: bool,
    },
    /// Over the Unix socket.
    Unix,
}

/// The process that connected to the Unix socket, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Its pid in our pid namespace; `None` if it cannot be seen from there.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

impl Peer {
    pub(super) fn tcp(socket: &Arc<ClientSocket>, remote: SocketAddr, local: SocketAddr, tls: bool) -> Self {
        let (remote, local) = (canonical(remote), canonical(local));
        let loopback = remote.ip().is_loopback() && local.ip().is_loopback();
        Self::new(socket, PeerTransport::Tcp { remote, local, loopback, tls }, None)
    }

    pub(super) fn unix(socket: &Arc<ClientSocket>, credentials: Option<PeerCredentials>) -> Self {
        Self::new(socket, PeerTransport::Unix, credentials)
    }

    fn new(socket: &Arc<ClientSocket>, transport: PeerTransport, credentials: Option<PeerCredentials>) -> Self {
        let start = credentials.and_then(|credentials| peer_process::start_to_record(&credentials));
        let socket = Arc::downgrade(socket);
        Self(Arc::new(PeerDetails { transport, credentials, start, socket, user: OnceLock::new() }))
    }

    /// Returns the transport of the connection.
    pub fn transport(&self) -> PeerTransport {
        self.0.transport
    }

    /// Returns whether the peer is on this machine: the Unix socket or loopback.
    pub fn is_local(&self) -> bool {
        matches!(self.0.transport, PeerTransport::Unix | PeerTransport::Tcp { loopback: true, .. })
    }

    /// Returns the credentials of a Unix peer; `None` over TCP.
    pub fn credentials(&self) -> Option<PeerCredentials> {
        self.0.credentials
    }

    /// Returns the user at the other end, if it is on this machine and the kernel knows.
    ///
    /// Over loopback TCP the first call asks the kernel (some microseconds, never blocking); the reply is stored for the
    /// connection. `None` means unknown: treat such a client as anonymous.
    pub fn uid(&self) -> Option<u32> {
        match self.user() {
            PeerUser::Known(uid) => Some(uid),
            PeerUser::Gone | PeerUser::Unknown => None,
        }
    }

    /// Returns whether the peer left before the kernel reported its user.
    pub fn is_gone(&self) -> bool {
        matches!(self.user(), PeerUser::Gone)
    }

    fn user(&self) -> PeerUser {
        match self.0.transport {
            PeerTransport::Unix => self.0.credentials.map_or(PeerUser::Unknown, |credentials| PeerUser::Known(credentials.uid)),
            PeerTransport::Tcp { loopback: false, .. } => PeerUser::Unknown,
            PeerTransport::Tcp { remote, local, .. } => {
                *self.0.user.get_or_init(|| match user_of_connection(remote, local) {
                    Ok(Some(uid)) => PeerUser::Known(uid),
                    Ok(None) => PeerUser::Gone,
                    Err(error) => {
                        tracing::warn!(%remote, %error, "cannot ask the kernel for the user of a connection; the client counts as anonymous");
                        PeerUser::Unknown
                    }
                })
            }
        }
    }

    /// Opens the process that connected to the Unix socket, as a new handle that cannot refer to another process.
    pub fn process(&self) -> Result<PeerProcess, PeerProcessError> {
        let credentials = self.0.credentials.ok_or(PeerProcessError::NotUnix)?;
        let socket = self.0.socket.upgrade().ok_or(PeerProcessError::Gone)?;
        peer_process::open_peer(&socket, &credentials, self.0.start)
    }
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const HEADER_BYTES: usize = 16;
const ID_BYTES: usize = 48;
const REQUEST_BYTES: usize = HEADER_BYTES + 8 + ID_BYTES;
const TCP_ESTABLISHED: u8 = 1;

/// Returns the user of the socket that is bound to `remote` and connected to `local`; `None` if there is none.
fn user_of_connection(remote: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    // The kernel finds an IPv6 socket that uses IPv4 by its IPv4 addresses.
    let (remote, local) = (canonical(remote), canonical(local));
    if remote.is_ipv4() != local.is_ipv4() {
        return Ok(None);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))?;
    sendto(&socket, &diag_request(remote, local), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut reply = [0_u8; DIAG_BYTES];
    let (length, _) = recv(&socket, &mut reply, RecvFlags::empty())?;
    uid_in(&reply[..length.min(DIAG_BYTES)], remote, local)
}

/// Writes `struct nlmsghdr`, then `struct inet_diag_req_v2`.
fn diag_request(remote: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let family = if remote.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend((1_u32 << TCP_ESTABLISHED).to_ne_bytes());
    bytes.extend(ports_and_addresses(remote, local));
    // Interface: any. Cookie: unknown.
    bytes.extend([0; 4]);
    bytes.extend([0xff; 8]);
    bytes
}

/// Writes the first 36 bytes of `struct inet_diag_sockid`.
fn ports_and_addresses(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ID_BYTES);
    bytes.extend(source.port().to_be_bytes());
    bytes.extend(destination.port().to_be_bytes());
    for ip in [source.ip(), destination.ip()] {
        match ip {
            IpAddr::V4(ip) => {
                bytes.extend(ip.octets());
                bytes.extend([0; 12]);
            }
            IpAddr::V6(ip) => bytes.extend(ip.octets()),
        }
    }
    bytes
}

/// Reads `struct nlmsghdr`, then `struct inet_diag_msg`.
fn uid_in(reply: &[u8], remote: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let short = || io::Error::new(io::ErrorKind::UnexpectedEof, "the kernel's reply about a socket is incomplete");
    let word = |at: usize| reply.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_ne_bytes);
    let kind = reply.get(4..6).and_then(|two| two.try_into().ok()).map(u16::from_ne_bytes).ok_or_else(short)?;
    if kind == NLMSG_ERROR {
        let code = i32::from_ne_bytes(word(HEADER_BYTES).ok_or_else(short)?.to_ne_bytes()).saturating_neg();
        return if code == libc::ENOENT { Ok(None) } else { Err(io::Error::from_raw_os_error(code)) };
    }
    if kind != SOCK_DIAG_BY_FAMILY {
        return Err(io::Error::other(format!("the kernel replied to a request about a socket with message {kind}")));
    }
    let body = reply.get(HEADER_BYTES..).ok_or_else(short)?;
    let (family, state) = (*body.first().ok_or_else(short)?, *body.get(1).ok_or_else(short)?);
    let id = body.get(4..4 + ID_BYTES).ok_or_else(short)?;
    // Behind the id: expires, rqueue, wqueue, uid, inode.
    let after_id = HEADER_BYTES + 4 + ID_BYTES;
    let (uid, inode) = (word(after_id + 12).ok_or_else(short)?, word(after_id + 16).ok_or_else(short)?);
    let has_these_addresses = addresses_in(family, id) == Some((remote, local));
    let is_open = state == TCP_ESTABLISHED && inode != 0;
    Ok((has_these_addresses && is_open).then_some(uid))
}

fn addresses_in(family: u8, id: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let port = |at: usize| Some(u16::from_be_bytes(id.get(at..at + 2)?.try_into().ok()?));
    let ip = |at: usize| -> Option<IpAddr> {
        let sixteen: [u8; 16] = id.get(at..at + 16)?.try_into().ok()?;
        if i32::from(family) == libc::AF_INET6 {
            return Some(IpAddr::from(sixteen).to_canonical());
        }
        let four: [u8; 4] = sixteen[..4].try_into().ok()?;
        Some(IpAddr::from(four))
    };
    Some((SocketAddr::new(ip(4)?, port(0)?), SocketAddr::new(ip(20)?, port(2)?)))
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};

    use proptest::prelude::*;

    use super::*;

    fn connected(address: &str) -> Option<(TcpStream, TcpStream)> {
        let Ok(listener) = TcpListener::bind(address) else {
            // Written directly, because the test harness hides the output of a passing test.
            let why = format!("skipped {address}: this machine has no such address\n");
            std::io::Write::write_all(&mut io::stderr(), why.as_bytes()).unwrap();
            return None;
        };
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Some((client, listener.accept().unwrap().0))
    }

    fn user_of_peer(server: &TcpStream) -> Option<u32> {
        user_of_connection(server.peer_addr().unwrap(), server.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn a_connection_belongs_to_the_user_that_opened_it() {
        let me = Some(rustix::process::getuid().as_raw());
        for address in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Some((_client, server)) = connected(address) else { continue };
            assert_eq!(user_of_peer(&server), me, "{address}");
        }
    }

    #[test]
    fn a_client_that_left_has_no_user_and_is_never_root() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Some((client, server)) = connected(address) else { continue };
            let (remote, local) = (server.peer_addr().unwrap(), server.local_addr().unwrap());
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(user_of_peer(&server), None, "half-closed {address}");
            drop(client);
            assert_eq!(user_of_peer(&server), None, "closed {address}");
            drop(server);
            assert_eq!(user_of_connection(remote, local).unwrap(), None, "gone {address}");
        }
    }

    #[test]
    fn a_listener_on_the_port_of_a_client_that_left_is_not_its_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let elsewhere = SocketAddr::new(listening.ip(), 1);
        assert_eq!(user_of_connection(listening, elsewhere).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_reply_is_parsed_without_panic(reply in proptest::collection::vec(any::<u8>(), 0..200)) {
            let address = "127.0.0.1:1".parse().unwrap();
            let _ = uid_in(&reply, address, address);
        }
    }
}
