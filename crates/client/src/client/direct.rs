//! A request on its way: what is wanted, by whom and until when; and asking the endpoints in turn for what they can grant at
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use gpupool_core::Request;
use tokio::time::{Instant, timeout};

use super::balance::Need;
use super::builder::Settings;
use super::place::{Place, Stray, give_back, is_fault};
use super::running::{Running, locked};
use super::seek::{Won, telling};
use super::status::StatusUpdate;
use crate::limits::{DIRECT_PATIENCE, RETRY_BUDGET, RETRY_COST, ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST};
use crate::random::Backoff;
use crate::{ClientError, IdempotencyKey, random};

/// What somebody wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// As it is sent to those who decide.
    pub body: Arc<RequestBody>,
    pub worker_id: Arc<str>,
    pub asked: Instant,
    pub deadline: Instant,
    /// Whether it waits its turn.
    pub queues: bool,
    is_blocked: bool,
}

impl Wanted {
    /// Fills in what the client is set up with, and refuses what no server would take.
    pub(super) fn new(mut body: RequestBody, settings: &Settings, places: usize) -> Result<Self, ClientError> {
        body.memory_threshold.get_or_insert(settings.memory_threshold);
        body.utilization_threshold.get_or_insert(settings.utilization_threshold);
        let worker_id = body.worker_id.get_or_insert_with(worker_id).clone();
        let asked = Instant::now();
        let limit = body.wait_limit_secs.take().map_or(Ok(settings.worker_timeout), |secs| {
            Duration::try_from_secs_f64(secs).map_err(|_| {
                ClientError::invalid("wait_limit_secs", &secs.to_string(), "a number of seconds that is not negative")
            })
        })?;
        let queues = body.queue.take().unwrap_or(true);
        if body.max_duration_secs.is_none() {
            body.max_duration_secs = settings.stale_age.map(|age| age.as_secs_f64());
        }
        body.wait_secs = None;
        body.hedged = places > 1;
        Request::try_from(body.clone())
            .map_err(|error| ClientError::invalid(error.field, &error.value, error.allowed))?;
        // Further off than anybody waits; an instant cannot be any time.
        let deadline = asked.checked_add(limit).unwrap_or(asked + Duration::from_secs(86_400 * 365));
        Ok(Self { body: Arc::new(body), worker_id, asked, deadline, queues, is_blocked: false })
    }

    /// The same, to be granted at once or not at all, and active at once.
    pub(super) fn at_once(&self) -> Arc<RequestBody> {
        Arc::new(RequestBody { queue: Some(false), hedged: false, ..(*self.body).clone() })
    }

    pub(super) fn too_long(&self) -> ClientError {
        ClientError::WaitedTooLong { worker_id: self.worker_id.to_string(), after: self.deadline - self.asked }
    }

    /// It waits; told once.
    pub(super) fn blocked(&mut self, running: &Running, place: usize) {
        if std::mem::replace(&mut self.is_blocked, true) {
            return;
        }
        let endpoint_id = running.places()[place].id.clone();
        tracing::info!(worker_id = %self.worker_id, endpoint_id, "worker blocked: it waits for a GPU");
        running.tell(StatusUpdate::Blocked { worker_id: self.worker_id.to_string() });
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }
}

/// A name that no other request of this process has, whichever client it is made by.
fn worker_id() -> Arc<str> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    format!("worker-{}-{number}", std::process::id()).into()
}

// Asking in turn takes one call where the first endpoint can grant it. Nothing is left behind where it is dropped half way: what may have been granted unheard is asked for once more under its
// key and given back.

/// What came of asking.
pub(super) enum Asked {
    Granted(Won),
    /// Nobody has room now; it may wait.
    Full(Option<ClientError>),
    /// Nobody will ever grant it, or nobody can be asked.
    Failed(ClientError),
}

