//! One endpoint: who decides there, what it was last seen to have, and whether it can be asked now.
//!
//! What is known lies behind a lock, because status calls are synchronous and answer from it; it is never held across an
//! await. Who decides is learned once: a server that said it decides is never kept books beside.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseBody};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::balance::{Candidate, Need, ObservedGpu, Seen};
use super::books::Books;
use super::running::{Changes, Returns};
use crate::limits::{
    BREAKER_FAILURES, BREAKER_FIRST, BREAKER_GROWTH, BREAKER_MOST, BREAKER_SUCCESSES, RETURN_FIRST_SHARE, RETURN_TIME,
    STRAYS, SUSPECT_AFTER,
};
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
#[derive(Debug, Default)]
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
    pub(super) fn new(
        number: usize,
        id: String,
        agent: AgentClient,
        weather: Arc<Changes>,
        returns: Arc<Returns>,
    ) -> Self {
        Self { number, id, agent, known: Mutex::default(), weather, returns, look_now: Notify::new() }
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing here panics while it holds the lock; if it did, what is known would still be of use.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can be asked now.
    pub(super) fn is_usable(&self) -> bool {
        self.known().is_usable()
    }

    /// Tells those who wait for a change.
    pub(super) fn tell_weather(&self) {
        self.weather.tell();
    }

    /// What it would be to a request; `None` where it has no room, or cannot be asked.
    pub(super) fn candidate(&self, need: &Need<'_>, now: Instant) -> Option<Candidate> {
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
    pub(super) fn trouble(&self) -> String {
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

    pub(super) async fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        self.known().requests += 1;
        match self.desk() {
            Some(Desk::Books(books)) => books.request(body, key),
            _ => self.judged(self.agent.request_as(body, key)).await,
        }
    }

    pub(super) async fn follow_leases(&self, leases: &[u64], wait: Duration) -> Result<FollowResponse, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => Ok(books.follow_leases(leases, wait).await),
            _ => {
                let answer = self.agent.follow_leases(leases, wait).await;
                // The wait is no measure of how fast it is.
                self.judge(None, answer.as_ref().err());
                answer
            }
        }
    }

    pub(super) async fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => books.confirm(lease, token),
            _ => self.judged(self.agent.confirm(lease, token)).await,
        }
    }

    pub(super) async fn renew(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.judged(self.agent.renew(lease, token)).await
    }

    pub(super) async fn release(&self, lease: u64) -> Result<Option<LeaseBody>, ClientError> {
        match self.desk() {
            Some(Desk::Books(books)) => Ok(books.release(lease)),
            _ => self.judged(self.agent.release(lease)).await,
        }
    }

    pub(super) fn desk(&self) -> Option<Desk> {
        self.known().desk.clone()
    }

    /// Whether this client decides there.
    pub(super) fn keeps_books(&self) -> bool {
        matches!(self.desk(), Some(Desk::Books(_)))
    }

    /// Keeps in mind what has to be given back when the endpoint answers again.
    pub(super) fn remember(&self, stray: Stray) {
        let mut known = self.known();
        if known.strays.len() >= STRAYS {
            // The oldest has most likely ended by itself.
            known.strays.pop_front();
        }
        known.strays.push_back(stray);
    }

    /// A lease there was granted to this client, or is not held by it any more.
    pub(super) fn count(&self, lease: &LeaseBody, is_given: bool) {
        let mut known = self.known();
        known.granted += u64::from(is_given);
        if let Some(seen) = &mut known.seen {
            for device in &lease.devices {
                seen.count(device.gpu_id, device.fraction, device.memory_mib.unwrap_or(0), is_given);
            }
        }
    }

    /// The GPUs as they were last seen.
    pub(super) fn gpus(&self) -> Vec<ObservedGpu> {
        self.known().seen.as_ref().map(|seen| seen.gpus.clone()).unwrap_or_default()
    }

    async fn judged<T>(&self, asked: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        let began = Instant::now();
        let answer = asked.await;
        self.judge(Some(began), answer.as_ref().err());
        answer
    }

    /// Takes in how a question went; a refusal is an answer.
    pub(super) fn judge(&self, began: Option<Instant>, error: Option<&ClientError>) {
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
    pub(super) fn is_usable(&self) -> bool {
        self.desk.is_some() && self.breaker.is_closed()
    }

    /// Whether it failed last, or takes strangely long for an answer: asked only where nobody else can be.
    fn is_suspect(&self, now: Instant) -> bool {
        let is_late = self.asked_since.is_some_and(|since| now.duration_since(since) > SUSPECT_AFTER);
        is_late || self.breaker.failures_in_a_row > 0
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

// What an endpoint may hold for this client though nobody wants it: taken back now, or when the endpoint answers again.
//
// Where only the key of a request is known, it is asked once more under that key and then released: the same request is
// the same lease, and one that never arrived cannot arrive later.

/// Something nobody wants any more.
#[derive(Debug, Clone)]
pub(super) enum Stray {
    /// A lease, waiting or granted.
    Lease(u64),
    /// A request whose answer is not known.
    Asked(Arc<RequestBody>, IdempotencyKey),
}

/// Gives something back, in the background.
pub(super) fn give_back(runtime: &Handle, place: &Arc<Place>, stray: Stray) {
    let (place, under_way) = (place.clone(), place.returns.begin());
    // Ends when the endpoint answered or did not in time; stopping the client waits for it.
    runtime.spawn(async move {
        take_back(&place, stray).await;
        drop(under_way);
    });
}

/// Gives back what could not be before: the endpoint answers again.
pub(super) async fn give_back_remembered(place: &Place) {
    loop {
        let Some(stray) = place.known().strays.pop_front() else { return };
        if !take_back(place, stray).await {
            return;
        }
    }
}

/// Whether it worked; what did not is remembered.
async fn take_back(place: &Place, stray: Stray) -> bool {
    let mut unless_done = Remembered { place, stray: Some(stray.clone()) };
    let released = match &stray {
        Stray::Lease(lease) => place.release(*lease).await.map(|_| ()),
        Stray::Asked(body, key) => release_asked(place, body, key).await,
    };
    match released {
        Err(error) if is_fault(&error) || error.is_transient() => {
            tracing::debug!(endpoint_id = place.id, %error, ?stray, "not given back yet");
            return false;
        }
        Err(error) => tracing::debug!(endpoint_id = place.id, %error, "nothing to give back"),
        Ok(()) => {}
    }
    unless_done.stray = None;
    true
}

/// Remembers what was not given back, also where the giving back is given up half way.
struct Remembered<'a> {
    place: &'a Place,
    stray: Option<Stray>,
}

impl Drop for Remembered<'_> {
    fn drop(&mut self) {
        if let Some(stray) = self.stray.take() {
            self.place.remember(stray);
        }
    }
}

