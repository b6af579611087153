//! The network between clients and servers: every exchange takes time and may fail in random ways.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use gpupool_client::transport::{ExchangeFuture, HttpRequest, HttpResponse, Transport, TransportError};
use http::{HeaderMap, StatusCode};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::audit::InvariantAudit;
use crate::seeded_rng::SeededRng;
use crate::server_routes;
use crate::simulated_server::SimulatedServer;

/// Fate of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExchangeFate {
    Delivered,
    Slow,
    RequestLost,
    ResponseLost,
    ResetBefore,
    ResetAfter,
    Refused,
    Garbage,
    HalfABody,
    /// Another status in place of the response; the request is not delivered.
    ReplacedByStatus(u16),
    /// A gateway times out after it has forwarded the request.
    GatewayAfter,
    Twice,
    /// Arrives long after the client has timed out.
    VeryLate,
}

const FAULTS: [ExchangeFate; 15] = [
    ExchangeFate::Slow,
    ExchangeFate::RequestLost,
    ExchangeFate::RequestLost,
    ExchangeFate::ResponseLost,
    ExchangeFate::ResponseLost,
    ExchangeFate::ResetBefore,
    ExchangeFate::ResetAfter,
    ExchangeFate::Refused,
    ExchangeFate::Garbage,
    ExchangeFate::HalfABody,
    ExchangeFate::ReplacedByStatus(500),
    ExchangeFate::ReplacedByStatus(503),
    ExchangeFate::ReplacedByStatus(429),
    ExchangeFate::GatewayAfter,
    ExchangeFate::Twice,
];

#[derive(Debug)]
pub struct FaultyNetwork {
    pub servers: Vec<Arc<SimulatedServer>>,
    pub audit: Arc<InvariantAudit>,
    state: Mutex<NetworkState>,
}

#[derive(Debug)]
struct NetworkState {
    chance: SeededRng,
    /// Percentage of exchanges that fail.
    faults: u64,
    /// Suffix of the routes that fail; empty for all.
    only: &'static str,
    /// Pairs of clients and servers without a connection.
    cut: BTreeSet<(usize, usize)>,
}

impl FaultyNetwork {
    pub fn new(
        servers: Vec<Arc<SimulatedServer>>,
        audit: Arc<InvariantAudit>,
        chance: SeededRng,
        faults: u64,
        only: &'static str,
    ) -> Arc<Self> {
        Arc::new(Self {
            servers,
            audit,
            state: Mutex::new(NetworkState { chance, faults, only, cut: BTreeSet::new() }),
        })
    }

    pub fn cut(&self, slot: usize, server: usize, is_cut: bool) {
        let mut state = self.state.lock().unwrap();
        match is_cut {
            true => state.cut.insert((slot, server)),
            false => state.cut.remove(&(slot, server)),
        };
    }

    /// Ends all faults.
    pub fn heal(&self) {
        let mut state = self.state.lock().unwrap();
        state.faults = 0;
        state.cut.clear();
    }

    fn is_cut(&self, slot: usize, server: usize) -> bool {
        self.state.lock().unwrap().cut.contains(&(slot, server))
    }

    fn fate(&self, route: &str) -> ExchangeFate {
        let mut state = self.state.lock().unwrap();
        let faults = if route.ends_with(state.only) { state.faults } else { 0 };
        if !state.chance.percent_chance(faults) {
            return ExchangeFate::Delivered;
        }
        if state.chance.percent_chance(10) { ExchangeFate::VeryLate } else { *state.chance.pick(&FAULTS) }
    }

    fn millis(&self, least: u64, most: u64) -> Duration {
        millis(&mut self.state.lock().unwrap().chance, least, most)
    }

    fn chance_of(&self, percent: u64) -> bool {
        self.state.lock().unwrap().chance.percent_chance(percent)
    }
}

/// Lifetime of a client: after its end it sends and receives nothing.
#[derive(Debug)]
pub struct ClientLifetime {
    pub name: String,
    pub slot: usize,
    is_over: AtomicBool,
}

