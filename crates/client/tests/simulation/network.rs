//! The way between clients and servers: every exchange takes its time, and may go wrong in any way that chance chooses.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use gpupool_client::transport::{ExchangeFuture, HttpRequest, HttpResponse, Transport, TransportError};
use http::{HeaderMap, StatusCode};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::audit::Audit;
use crate::chance::SeededRng;
use crate::routes;
use crate::server::Server;

/// What becomes of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Fine,
    Slow,
    QuestionLost,
    AnswerLost,
    ResetBefore,
    ResetAfter,
    Refused,
    Garbage,
    HalfABody,
    /// A status of its own, in place of the question's being worked off.
    Instead(u16),
    /// A gateway gives up after the question was passed on.
    GatewayAfter,
    Twice,
    /// Arrives long after whoever asked has given up.
    VeryLate,
}

const FAULTS: [Fate; 15] = [
    Fate::Slow,
    Fate::QuestionLost,
    Fate::QuestionLost,
    Fate::AnswerLost,
    Fate::AnswerLost,
    Fate::ResetBefore,
    Fate::ResetAfter,
    Fate::Refused,
    Fate::Garbage,
    Fate::HalfABody,
    Fate::Instead(500),
    Fate::Instead(503),
    Fate::Instead(429),
    Fate::GatewayAfter,
    Fate::Twice,
];

#[derive(Debug)]
pub struct Network {
    pub servers: Vec<Arc<Server>>,
    pub audit: Arc<Audit>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    chance: SeededRng,
    /// How many of a hundred exchanges go wrong.
    faults: u64,
    /// Only those of a route that ends so; empty for all.
    only: &'static str,
    /// Which clients cannot reach which servers.
    cut: BTreeSet<(usize, usize)>,
}

impl Network {
    pub fn new(
        servers: Vec<Arc<Server>>,
        audit: Arc<Audit>,
        chance: SeededRng,
        faults: u64,
        only: &'static str,
    ) -> Arc<Self> {
        Arc::new(Self { servers, audit, state: Mutex::new(State { chance, faults, only, cut: BTreeSet::new() }) })
    }

    pub fn cut(&self, slot: usize, server: usize, is_cut: bool) {
        let mut state = self.state.lock().unwrap();
        match is_cut {
            true => state.cut.insert((slot, server)),
            false => state.cut.remove(&(slot, server)),
        };
    }

    /// From now on everything arrives.
    pub fn heal(&self) {
        let mut state = self.state.lock().unwrap();
        state.faults = 0;
        state.cut.clear();
    }

    fn is_cut(&self, slot: usize, server: usize) -> bool {
        self.state.lock().unwrap().cut.contains(&(slot, server))
    }

    fn fate(&self, route: &str) -> Fate {
        let mut state = self.state.lock().unwrap();
        let faults = if route.ends_with(state.only) { state.faults } else { 0 };
        if !state.chance.percent_chance(faults) {
            return Fate::Fine;
        }
        if state.chance.percent_chance(10) { Fate::VeryLate } else { *state.chance.pick(&FAULTS) }
    }

    fn millis(&self, least: u64, most: u64) -> Duration {
        millis(&mut self.state.lock().unwrap().chance, least, most)
    }

    fn happens(&self, percent: u64) -> bool {
        self.state.lock().unwrap().chance.percent_chance(percent)
    }
}

/// A client's life: once it is over, it neither says nor hears anything.
#[derive(Debug)]
pub struct Life {
    pub name: String,
    pub slot: usize,
    is_over: AtomicBool,
}

impl Life {
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

/// Carries one client's questions to one server.
#[derive(Debug, Clone)]
pub struct Carrier {
    pub network: Arc<Network>,
    pub life: Arc<Life>,
    pub server: usize,
}

impl Transport for Carrier {
    fn exchange(&self, question: HttpRequest) -> ExchangeFuture<'_> {
        Box::pin(async move {
            if self.life.is_over() {
                return never().await;
            }
            let fate = self.network.fate(&question.route);
            let said = format!("{} to server{}: {} {}", self.life.name, self.server, question.method, question.route);
            let body = question.body.clone().unwrap_or_default();
            self.network.audit.note(format!("{said} {} ({fate:?})", String::from_utf8_lossy(&body)));
            let limit = question.timeout;
            let confirmed =
                question.route.strip_suffix("/confirm").and_then(|route| route.rsplit('/').next()?.parse().ok());
            let outcome = timeout(limit, self.carry(question, fate)).await.unwrap_or(Err(TransportError::Late));
            if self.life.is_over() {
                return never().await;
            }
            let heard = match &outcome {
                Ok(answer) => format!("{} {}", answer.status.as_u16(), shortened(&answer.body)),
                Err(fault) => format!("{fault:?}"),
            };
            self.network.audit.note(format!("{said}: {heard}"));
            if let (Some(lease), Ok(answer)) = (confirmed, &outcome)
                && answer.status == StatusCode::CONFLICT
            {
                self.network.audit.offer_is_gone(self.server, lease);
            }
            outcome
        })
    }
}