/// Asks in the order of the strategy; faults lead to the next endpoint, and after the last to another round.
pub(super) async fn ask_in_turn(running: &Arc<Running>, wanted: &Wanted) -> Asked {
    let mut backoff = Backoff::between(ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST);
    let body = wanted.at_once();
    let mut rounds = 0;
    loop {
        let failed = match ask_round(running, &body).await {
            Ok(asked) => return asked,
            Err(error) => error,
        };
        rounds += 1;
        let may_go_on = rounds <= running.core.settings.max_retries && running.core.is_any_usable();
        if !may_go_on || !locked(&running.core.budget).spend() {
            return Asked::Failed(failed);
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

/// Asks each endpoint once. An error means that every endpoint that could have granted it failed.
async fn ask_round(running: &Arc<Running>, body: &Arc<RequestBody>) -> Result<Asked, ClientError> {
    let order = match order(running, body) {
        Some(order) if order.is_empty() => return Ok(Asked::Full(None)),
        Some(order) => order,
        None => return Ok(Asked::Failed(running.unavailable())),
    };
    let (mut full, mut refused, mut fault) = (None, None, None);
    for (nth, number) in order.iter().enumerate() {
        let place = &running.places()[*number];
        let is_last = nth + 1 == order.len();
        let since = Instant::now();
        match ask_one(running, place, body, is_last).await {
            Ok(lease) => {
                if nth > 0 {
                    locked(&running.core.balancer).moved(order[0], *number);
                }
                let lease = Box::new(lease);
                return Ok(Asked::Granted(Won { place: place.clone(), lease, since, was_blocked: false }));
            }
            Err(error) if error.code() == Some("no_capacity") => {
                // It was thought to have room. Where a single agent decides, it was not asked because of that.
                if running.places().len() > 1 || place.keeps_books() {
                    place.look_now.notify_one();
                }
                full = Some(error);
            }
            Err(error) if is_fault(&error) || error.is_transient() => fault = Some(error),
            Err(error) => refused = [refused, Some(error)].into_iter().flatten().max_by_key(telling),
        }
    }
    match (full, refused, fault) {
        (Some(full), ..) => Ok(Asked::Full(Some(full))),
        // The others may grant it once they are asked: they are waited for.
        (None, Some(_), _) if order.len() < running.places().len() => Ok(Asked::Full(None)),
        (None, Some(refused), _) => Ok(Asked::Failed(refused)),
        (None, None, Some(fault)) => Err(fault),
        (None, None, None) => Ok(Asked::Full(None)),
    }
}

/// Whom to ask, best first; `None` where nobody can be asked.
fn order(running: &Running, body: &RequestBody) -> Option<Vec<usize>> {
    if let [only] = running.places() {
        // Nobody knows better than itself whether it has room.
        return only.is_usable().then(|| vec![0]);
    }
    let (need, now) = (Need::of(body), Instant::now());
    let candidates: Vec<_> = running.places().iter().filter_map(|place| place.candidate(&need, now)).collect();
    if candidates.is_empty() {
        return running.core.is_any_usable().then(Vec::new);
    }
    Some(locked(&running.core.balancer).order(candidates, random::fraction))
}

async fn ask_one(
    running: &Running,
    place: &Arc<Place>,
    body: &Arc<RequestBody>,
    is_last: bool,
) -> Result<LeaseBody, ClientError> {
    let key = IdempotencyKey::random();
    let mut flight = Flight::begin(running, place, body, &key);
    let asked = place.request(body, &key);
    let answer = if is_last {
        asked.await
    } else {
        // Where another one can grant it as well, one that hangs is not waited for.
        timeout(DIRECT_PATIENCE, asked).await.unwrap_or_else(|_| Err(place.agent.timeout(DIRECT_PATIENCE)))
    };
    match answer {
        Ok(lease) if lease.state == LeaseState::Active => {
            flight.is_landed = true;
            Ok(lease)
        }
        // Granted and over already, or a server that knows nothing of `queue: false`.
        Ok(lease) => Err(ClientError::Ended(Box::new(lease))),
        Err(error) => {
            flight.is_landed = !is_fault(&error);
            if matches!(&error, ClientError::Timeout { after, .. } if *after == DIRECT_PATIENCE) {
                place.judge(None, Some(&error));
            }
            Err(error)
        }
    }
}

/// A request on its way: what may come of it unheard is given back.
struct Flight<'a> {
    running: &'a Running,
    place: &'a Arc<Place>,
    body: &'a Arc<RequestBody>,
    key: &'a IdempotencyKey,
    /// Its fate is known.
    is_landed: bool,
}

impl<'a> Flight<'a> {
    fn begin(running: &'a Running, place: &'a Arc<Place>, body: &'a Arc<RequestBody>, key: &'a IdempotencyKey) -> Self {
        place.known().in_flight += 1;
        Self { running, place, body, key, is_landed: false }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut known = self.place.known();
        known.in_flight = known.in_flight.saturating_sub(1);
        drop(known);
        if !self.is_landed {
            give_back(&self.running.runtime, self.place, Stray::Asked(self.body.clone(), self.key.clone()));
        }
    }
}

// How much trying again a client allows itself: a part of what it asks anyway, so that servers in trouble are not asked
// more than servers that are well.

/// What is left for trying again, counted in requests.
#[derive(Debug)]
pub(super) struct RetryBudget {
    left: u32,
}

impl RetryBudget {
    pub(super) fn new() -> Self {
        Self { left: RETRY_BUDGET * RETRY_COST }
    }

    /// Something new was asked: a part of a retry is earned.
    pub(super) fn earn(&mut self) {
        self.left = (self.left + 1).min(RETRY_BUDGET * RETRY_COST);
    }

    /// Whether trying again once more is allowed; if so, it is taken.
    pub(super) fn spend(&mut self) -> bool {
        let left = self.left.checked_sub(RETRY_COST);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_end_when_they_outgrow_what_is_asked() {
        let mut budget = RetryBudget::new();
        let at_once = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(at_once, RETRY_BUDGET as usize);
        (0..100).for_each(|_| budget.earn());
        let earned = (0..1_000).filter(|_| budget.spend()).count();
        assert_eq!(earned, 100 / RETRY_COST as usize);
    }
}
