//! Waiting at every endpoint at once, such that at most one lease ever becomes active.
//!
//! The request has a place in each endpoint's queue. What an endpoint grants comes as an offer, which is nothing until it is
//! confirmed; one confirmation is under way at a time, and its fate is known before another is sent. The other places are
//! given up then, so what they were offered goes to the head of their own queues. The task ends with its request: granted,
//! told why not, or not wanted any more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpupool_api::lease::{Lease, State};
use gpupool_core::limits::OFFER_HELD;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::line::{News, Order, Waiter, What};
use super::place::{Place, is_fault};
use super::returns::UnderWay;
use super::running::{self, Running, at, told};
use super::stray::{Stray, give_back};
use super::turns::Turn;
use super::wanted::Wanted;
use crate::ClientError;
use crate::backoff::Backoff;
use crate::limits::{AWAY, CONFIRM_PATIENCE, LINE_PAUSE_FIRST, LINE_PAUSE_MOST, SLOWEST_CLOCK};

/// What was granted, and where.
#[derive(Debug)]
pub(super) struct Won {
    pub place: Arc<Place>,
    pub lease: Box<Lease>,
    /// Since when it may have lived: its first ttl counts from here.
    pub since: Instant,
    /// Whether it was told that it waits.
    pub was_blocked: bool,
}

pub(super) type Sought = Result<Won, ClientError>;

/// Waits in a task of its own, so that whoever asked may go at any instant.
pub(super) async fn seek(running: &Arc<Running>, wanted: Wanted, turn: Turn) -> Sought {
    let (tell, told) = oneshot::channel();
    let (deadline, too_long) = (wanted.deadline, wanted.too_long());
    let stopped = ClientError::NotStarted { doing: "requesting GPU" };
    let mut stopping = running.stopping();
    let seeker = Seeker::enter(running.clone(), wanted);
    // It is in line: whoever came later may enter.
    drop(turn);
    running.runtime.spawn(async move { seeker.seek(tell).await });
    // The task may be waiting for the fate of a confirmation, which nobody else has to wait for.
    tokio::select! {
        biased;
        sought = told => sought.unwrap_or(Err(stopped)),
        () = running::told(&mut stopping) => Err(stopped),
        () = tokio::time::sleep_until(deadline) => Err(too_long),
    }
}

struct Seeker {
    running: Arc<Running>,
    wanted: Wanted,
    id: u64,
    news: mpsc::UnboundedReceiver<News>,
    refused: BTreeMap<usize, ClientError>,
    /// Offers that came while another one was being confirmed.
    offers: VecDeque<(usize, Lease, Instant)>,
    /// Since when no endpoint can be asked.
    away: Option<Instant>,
    /// Until it has left every queue.
    _under_way: UnderWay,
}

impl Seeker {
    fn enter(running: Arc<Running>, wanted: Wanted) -> Self {
        let (tell, news) = mpsc::unbounded_channel();
        // Under one lock, so that two requests have the same order in every queue.
        let id = running.enter(|id| Waiter { id, body: wanted.body.clone(), tell: tell.clone() });
        let _under_way = running.core.returns.begin();
        Self { running, wanted, id, news, refused: BTreeMap::new(), offers: VecDeque::new(), away: None, _under_way }
    }

    async fn seek(mut self, mut tell: oneshot::Sender<Sought>) {
        let mut weather = self.running.weather();
        let mut stopping = self.running.stopping();
        let sought = loop {
            if let Some((place, lease, since)) = self.offers.pop_front() {
                let settled = tokio::select! {
                    biased;
                    // Whatever comes of the confirmation is given back with the place.
                    () = tell.closed() => return self.leave(None),
                    settled = self.settle(place, lease, since) => settled,
                };
                match settled {
                    Some(won) => break Ok(won),
                    None => continue,
                }
            }
            weather.mark_seen();
            self.away = if self.is_hopeful() { None } else { self.away.or_else(|| Some(Instant::now())) };
            let given_up = self.away.map(|since| since + AWAY);
            tokio::select! {
                biased;
                () = tell.closed() => return self.leave(None),
                () = told(&mut stopping) => break Err(ClientError::NotStarted { doing: "requesting GPU" }),
                news = self.news.recv() => match news {
                    Some(news) => self.hear(news),
                    None => break Err(ClientError::NotStarted { doing: "requesting GPU" }),
                },
                () = tokio::time::sleep_until(self.wanted.deadline) => break Err(self.wanted.too_long()),
                () = at(given_up) => break Err(self.running.unavailable()),
                () = weather.changed() => {}
            }
            if self.refused.len() == self.running.places().len() {
                break Err(self.refusal());
            }
        };
        let winner = sought.as_ref().ok().map(|won| won.place.number);
        self.leave(winner);
        if let Err(Ok(won)) = tell.send(sought) {
            give_back(&self.running.runtime, &won.place, Stray::Lease(won.lease.id));
        }
    }

