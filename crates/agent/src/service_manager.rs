//! The notification protocol of systemd: the agent reports that it is ready or stopping, and feeds the watchdog.

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use crate::authority::Authority;

/// Reports that the agent is ready.
pub(crate) fn ready() {
    send("READY=1\nSTATUS=answering");
}

/// Reports that the agent is stopping.
pub(crate) fn stopping() {
    send("STOPPING=1\nSTATUS=ending");
}

/// Reports that the configuration was reloaded.
pub(crate) fn reloaded() {
    send("STATUS=configuration read again");
}

/// Feeds the watchdog while the authority is alive, if the service manager requests it (`WatchdogSec=`).
pub(crate) async fn feed_watchdog(authority: Authority) {
    let Some(interval) = watchdog_interval(env::var("WATCHDOG_USEC").ok().as_deref()) else { return };
    loop {
        if authority.is_alive() {
            send("WATCHDOG=1");
        } else {
            tracing::error!("the authority does not respond; the service manager will restart the agent");
        }
        tokio::time::sleep(interval).await;
    }
}

/// Returns the time between two watchdog messages: a third of the time that the service manager waits.
fn watchdog_interval(micros: Option<&str>) -> Option<Duration> {
    let micros: u64 = micros?.parse().ok().filter(|micros| *micros > 0)?;
    Some(Duration::from_micros(micros) / 3)
}

/// Sends a message. Errors are ignored: there may be no service manager, and nothing depends on it.
fn send(text: &str) {
    let Some(place) = env::var_os("NOTIFY_SOCKET") else { return };
    let bytes = place.as_encoded_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&place),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_fed_three_times_as_often_as_it_must_be() {
        assert_eq!(watchdog_interval(Some("30000000")), Some(Duration::from_secs(10)));
        for none in [None, Some("0"), Some("soon"), Some("-1")] {
            assert_eq!(watchdog_interval(none), None, "{none:?}");
        }
    }
}
