//! The one loop: accepts, owns the connections, looks over them, and ends them when the agent stops.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Body;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tower::Service;

use super::bodies::RequestBody;
use super::connection::{self, Seat};
use super::limits::{ACCEPT_PAUSE, ACCEPT_PAUSE_MOST};
use super::listener::{Accepted, accept_any};
use super::registry::Registry;
use super::{Net, Shutdown};

/// How serving ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Connections whose request had not finished when the grace was over.
    pub cut_off: usize,
}

impl Net {
    /// Serves until shutdown begins, lets requests in progress finish, and returns when every connection has ended.
    ///
    /// Handlers of long requests should watch the same [`Shutdown`]; what still runs after the grace is cut off. The
    /// Unix socket's file is removed as soon as nothing is accepted any more.
    pub async fn serve<S, B>(self, service: S, shutdown: Shutdown) -> Ended
    where
        S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let Self { listeners, limits } = self;
        let grace = limits.shutdown_grace;
        let http = connection::http(&limits);
        let mut connections = Registry::new(limits);
        let mut look = interval_at(Instant::now() + connections.look_every, connections.look_every);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pause = Pause::default();
        let mut turn = 0;
        let mut begun = std::pin::pin!(shutdown.begun());
        loop {
            let anybody = !connections.is_empty();
            tokio::select! {
                biased;
                () = &mut begun => break,
                () = connections.ended(), if anybody => {}
                _ = look.tick(), if anybody => connections.look(),
                () = pause.over(), if pause.until.is_some() => pause.until = None,
                accepted = accept_any(&listeners, &mut turn), if pause.until.is_none() => match accepted {
                    Err(error) => pause.after(&error),
                    Ok(accepted) => {
                        pause.length = None;
                        let (service, http) = (service.clone(), http.clone());
                        admit(&mut connections, accepted, service, http);
                    }
                },
            }
        }
        drop(listeners);
        connections.finish_all();
        let finished = async {
            while !connections.is_empty() {
                tokio::select! {
                    () = connections.ended() => {}
                    _ = look.tick() => connections.look(),
                }
            }
        };
        let _ = timeout(grace, finished).await;
        let cut_off = connections.serving();
        connections.close_all().await;
        Ended { cut_off }
    }
}

fn admit<S, B>(connections: &mut Registry, accepted: Accepted, service: S, http: hyper::server::conn::http1::Builder)
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    // Two kinds of task: a plain connection must not take the room of a TLS one.
    if let Some(config) = accepted.tls.clone() {
        connections.admit(accepted, |Accepted { socket, peer, .. }, watch| {
            connection::tls(Seat { socket, peer, watch, service, http }, config)
        });
    } else {
        connections.admit(accepted, |Accepted { socket, peer, .. }, watch| {
            connection::plain(Seat { socket, peer, watch, service, http })
        });
    }
}

/// Keeps the loop from spinning when connections cannot be accepted (no file descriptors or memory left).
#[derive(Debug, Default)]
struct Pause {
    length: Option<Duration>,
    until: Option<Instant>,
}

impl Pause {
    fn after(&mut self, error: &io::Error) {
        if is_the_clients(error) {
            return;
        }
        let length = self.length.map_or(ACCEPT_PAUSE, |last| (last * 2).min(ACCEPT_PAUSE_MOST));
        if self.length.is_none() {
            tracing::warn!(%error, "cannot accept connections; trying again in a moment");
        }
        self.length = Some(length);
        self.until = Some(Instant::now() + length);
    }

    async fn over(&self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
        }
    }
}

/// Whether the error belongs to the one connection that was to be accepted; the next one may be fine.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | NotConnected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_free_files_the_pauses_grow_to_a_bound_and_a_client_that_gave_up_costs_none() {
        let mut pause = Pause::default();
        pause.after(&io::ErrorKind::ConnectionAborted.into());
        assert_eq!(pause.until, None);
        let out_of_files = io::Error::from_raw_os_error(libc::EMFILE);
        let mut lengths = Vec::new();
        for _ in 0..10 {
            pause.after(&out_of_files);
            lengths.extend(pause.length);
            assert!(pause.until.is_some());
        }
        assert_eq!(lengths[0], ACCEPT_PAUSE);
        assert!(lengths.is_sorted(), "{lengths:?}");
        assert_eq!(lengths.last(), Some(&ACCEPT_PAUSE_MOST));
    }
}