async fn release_asked(place: &Place, body: &RequestBody, key: &IdempotencyKey) -> Result<(), ClientError> {
    // As one that waits: refused for want of room it would leave nothing under its key, and could still arrive later. As an
    // offer: granted here, it must not become active.
    let body = RequestBody { queue: None, hedged: true, ..body.clone() };
    let lease = place.request(&body, key).await?;
    place.release(lease.id).await.map(|_| ())
}

// When an endpoint that fails is left alone, when it is tried again, and how its share of the work comes back.
//
// Closed: it is asked. Open: it is not, until its time is up. Half-open: it is looked at, and asked again once it answered
// twice. Knows no clock and no chance of its own.

/// What became of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing that matters to others.
    None,
    /// It is left alone from now on.
    Opened,
    /// It is asked again.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum State {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    HalfOpen {
        successes: u32,
    },
}

/// Keeps count of one endpoint's successes and failures.
#[derive(Debug, Clone, Default)]
pub(super) struct Breaker {
    state: State,
    /// Failures since the last success.
    pub failures_in_a_row: u32,
    /// Times it opened, each soon after the one before.
    openings: u32,
    /// When it was closed again.
    returned: Option<Instant>,
    /// Successes since the start.
    pub successes: u64,
    /// Failures since the start.
    pub failures: u64,
}

impl Breaker {
    /// Whether the endpoint may be asked.
    pub(super) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// When it is to be looked at again, where it is left alone.
    pub(super) fn probe_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed | State::HalfOpen { .. } => None,
        }
    }

    /// It is being looked at: its time is up, or somebody wants it.
    pub(super) fn begin_probe(&mut self) {
        if let State::Open { .. } = self.state {
            self.state = State::HalfOpen { successes: 0 };
        }
    }

    /// It answered.
    pub(super) fn succeeded(&mut self, now: Instant) -> Change {
        self.successes += 1;
        match self.state {
            State::Closed => self.failures_in_a_row = 0,
            // The answer to a question from before it was left alone.
            State::Open { .. } => {}
            State::HalfOpen { successes } if successes + 1 < BREAKER_SUCCESSES => {
                self.state = State::HalfOpen { successes: successes + 1 };
            }
            State::HalfOpen { .. } => {
                self.state = State::Closed;
                self.failures_in_a_row = 0;
                self.returned = Some(now);
                return Change::Closed;
            }
        }
        Change::None
    }

    /// It failed. `chance` in 0..1 spreads the times at which many clients come back.
    pub(super) fn failed(&mut self, now: Instant, chance: f64) -> Change {
        self.failures += 1;
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        let opens = match self.state {
            State::Closed => self.failures_in_a_row >= BREAKER_FAILURES,
            State::Open { .. } => false,
            State::HalfOpen { .. } => true,
        };
        if !opens {
            return Change::None;
        }
        let was_closed = self.is_closed();
        let is_soon = !was_closed || self.returned.is_some_and(|at| now.duration_since(at) < RETURN_TIME);
        self.openings = if is_soon { self.openings.saturating_add(1) } else { 1 };
        self.state = State::Open { until: now + pause(self.openings, chance) };
        if was_closed { Change::Opened } else { Change::None }
    }

    /// How much of its share of the work an endpoint gets that has just come back, 0..=1.
    pub(super) fn share(&self, now: Instant) -> f64 {
        let Some(returned) = self.returned else { return 1.0 };
        let part = now.duration_since(returned).as_secs_f64() / RETURN_TIME.as_secs_f64();
        (RETURN_FIRST_SHARE + part * (1.0 - RETURN_FIRST_SHARE)).min(1.0)
    }

    /// The name of the state it is in.
    pub(super) fn state_name(&self) -> &'static str {
        match self.state {
            State::Closed => "closed",
            State::Open { .. } => "open",
            State::HalfOpen { .. } => "half_open",
        }
    }
}