impl ClientLifetime {
    pub fn new(name: String, slot: usize) -> Arc<Self> {
        Arc::new(Self { name, slot, is_over: AtomicBool::new(false) })
    }

    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

/// Transport of one client's requests to one server.
#[derive(Debug, Clone)]
pub struct FaultyTransport {
    pub network: Arc<FaultyNetwork>,
    pub lifetime: Arc<ClientLifetime>,
    pub server: usize,
}

impl Transport for FaultyTransport {
    fn exchange(&self, request: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(async move {
            if self.lifetime.is_over() {
                return pending_forever().await;
            }
            let fate = self.network.fate(&request.route);
            let exchange_name =
                format!("{} to server{}: {} {}", self.lifetime.name, self.server, request.method, request.route);
            let body = request.body.clone().unwrap_or_default();
            self.network.audit.trace(format!("{exchange_name} {} ({fate:?})", String::from_utf8_lossy(&body)));
            let limit = request.timeout;
            let confirmed =
                request.route.strip_suffix("/confirm").and_then(|route| route.rsplit('/').next()?.parse().ok());
            let outcome = timeout(limit, self.apply_fate(request, fate)).await.unwrap_or(Err(TransportError::TimedOut));
            if self.lifetime.is_over() {
                return pending_forever().await;
            }
            let outcome_text = match &outcome {
                Ok(response) => format!("{} {}", response.status.as_u16(), shortened(&response.body)),
                Err(fault) => format!("{fault:?}"),
            };
            self.network.audit.trace(format!("{exchange_name}: {outcome_text}"));
            if let (Some(lease), Ok(response)) = (confirmed, &outcome)
                && response.status == StatusCode::CONFLICT
            {
                self.network.audit.offer_is_gone(self.server, lease);
            }
            outcome
        })
    }
}

impl FaultyTransport {
    async fn apply_fate(&self, request: HttpRequest, fate: ExchangeFate) -> Result<HttpResponse, TransportError> {
        let (there, back) = match fate {
            ExchangeFate::Slow => (self.network.millis(100, 3_000), self.network.millis(100, 3_000)),
            ExchangeFate::VeryLate => (request.timeout + self.network.millis(0, 20_000), Duration::ZERO),
            _ => (self.network.millis(1, 15), self.network.millis(1, 15)),
        };
        match fate {
            ExchangeFate::RequestLost => return pending_forever().await,
            ExchangeFate::ResetBefore => {
                tokio::time::sleep(there).await;
                return Err(broken());
            }
            ExchangeFate::Refused => {
                tokio::time::sleep(there).await;
                return Err(TransportError::NotSent("refused".into()));
            }
            ExchangeFate::ReplacedByStatus(status) => {
                tokio::time::sleep(there + back).await;
                return Ok(replacement_response(status));
            }
            _ => {}
        }
        if self.network.is_cut(self.lifetime.slot, self.server) {
            return match self.network.chance_of(30) {
                true => Err(TransportError::NotSent("no way there".into())),
                false => pending_forever().await,
            };
        }
        // A refusal is not remembered under its key: a repeated request may be granted, and no client would know. Such
        // a grant ends with its ttl.
        let is_refusable = request.body.as_ref().is_some_and(|body| contains_bytes(body, b"\"queue\":false"));
        if fate == ExchangeFate::Twice && !is_refusable {
            let (again, later) = (self.clone(), there + self.network.millis(1, 4_000));
            let request = request.clone();
            tokio::spawn(async move { again.deliver(&request, later).await });
        }
        let response = self.send(request, there).await?;
        tokio::time::sleep(back).await;
        if fate == ExchangeFate::ResponseLost || self.network.is_cut(self.lifetime.slot, self.server) {
            return pending_forever().await;
        }
        match fate {
            ExchangeFate::ResetAfter => Err(broken()),
            ExchangeFate::Garbage => {
                Ok(HttpResponse { body: Bytes::from_static(b"<html>welcome</html>"), ..with_ok_status(response) })
            }
            ExchangeFate::HalfABody => {
                Ok(HttpResponse { body: response.body.slice(..response.body.len() / 2), ..with_ok_status(response) })
            }
            ExchangeFate::GatewayAfter => Ok(replacement_response(504)),
            _ => Ok(response),
        }
    }

    /// Sends the request, which arrives even if the caller stops waiting for the response.
    async fn send(&self, request: HttpRequest, there: Duration) -> Result<HttpResponse, TransportError> {
        let (response_sender, errors) = oneshot::channel();
        // A server may notice that the following client has closed the connection.
        let notices = request.route.ends_with("/follow") && self.network.chance_of(90);
        let carrier = self.clone();
        tokio::spawn(async move {
            let mut response_sender = response_sender;
            let response = tokio::select! {
                biased;
                response = carrier.deliver(&request, there) => response,
                () = response_sender.closed(), if notices => return,
            };
            let _ = response_sender.send(response);
        });
        errors.await.unwrap_or_else(|_| Err(broken()))
    }

    async fn deliver(&self, request: &HttpRequest, there: Duration) -> Result<HttpResponse, TransportError> {
        tokio::time::sleep(there).await;
        let server = &self.network.servers[self.server];
        if self.network.is_cut(self.lifetime.slot, self.server) {
            return pending_forever().await;
        }
        if !server.is_up() {
            return Err(TransportError::NotSent("no server listens".into()));
        }
        let working = self.network.millis(0, 5);
        server_routes::respond(server, &self.lifetime.name, request, working).await.ok_or_else(broken)
    }
}

/// Random duration between two bounds in milliseconds.
pub fn millis(chance: &mut SeededRng, least: u64, most: u64) -> Duration {
    Duration::from_millis(least + chance.below(most - least + 1))
}

/// A truncated body comes with a success status.
fn with_ok_status(response: HttpResponse) -> HttpResponse {
    HttpResponse { status: StatusCode::OK, headers: HeaderMap::new(), ..response }
}

fn replacement_response(status: u16) -> HttpResponse {
    match status {
        429 => server_routes::problem(429, "too_many_waiting", "later".into()),
        503 => server_routes::problem(503, "busy", "later".into()),
        _ => HttpResponse {
            status: StatusCode::from_u16(status).unwrap(),
            headers: HeaderMap::new(),
            body: Bytes::from_static(b"oops"),
        },
    }
}

fn broken() -> TransportError {
    TransportError::Broken("reset".into())
}

fn shortened(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.chars().take(400).collect()
}

fn contains_bytes(body: &[u8], part: &[u8]) -> bool {
    body.windows(part.len()).any(|window| window == part)
}

async fn pending_forever<T>() -> T {
    std::future::pending().await
}
