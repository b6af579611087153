//! One endpoint: who decides there, what it was last seen to have, and whether it can be asked now.
//!
//! What is known lies behind a lock, because status calls are synchronous and answer from it; it is never held across an
//! await. Who decides is learned once: a server that said it decides is never kept books beside.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use gpupool_api::RequestBody;
use gpupool_api::lease::{Followed, Lease};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::balance::Candidate;
use super::books::Books;
use super::breaker::{Breaker, Change};
use super::capacity::{Gpu, Need, Seen};
use super::returns::Returns;
use super::stray::Stray;
use crate::changes::Changes;
use crate::limits::{STRAYS, SUSPECT_AFTER};
use crate::{AgentClient, ClientError, IdempotencyKey, random};

/// Who decides who holds what at an endpoint.
#[derive(Debug, Clone)]
pub(super) enum Desk {
    /// The server.
    Agent,
    /// This client: the server only has statistics.
    Books(Arc<Books>),
}

#[derive(Debug)]
pub(super) struct Place {
    /// Its number among the client's endpoints.
    pub number: usize,
    /// What it is called.
    pub id: String,
    /// Asks once; trying again is the client's business.
    pub agent: AgentClient,
    known: Mutex<Known>,
    /// Told whenever an endpoint of the client can be asked, or cannot any more, or was looked at.
    weather: Arc<Changes>,
    /// What is on its way back.
    pub returns: Arc<Returns>,
    /// Somebody wants it to be looked at now.
    pub look_now: Notify,
}

/// What is known of an endpoint.
#[derive(Debug)]
pub(super) struct Known {
    pub breaker: Breaker,
    pub desk: Option<Desk>,
    pub seen: Option<Seen>,
    /// How long answers take, the last ones counting most.
    pub response: Option<Duration>,
    /// When the oldest look that is not answered was begun.
    pub asked_since: Option<Instant>,
    /// When it last answered, and what people's clocks said then.
    pub answered: Option<(Instant, SystemTime)>,
    /// What went wrong last, until something goes right.
    pub error: Option<String>,
    /// What its `/health` last said.
    pub health: Option<String>,
    /// Requests that are on their way there.
    pub in_flight: usize,
    /// Requests sent there, and those it granted.
    pub requests: u64,
    pub granted: u64,
    /// Looks at it that came to an end, well or not.
    pub looks: u64,
    /// What nobody wants any more, and could not be given back yet.
    pub strays: VecDeque<Stray>,
}

impl Place {
    pub fn new(number: usize, id: String, agent: AgentClient, weather: Arc<Changes>, returns: Arc<Returns>) -> Self {
        let known = Known {
            breaker: Breaker::new(),
            desk: None,
            seen: None,
            response: None,
            asked_since: None,
            answered: None,
            error: None,
            health: None,
            in_flight: 0,
            requests: 0,
            granted: 0,
            looks: 0,
            strays: VecDeque::new(),
        };
        Self { number, id, agent, known: Mutex::new(known), weather, returns, look_now: Notify::new() }
    }

    pub fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing here panics while it holds the lock; if it did, what is known would still be of use.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can be asked now.
    pub fn is_usable(&self) -> bool {
        self.known().is_usable()
    }

    /// Tells those who wait for a change.
    pub fn tell_weather(&self) {
        self.weather.tell();
    }

    /// What it would be to a request; `None` where it has no room, or cannot be asked.
    pub fn candidate(&self, need: &Need<'_>, now: Instant) -> Option<Candidate> {
        let known = self.known();
        let seen = known.seen.as_ref().filter(|_| known.is_usable())?;
        let available = seen.room_for(need).saturating_sub(known.in_flight);
        (available >= need.gpus()).then(|| Candidate {
            place: self.number,
            total: seen.gpus.len(),
            available,
            response: known.response.unwrap_or_default(),
            share: known.breaker.share(now),
            is_suspect: known.is_suspect(now),
        })
    }

    /// Why it cannot be asked.
    pub fn trouble(&self) -> String {
        let known = self.known();
        match (&known.error, known.breaker.probe_at()) {
            (Some(error), Some(at)) => {
                let again = at.saturating_duration_since(Instant::now()).as_secs();
                format!("{error}; it is looked at again in {again} s")
            }
            (Some(error), None) => error.clone(),
            (None, _) => "it has not answered yet".into(),
        }
    }

    pub async fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<Lease, ClientError> {
        self.known().requests += 1;
        match self.desk() {
            Some(Desk::Books(books)) => books.request(body, key),
            _ => self.judged(self.agent.request_as(body, key)).await,
        }
    }

