//! The identity of the other end of a connection: its addresses, and its user as the kernel names it.
//!
//! The kernel names the user of a Unix peer at accept. It is asked about the other end of a loopback connection by
//! NETLINK sock_diag: one request names the peer's socket by its two addresses, the answer carries its owner and is
//! there when the call returns. An answer counts only for a socket that is still connected and still open in a
//! process: for a closed one the kernel reports user 0, which must never be taken for root.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::DIAG_BYTES;
use super::connection::Socket;
use super::process::{self, NoProcess, PeerProcess, Start};

/// The other end of a connection; in the extensions of every request. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Peer(Arc<Facts>);

#[derive(Debug)]
struct Facts {
    transport: Transport,
    credentials: Option<Credentials>,
    /// Of a Unix peer, where only this tells it from a later process of the same pid.
    start: Option<Start>,
    socket: Weak<Socket>,
    /// The answer of the kernel, once asked for.
    user: OnceLock<User>,
}

/// The user at the other end.
#[derive(Debug, Clone, Copy)]
enum User {
    Known(u32),
    /// The other end was closed before the kernel was asked.
    Gone,
    Unknown,
}

/// Connection of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Over TCP.
    Tcp {
        /// The peer's address (IPv4 if it speaks IPv4).
        remote: SocketAddr,
        /// The address it connected to.
        local: SocketAddr,
        /// Whether both addresses are of the loopback interface.
        loopback: bool,
        /// Whether it speaks https.
        tls: bool,
    },
    /// Over the Unix socket.
    Unix,
}

/// The process that connected to the Unix socket, named by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Its pid in our pid namespace; `None` if it cannot be seen from there.
    pub pid: Option<u32>,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

impl Peer {
    pub(super) fn tcp(socket: &Arc<Socket>, remote: SocketAddr, local: SocketAddr, tls: bool) -> Self {
        let (remote, local) = (canonical(remote), canonical(local));
        let loopback = remote.ip().is_loopback() && local.ip().is_loopback();
        Self::new(socket, Transport::Tcp { remote, local, loopback, tls }, None)
    }

    pub(super) fn unix(socket: &Arc<Socket>, credentials: Option<Credentials>) -> Self {
        Self::new(socket, Transport::Unix, credentials)
    }

    fn new(socket: &Arc<Socket>, transport: Transport, credentials: Option<Credentials>) -> Self {
        let start = credentials.and_then(|credentials| process::start_to_remember(&credentials));
        let socket = Arc::downgrade(socket);
        Self(Arc::new(Facts { transport, credentials, start, socket, user: OnceLock::new() }))
    }

    /// Returns the transport of the connection.
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// Returns whether it is on this machine: the Unix socket or loopback.
    pub fn is_local(&self) -> bool {
        matches!(self.0.transport, Transport::Unix | Transport::Tcp { loopback: true, .. })
    }

    /// Returns the process that connected to the Unix socket; `None` over TCP.
    pub fn credentials(&self) -> Option<Credentials> {
        self.0.credentials
    }

    /// Returns the user at the other end, if it is on this machine and the kernel knows.
    ///
    /// Over loopback TCP the kernel is asked at the first call (some microseconds, never blocking), and the answer is
    /// kept for the connection. `None` means unknown: treat such a client as a stranger.
    pub fn uid(&self) -> Option<u32> {
        match self.user() {
            User::Known(uid) => Some(uid),
            User::Gone | User::Unknown => None,
        }
    }

    /// Returns whether it left before the kernel was asked for its user.
    pub fn is_gone(&self) -> bool {
        matches!(self.user(), User::Gone)
    }

    fn user(&self) -> User {
        match self.0.transport {
            Transport::Unix => self.0.credentials.map_or(User::Unknown, |credentials| User::Known(credentials.uid)),
            Transport::Tcp { loopback: false, .. } => User::Unknown,
            Transport::Tcp { remote, local, .. } => {
                *self.0.user.get_or_init(|| match user_of_connection(remote, local) {
                    Ok(Some(uid)) => User::Known(uid),
                    Ok(None) => User::Gone,
                    Err(error) => {
                        tracing::warn!(%remote, %error, "cannot ask the kernel whose connection this is");
                        User::Unknown
                    }
                })
            }
        }
    }

