//! Asking the endpoints in turn for what they can grant at once: one call where the first one can.
//!
//! Nothing is left behind where it is dropped half way: what may have been granted unheard is asked for once more under its
//! key and given back.

use std::sync::Arc;

use gpupool_api::RequestBody;
use gpupool_api::lease::{Lease, State};
use tokio::time::{Instant, timeout};

use super::capacity::Need;
use super::place::{Place, is_fault};
use super::running::{Running, locked};
use super::seek::{Won, telling};
use super::stray::{Stray, give_back};
use super::wanted::Wanted;
use crate::backoff::Backoff;
use crate::limits::{DIRECT_PATIENCE, ROUND_PAUSE_FIRST, ROUND_PAUSE_MOST};
use crate::{ClientError, IdempotencyKey, random};

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
            Round::Over(asked) => return asked,
            Round::Faults(error) => error,
        };
        rounds += 1;
        let may_go_on = rounds <= running.core.settings.max_retries && running.core.is_any_usable();
        if !may_go_on || !locked(&running.core.budget).spend() {
            return Asked::Failed(failed);
        }
        tokio::time::sleep(backoff.next()).await;
    }
}

enum Round {
    Over(Asked),
    /// Every endpoint that could have granted it failed.
    Faults(ClientError),
}

async fn ask_round(running: &Arc<Running>, body: &Arc<RequestBody>) -> Round {
    let order = match order(running, body) {
        Some(order) if order.is_empty() => return Round::Over(Asked::Full(None)),
        Some(order) => order,
        None => return Round::Over(Asked::Failed(running.unavailable())),
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
                return Round::Over(Asked::Granted(Won { place: place.clone(), lease, since, was_blocked: false }));
            }
            Err(error) if error.code() == Some("no_capacity") => {
                // It was thought to have room.
                place.look_now.notify_one();
                full = Some(error);
            }
            Err(error) if is_fault(&error) || error.is_passing() => fault = Some(error),
            Err(error) => refused = [refused, Some(error)].into_iter().flatten().max_by_key(telling),
        }
    }
    match (full, refused, fault) {
        (Some(full), ..) => Round::Over(Asked::Full(Some(full))),
        // The others may grant it once they are asked: they are waited for.
        (None, Some(_), _) if order.len() < running.places().len() => Round::Over(Asked::Full(None)),
        (None, Some(refused), _) => Round::Over(Asked::Failed(refused)),
        (None, None, Some(fault)) => Round::Faults(fault),
        (None, None, None) => Round::Over(Asked::Full(None)),
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
) -> Result<Lease, ClientError> {
    let key = IdempotencyKey::random();
    let mut flight = Flight::begin(running, place, body, &key);
    let asked = place.request(body, &key);
    let answer = if is_last {
        asked.await
    } else {
        // Where another one can grant it as well, one that hangs is not waited for.
        match timeout(DIRECT_PATIENCE, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(place.agent.timeout(DIRECT_PATIENCE)),
        }
    };
    match answer {
        Ok(lease) if lease.state == State::Active => {
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
