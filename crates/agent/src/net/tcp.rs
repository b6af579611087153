//! Opens TCP listeners.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};

use super::error::NetError;
use super::limits::{ADDRESSES_PER_NAME, BACKLOG, KEEPALIVE_COUNT, KEEPALIVE_EVERY, KEEPALIVE_IDLE, PORT_TRIES};

/// One place to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpBind {
    /// An address, or a name: `localhost` means IPv4 and IPv6 loopback; `::` means every address, IPv4 too.
    pub host: String,
    /// The port; 0 lets the system choose one (the same for all addresses of the host).
    pub port: u16,
}

/// Opens every address, or none.
pub(super) async fn bind_all(places: &[TcpBind]) -> Result<Vec<(SocketAddr, TcpListener)>, NetError> {
    let mut resolved = Vec::new();
    for place in places {
        resolved.push((resolve(place).await?, place.port));
    }
    let any_v4 = resolved.iter().flat_map(|(ips, _)| ips).any(|ip| *ip == IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let mut open = Vec::new();
    for (ips, port) in resolved {
        open.extend(bind_host(&ips, port, any_v4)?);
    }
    Ok(open)
}

async fn resolve(place: &TcpBind) -> Result<Vec<IpAddr>, NetError> {
    if place.host.eq_ignore_ascii_case("localhost") {
        return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
    }
    let bare = place.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&place.host);
    if let Ok(ip) = bare.parse() {
        return Ok(vec![ip]);
    }
    let fail = |source| NetError::Resolve { host: place.host.clone(), source };
    let found = tokio::net::lookup_host((bare, place.port)).await.map_err(fail)?;
    let ips: BTreeSet<IpAddr> = found.map(|address| address.ip()).take(ADDRESSES_PER_NAME).collect();
    if ips.is_empty() {
        return Err(fail(io::Error::new(io::ErrorKind::NotFound, "no address")));
    }
    Ok(ips.into_iter().collect())
}

/// Opens all addresses of one host on one port. A chosen port may be taken at the next address: then another is tried.
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
        match listen(address, any_v4) {
            Ok(listener) => {
                let bound = listener.local_addr().map_err(|source| NetError::Tcp { address, source })?;
                port = bound.port();
                open.push((bound, listener));
            }
            Err(error) if ips.len() > 1 && is_missing(&error) => {
                tracing::info!(%address, %error, "this machine has no such address: not listening there");
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

/// A machine without IPv6 (or IPv4) still serves the other.
fn is_missing(error: &io::Error) -> bool {
    let missing = [libc::EAFNOSUPPORT, libc::EADDRNOTAVAIL, libc::EPROTONOSUPPORT];
    error.raw_os_error().is_some_and(|code| missing.contains(&code))
}

fn listen(address: SocketAddr, any_v4: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    if let IpAddr::V6(ip) = address.ip() {
        sockopt::set_ipv6_v6only(&socket, any_v4 || !ip.is_unspecified())?;
    }
    // Accepted connections inherit these on Linux, so they cost nothing per connection.
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn accepted_connections_inherit_what_the_listener_was_told() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(&accepted).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&accepted).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepcnt(&accepted).unwrap(), KEEPALIVE_COUNT);
    }
}
