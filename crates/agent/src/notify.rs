//! Telling a service manager how things go, in the way systemd listens for.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The agent answers now.
pub fn ready() {
    tell("READY=1\nSTATUS=answering");
}

/// The agent is ending.
pub fn stopping() {
    tell("STOPPING=1\nSTATUS=ending");
}

/// The agent reads its configuration again.
pub fn reloaded() {
    tell("STATUS=configuration read again");
}

/// Nobody has to listen, and nothing depends on who does.
fn tell(text: &str) {
    let Some(place) = env::var_os("NOTIFY_SOCKET") else { return };
    let bytes = place.as_encoded_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&place),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::debug!(%error, "the service manager was not told");
    }
}