    fn hear(&mut self, News { place, what }: News) {
        match what {
            What::Waits => self.wanted.blocked(&self.running, place),
            What::Granted(lease, since) => self.offers.push_back((place, *lease, since)),
            What::Refused(error) => {
                self.refused.insert(place, error);
            }
        }
    }

    /// Takes an offer, or learns that it cannot be taken; not done before one of both is certain.
    async fn settle(&mut self, number: usize, offered: Lease, since: Instant) -> Option<Won> {
        let place = self.running.places()[number].clone();
        let Some(token) = offered.token else { return self.again(number) };
        let ttl = Duration::try_from_secs_f64(offered.ttl_secs).unwrap_or(AWAY);
        let is_offer = offered.state == State::Offered;
        if !is_offer && (place.keeps_books() || since.elapsed() < ttl / 3) {
            return Some(self.won(place, offered, since));
        }
        let began = Instant::now();
        let mut backoff = Backoff::between(LINE_PAUSE_FIRST, LINE_PAUSE_MOST);
        let certain = began + over_after(ttl);
        loop {
            let sent = Instant::now();
            let taken = match is_offer {
                true => timeout(CONFIRM_PATIENCE, place.confirm(offered.id, token)).await,
                // Active for longer than can be told: only a renewal says whether it still is.
                false => timeout(CONFIRM_PATIENCE, place.renew(offered.id, token)).await,
            };
            match taken {
                Ok(Ok(lease)) if lease.state == State::Active => {
                    // A confirmation that was sent again may have worked the first time.
                    return Some(self.won(place, lease, if is_offer { began } else { sent }));
                }
                Ok(Ok(lease)) if lease.state.is_ended() => break,
                Ok(Err(error)) if is_gone(&error) => {
                    tracing::debug!(endpoint_id = place.id, %error, "an offer could not be taken");
                    break;
                }
                _ if Instant::now() >= certain => {
                    give_back(&self.running.runtime, &place, Stray::Lease(offered.id));
                    break;
                }
                _ => backoff.pause_until(certain).await,
            }
        }
        self.again(number)
    }

    fn again(&self, number: usize) -> Option<Won> {
        self.running.order(number, Order::Again(self.id));
        None
    }

    fn won(&self, place: Arc<Place>, lease: Lease, since: Instant) -> Won {
        Won { place, lease: Box::new(lease), since, was_blocked: self.wanted.is_blocked() }
    }

    /// Whether any endpoint can be asked that has not said no.
    fn is_hopeful(&self) -> bool {
        let places = self.running.places().iter();
        places.filter(|place| !self.refused.contains_key(&place.number)).any(|place| place.is_usable())
    }

    /// The most telling of all refusals: one about the request itself.
    fn refusal(&mut self) -> ClientError {
        let refused = std::mem::take(&mut self.refused);
        refused.into_values().max_by_key(telling).unwrap_or_else(|| self.running.unavailable())
    }

    /// Gives up every place but the winner's.
    fn leave(&mut self, winner: Option<usize>) {
        self.running.leave(self.id, winner);
    }
}

impl Drop for Seeker {
    fn drop(&mut self) {
        // The runtime ends with the task half done: the lines end too, and the servers forget who does not ask.
        self.running.leave(self.id, None);
    }
}

/// After how long an offer is over whatever became of its confirmation: it may arrive as long as the offer is held, then the
/// lease lives for its ttl; by a clock that may be slower than this one.
fn over_after(ttl: Duration) -> Duration {
    (Duration::from_millis(OFFER_HELD.0) + ttl).mul_f64(SLOWEST_CLOCK)
}

/// Whether the endpoint says for certain that a lease is not held.
fn is_gone(error: &ClientError) -> bool {
    matches!(error.code(), Some("ended" | "stale" | "unknown_lease" | "not_granted"))
}

/// How much a refusal says about what was asked for.
pub(super) fn telling(error: &ClientError) -> u8 {
    match error.code() {
        Some("invalid" | "unsatisfiable" | "policy") => 3,
        Some(_) => 2,
        None if is_fault(error) => 0,
        None => 1,
    }
}