impl Carrier {
    async fn carry(&self, question: HttpRequest, fate: Fate) -> Result<HttpResponse, TransportError> {
        let (there, back) = match fate {
            Fate::Slow => (self.network.millis(100, 3_000), self.network.millis(100, 3_000)),
            Fate::VeryLate => (question.timeout + self.network.millis(0, 20_000), Duration::ZERO),
            _ => (self.network.millis(1, 15), self.network.millis(1, 15)),
        };
        match fate {
            Fate::QuestionLost => return never().await,
            Fate::ResetBefore => {
                tokio::time::sleep(there).await;
                return Err(broken());
            }
            Fate::Refused => {
                tokio::time::sleep(there).await;
                return Err(TransportError::NotSent("refused".into()));
            }
            Fate::Instead(status) => {
                tokio::time::sleep(there + back).await;
                return Ok(instead(status));
            }
            _ => {}
        }
        if self.network.is_cut(self.life.slot, self.server) {
            return match self.network.happens(30) {
                true => Err(TransportError::NotSent("no way there".into())),
                false => never().await,
            };
        }
        // What was refused is not remembered under its key: asked twice it may be granted the second time, and nobody could
        // know. It ends with its ttl.
        let is_refusable = question.body.as_ref().is_some_and(|body| has(body, b"\"queue\":false"));
        if fate == Fate::Twice && !is_refusable {
            let (again, later) = (self.clone(), there + self.network.millis(1, 4_000));
            let question = question.clone();
            tokio::spawn(async move { again.deliver(&question, later).await });
        }
        let answer = self.ask(question, there).await?;
        tokio::time::sleep(back).await;
        if fate == Fate::AnswerLost || self.network.is_cut(self.life.slot, self.server) {
            return never().await;
        }
        match fate {
            Fate::ResetAfter => Err(broken()),
            Fate::Garbage => Ok(HttpResponse { body: Bytes::from_static(b"<html>welcome</html>"), ..whole(answer) }),
            Fate::HalfABody => Ok(HttpResponse { body: answer.body.slice(..answer.body.len() / 2), ..whole(answer) }),
            Fate::GatewayAfter => Ok(instead(504)),
            _ => Ok(answer),
        }
    }

    /// Sends the question, which arrives whether or not anybody waits for the answer.
    async fn ask(&self, question: HttpRequest, there: Duration) -> Result<HttpResponse, TransportError> {
        let (tell, told) = oneshot::channel();
        // A server may notice that whoever follows has hung up.
        let notices = question.route.ends_with("/follow") && self.network.happens(90);
        let carrier = self.clone();
        tokio::spawn(async move {
            let mut tell = tell;
            let answer = tokio::select! {
                biased;
                answer = carrier.deliver(&question, there) => answer,
                () = tell.closed(), if notices => return,
            };
            let _ = tell.send(answer);
        });
        told.await.unwrap_or_else(|_| Err(broken()))
    }

    async fn deliver(&self, question: &HttpRequest, there: Duration) -> Result<HttpResponse, TransportError> {
        tokio::time::sleep(there).await;
        let server = &self.network.servers[self.server];
        if self.network.is_cut(self.life.slot, self.server) {
            return never().await;
        }
        if !server.is_up() {
            return Err(TransportError::NotSent("nobody listens".into()));
        }
        let working = self.network.millis(0, 5);
        routes::answer(server, &self.life.name, question, working).await.ok_or_else(broken)
    }
}

/// A time between two, in milliseconds.
pub fn millis(chance: &mut SeededRng, least: u64, most: u64) -> Duration {
    Duration::from_millis(least + chance.below(most - least + 1))
}

/// A body that is not whole comes with a status as if it were.
fn whole(answer: HttpResponse) -> HttpResponse {
    HttpResponse { status: StatusCode::OK, headers: HeaderMap::new(), ..answer }
}

fn instead(status: u16) -> HttpResponse {
    match status {
        429 => routes::problem(429, "too_many_waiting", "later".into()),
        503 => routes::problem(503, "busy", "later".into()),
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

fn has(body: &[u8], part: &[u8]) -> bool {
    body.windows(part.len()).any(|window| window == part)
}

async fn never<T>() -> T {
    std::future::pending().await
}