    pub async fn follow_all(&self, leases: &[u64], wait: Duration) -> Result<Followed, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => Ok(books.follow_all(leases, wait).await),
            _ => {
                let answer = self.agent.follow_all(leases, wait).await;
                // The wait is no measure of how fast it is.
                self.judge(None, answer.as_ref().err());
                answer
            }
        }
    }

    pub async fn confirm(&self, lease: u64, token: u64) -> Result<Lease, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => books.confirm(lease, token),
            _ => self.judged(self.agent.confirm(lease, token)).await,
        }
    }

    pub async fn renew(&self, lease: u64, token: u64) -> Result<Lease, ClientError> {
        self.judged(self.agent.renew(lease, token)).await
    }

    pub async fn release(&self, lease: u64) -> Result<Option<Lease>, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => Ok(books.release(lease)),
            _ => self.judged(self.agent.release(lease)).await,
        }
    }

    pub fn desk(&self) -> Option<Desk> {
        self.known().desk.clone()
    }

    /// Whether this client decides there.
    pub fn keeps_books(&self) -> bool {
        matches!(self.desk(), Some(Desk::Books(_)))
    }

    /// Keeps in mind what has to be given back when the endpoint answers again.
    pub fn remember(&self, stray: Stray) {
        let mut known = self.known();
        if known.strays.len() >= STRAYS {
            // The oldest has most likely ended by itself.
            known.strays.pop_front();
        }
        known.strays.push_back(stray);
    }

    /// A lease there was granted to this client, or is not held by it any more.
    pub fn count(&self, lease: &Lease, is_given: bool) {
        let mut known = self.known();
        known.granted += u64::from(is_given);
        if let Some(seen) = &mut known.seen {
            for device in &lease.devices {
                seen.count(device.gpu_id, device.fraction, device.memory_mib.unwrap_or(0), is_given);
            }
        }
    }

    /// The GPUs as they were last seen.
    pub fn gpus(&self) -> Vec<Gpu> {
        self.known().seen.as_ref().map(|seen| seen.gpus.clone()).unwrap_or_default()
    }

    async fn judged<T>(&self, asked: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        let began = Instant::now();
        let answer = asked.await;
        self.judge(Some(began), answer.as_ref().err());
        answer
    }

    /// Takes in how a question went; a refusal is an answer.
    pub fn judge(&self, began: Option<Instant>, error: Option<&ClientError>) {
        let now = Instant::now();
        let fault = error.filter(|error| is_fault(error));
        let mut known = self.known();
        let change = match fault {
            Some(error) => {
                known.error = Some(error.to_string());
                known.breaker.failed(now, random::fraction())
            }
            None => {
                known.error = None;
                known.answered = Some((now, SystemTime::now()));
                if let Some(began) = began {
                    known.took(now.duration_since(began));
                }
                known.breaker.succeeded(now)
            }
        };
        let desk = known.desk.clone();
        drop(known);
        match change {
            Change::None => return,
            Change::Opened => {
                tracing::warn!(endpoint_id = self.id, error = ?fault.map(ToString::to_string), "endpoint left alone");
                if let Some(Desk::Books(books)) = desk {
                    books.away();
                }
                // Its next look waits until it may be tried again.
                self.look_now.notify_one();
            }
            Change::Closed => tracing::info!(endpoint_id = self.id, "endpoint is back"),
        }
        self.tell_weather();
    }
}

impl Known {
    pub fn is_usable(&self) -> bool {
        self.desk.is_some() && self.breaker.is_closed()
    }

    /// Whether it failed last, or takes strangely long for an answer: asked only where nobody else can be.
    fn is_suspect(&self, now: Instant) -> bool {
        let is_late = self.asked_since.is_some_and(|since| now.duration_since(since) > SUSPECT_AFTER);
        is_late || self.breaker.failures_in_a_row() > 0
    }

    fn took(&mut self, took: Duration) {
        self.response = Some(match self.response {
            Some(before) => before.mul_f64(0.8) + took.mul_f64(0.2),
            None => took,
        });
    }
}

/// Whether an error says that the endpoint is not well; any other is an answer.
pub(super) fn is_fault(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } | ClientError::Timeout { .. } => true,
        ClientError::Problem(problem) => problem.status >= 500,
        // A page or half a body in place of an answer; a clear no of another server (401, 404) is one.
        ClientError::NotOurs { status, .. } => !(400..500).contains(status),
        _ => false,
    }
}