    /// Opens the process that connected to the Unix socket, as a fresh handle that no other process can slip into.
    pub fn process(&self) -> Result<PeerProcess, NoProcess> {
        let credentials = self.0.credentials.ok_or(NoProcess::NotUnix)?;
        let socket = self.0.socket.upgrade().ok_or(NoProcess::Gone)?;
        process::of_peer(&socket, &credentials, self.0.start)
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
    // The kernel finds an IPv6 socket that speaks IPv4 by its IPv4 addresses.
    let (remote, local) = (canonical(remote), canonical(local));
    if remote.is_ipv4() != local.is_ipv4() {
        return Ok(None);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))?;
    sendto(&socket, &diag_request(remote, local), SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0_u8; DIAG_BYTES];
    let (length, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
    owner_in(&answer[..length.min(DIAG_BYTES)], remote, local)
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
fn owner_in(answer: &[u8], remote: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let short = || io::Error::new(io::ErrorKind::UnexpectedEof, "the kernel's answer about a socket is cut off");
    let word = |at: usize| answer.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_ne_bytes);
    let kind = answer.get(4..6).and_then(|two| two.try_into().ok()).map(u16::from_ne_bytes).ok_or_else(short)?;
    if kind == NLMSG_ERROR {
        let code = i32::from_ne_bytes(word(HEADER_BYTES).ok_or_else(short)?.to_ne_bytes()).saturating_neg();
        return if code == libc::ENOENT { Ok(None) } else { Err(io::Error::from_raw_os_error(code)) };
    }
    if kind != SOCK_DIAG_BY_FAMILY {
        return Err(io::Error::other(format!("the kernel answered a question about a socket with message {kind}")));
    }
    let body = answer.get(HEADER_BYTES..).ok_or_else(short)?;
    let (family, state) = (*body.first().ok_or_else(short)?, *body.get(1).ok_or_else(short)?);
    let id = body.get(4..4 + ID_BYTES).ok_or_else(short)?;
    // Behind the id: expires, rqueue, wqueue, uid, inode.
    let after_id = HEADER_BYTES + 4 + ID_BYTES;
    let (uid, inode) = (word(after_id + 12).ok_or_else(short)?, word(after_id + 16).ok_or_else(short)?);
    let is_the_one = addresses_in(family, id) == Some((remote, local));
    let is_open = state == TCP_ESTABLISHED && inode != 0;
    Ok((is_the_one && is_open).then_some(uid))
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
            // Not by a macro: a passing test's own output is not shown.
            let why = format!("skipped {address}: this machine has no such address\n");
            std::io::Write::write_all(&mut io::stderr(), why.as_bytes()).unwrap();
            return None;
        };
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Some((client, listener.accept().unwrap().0))
    }

    fn owner_of_peer(server: &TcpStream) -> Option<u32> {
        user_of_connection(server.peer_addr().unwrap(), server.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn a_connection_belongs_to_the_user_who_made_it() {
        let me = Some(rustix::process::getuid().as_raw());
        for address in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Some((_client, server)) = connected(address) else { continue };
            assert_eq!(owner_of_peer(&server), me, "{address}");
        }
    }

    #[test]
    fn a_client_that_left_has_no_user_and_is_never_root() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Some((client, server)) = connected(address) else { continue };
            let (remote, local) = (server.peer_addr().unwrap(), server.local_addr().unwrap());
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(owner_of_peer(&server), None, "half-closed {address}");
            drop(client);
            assert_eq!(owner_of_peer(&server), None, "closed {address}");
            drop(server);
            assert_eq!(user_of_connection(remote, local).unwrap(), None, "gone {address}");
        }
    }

    #[test]
    fn a_listener_on_the_port_of_a_client_that_left_is_not_taken_for_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let elsewhere = SocketAddr::new(listening.ip(), 1);
        assert_eq!(user_of_connection(listening, elsewhere).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_panic(answer in proptest::collection::vec(any::<u8>(), 0..200)) {
            let address = "127.0.0.1:1".parse().unwrap();
            let _ = owner_in(&answer, address, address);
        }
    }
}