/// How long the endpoint is left alone: from nine to eleven tenths of what its openings come to.
fn pause(openings: u32, chance: f64) -> Duration {
    let grown = BREAKER_GROWTH.powi(i32::try_from(openings.saturating_sub(1)).unwrap_or(i32::MAX));
    let pause = (BREAKER_FIRST.as_secs_f64() * grown).min(BREAKER_MOST.as_secs_f64());
    Duration::from_secs_f64((pause * (0.9 + chance / 5.0)).min(BREAKER_MOST.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        let changes: Vec<Change> = (0..BREAKER_FAILURES).map(|_| breaker.failed(now, 0.5)).collect();
        assert_eq!(changes, [Change::None, Change::None, Change::Opened]);
        breaker
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_a_success_between_does_not() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            breaker.failed(now, 0.5);
            breaker.failed(now, 0.5);
            assert_eq!(breaker.succeeded(now), Change::None);
        }
        assert!(breaker.is_closed());
        assert_eq!(opened(now).probe_at(), Some(now + BREAKER_FIRST));
    }

    #[test]
    fn it_closes_after_two_successes_and_its_share_comes_back_step_by_step() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert_eq!(breaker.succeeded(now), Change::None, "an answer from before says nothing");
        breaker.begin_probe();
        assert_eq!((breaker.succeeded(now), breaker.is_closed()), (Change::None, false));
        assert_eq!((breaker.succeeded(now), breaker.is_closed()), (Change::Closed, true));
        assert!((breaker.share(now) - RETURN_FIRST_SHARE).abs() < 1e-9);
        let half = breaker.share(now + RETURN_TIME / 2);
        assert!(half > RETURN_FIRST_SHARE && half < 1.0);
        assert_eq!(breaker.share(now + RETURN_TIME), 1.0);
    }

    #[test]
    fn it_stays_away_longer_each_time_up_to_a_bound_and_forgets_after_a_good_time() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            now = breaker.probe_at().unwrap();
            breaker.begin_probe();
            assert_eq!(breaker.failed(now, 0.5), Change::None);
            pauses.push(breaker.probe_at().unwrap() - now);
        }
        assert_eq!(pauses[0], BREAKER_FIRST.mul_f64(1.5));
        assert!(pauses.windows(2).all(|pair| pair[1] >= pair[0]));
        assert_eq!(pauses[9], BREAKER_MOST);
        breaker.begin_probe();
        breaker.succeeded(now);
        breaker.succeeded(now);
        now += RETURN_TIME;
        for _ in 0..BREAKER_FAILURES {
            breaker.failed(now, 0.5);
        }
        assert_eq!(breaker.probe_at(), Some(now + BREAKER_FIRST));
    }

    proptest! {
        #[test]
        fn whatever_happens_it_is_left_alone_for_a_bounded_time_and_can_always_come_back(
            steps in prop::collection::vec((0_u8..3, 0_u64..200, 0.0_f64..1.0), 0..200),
        ) {
            let mut now = Instant::now();
            let mut breaker = Breaker::default();
            for (step, secs, chance) in steps {
                now += Duration::from_secs(secs);
                let was_closed = breaker.is_closed();
                let change = match step {
                    0 => breaker.succeeded(now),
                    1 => breaker.failed(now, chance),
                    _ => { breaker.begin_probe(); Change::None }
                };
                prop_assert_eq!(change == Change::Opened, was_closed && !breaker.is_closed());
                prop_assert_eq!(change == Change::Closed, !was_closed && breaker.is_closed());
                if let Some(at) = breaker.probe_at() {
                    prop_assert!(at <= now + BREAKER_MOST);
                }
                prop_assert!((RETURN_FIRST_SHARE..=1.0).contains(&breaker.share(now)));
            }
            breaker.begin_probe();
            for _ in 0..BREAKER_SUCCESSES {
                breaker.succeeded(now);
            }
            prop_assert!(breaker.is_closed());
        }
    }
}
