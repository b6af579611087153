//! Waiting at every endpoint at once, such that at most one lease ever becomes active.
//!
//! The request has a place in each endpoint's queue. What an endpoint grants comes as an offer, which is nothing until it is
//! confirmed; one confirmation is under way at a time, and its fate is known before another is sent. The other places are
//! given up then, so what they were offered goes to the head of their own queues. The task ends with its request: granted,
//! told why not, or not wanted any more.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseBody, LeaseState};
use gpupool_core::limits::OFFER_LIFETIME;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use super::direct::Wanted;
use super::place::{Place, Stray, give_back, is_fault};
use super::running::{Admission, Follower, Running, Turn, UnderWay, at};
use crate::limits::{AGENT_AWAY_LIMIT, CONFIRM_PATIENCE, FOLLOW_WAIT, FOLLOWED_AT_ONCE, SLOWEST_CLOCK};
use crate::random::Backoff;
use crate::{ClientError, IdempotencyKey};

/// What was granted, and where.
#[derive(Debug)]
pub(super) struct Won {
    pub place: Arc<Place>,
    pub lease: Box<LeaseBody>,
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
    let admission = tokio::select! {
        biased;
        admission = running.admit() => admission,
        () = stopping.changed() => return Err(stopped),
        () = tokio::time::sleep_until(deadline) => return Err(too_long),
    };
    let seeker = Seeker::enter(running.clone(), wanted, admission);
    // It is in line: whoever came later may enter.
    drop(turn);
    // Ends with the request: `seek` sees that the receiver is gone.
    running.runtime.spawn(async move { seeker.seek(tell).await });
    // The task may be waiting for the fate of a confirmation, which nobody else has to wait for.
    tokio::select! {
        biased;
        sought = told => sought.unwrap_or(Err(stopped)),
        () = stopping.changed() => Err(stopped),
        () = tokio::time::sleep_until(deadline) => Err(too_long),
    }
}

struct Seeker {
    running: Arc<Running>,
    wanted: Wanted,
    id: u64,
    news: mpsc::Receiver<News>,
    admission: Admission,
    refused: BTreeMap<usize, ClientError>,
    /// Offers that came while another one was being confirmed.
    offers: VecDeque<(usize, LeaseBody, Instant)>,
    /// Since when no endpoint can be asked.
    away: Option<Instant>,
    /// Until it has left every queue.
    _under_way: UnderWay,
}

impl Seeker {
    fn enter(running: Arc<Running>, wanted: Wanted, admission: Admission) -> Self {
        // Room for all there can be: a line that tells of something never waits, whatever this waits for.
        let (tell, news) = mpsc::channel(NEWS_OF_A_LINE * running.places().len().max(1));
        // Under one lock, so that two requests have the same order in every queue.
        let waiter = |id| Waiter { id, body: wanted.body.clone(), tell: tell.clone(), _admission: admission.clone() };
        let id = running.enter(waiter);
        let _under_way = running.core.returns.begin();
        let (refused, offers) = (BTreeMap::new(), VecDeque::new());
        Self { running, wanted, id, news, admission, refused, offers, away: None, _under_way }
    }

    async fn seek(mut self, mut tell: oneshot::Sender<Sought>) {
        let mut weather = self.running.core.weather.follow();
        let mut stopping = self.running.stopping();
        let sought = loop {
            if let Some((place, lease, since)) = self.offers.pop_front() {
                let settled = tokio::select! {
                    biased;
                    // Whatever comes of the confirmation is given back with the place.
                    () = tell.closed() => return,
                    settled = self.settle(place, lease, since) => settled,
                };
                match settled {
                    Some(won) => break Ok(won),
                    None => continue,
                }
            }
            weather.mark_seen();
            self.away = if self.is_hopeful() { None } else { self.away.or_else(|| Some(Instant::now())) };
            let given_up = self.away.map(|since| since + AGENT_AWAY_LIMIT);
            tokio::select! {
                biased;
                () = tell.closed() => return,
                () = stopping.changed() => break Err(ClientError::NotStarted { doing: "requesting GPU" }),
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
        self.running.leave(self.id, winner, &self.admission);
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
    async fn settle(&mut self, number: usize, offered: LeaseBody, since: Instant) -> Option<Won> {
        let place = self.running.places()[number].clone();
        let Some(token) = offered.token else { return self.again(number) };
        let ttl = Duration::try_from_secs_f64(offered.ttl_secs).unwrap_or(AGENT_AWAY_LIMIT);
        let is_offer = offered.state == LeaseState::Offered;
        if !is_offer && (place.keeps_books() || since.elapsed() < ttl / 3) {
            return Some(self.won(place, offered, since));
        }
        let began = Instant::now();
        let mut backoff = Backoff::default();
        let certain = began + over_after(ttl);
        loop {
            let sent = Instant::now();
            let taken = match is_offer {
                true => timeout(CONFIRM_PATIENCE, place.confirm(offered.id, token)).await,
                // Active for longer than can be told: only a renewal says whether it still is.
                false => timeout(CONFIRM_PATIENCE, place.renew(offered.id, token)).await,
            };
            match taken {
                Ok(Ok(lease)) if lease.state == LeaseState::Active => {
                    // A confirmation that was sent again may have worked the first time.
                    return Some(self.won(place, lease, if is_offer { began } else { sent }));
                }
                Ok(Ok(lease)) if lease.state.is_ended() => break,
                Ok(Err(error)) if error.is_lease_lost() => {
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

    fn won(&self, place: Arc<Place>, lease: LeaseBody, since: Instant) -> Won {
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
}

impl Drop for Seeker {
    fn drop(&mut self) {
        // It is not wanted any more, or the runtime ends with the task half done: then the lines end too, and the servers
        // forget requests that are not asked for.
        self.running.leave(self.id, None, &self.admission);
    }
}

/// After how long an offer is over whatever became of its confirmation: it may arrive as long as the offer is held, then the
/// lease lives for its ttl; by a clock that may be slower than this one.
fn over_after(ttl: Duration) -> Duration {
    (Duration::from_millis(OFFER_LIFETIME.0) + ttl).mul_f64(SLOWEST_CLOCK)
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

// Those of this client's requests that wait at one endpoint, in the order they came.
//
// One task a endpoint: it enters requests into the endpoint's queue one after the other, follows all of them in one call,
// and tells each what it was granted. A place in the queue is lost only where the endpoint says so; then the request enters
// anew. The task ends with the client, and gives back everything that still waits.

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiter {
    /// Larger for those who came later.
    pub id: u64,
    pub body: Arc<RequestBody>,
    pub tell: mpsc::Sender<News>,
    pub _admission: Admission,
}

/// News of one line that a waiter may not have taken: that it waits, which is told once, and what it was granted or why it is
/// refused. Something else is granted only after the waiter gave back what was.
const NEWS_OF_A_LINE: usize = 2;
/// Orders about one waiter that a line may not have taken: to enter, to wait again after a grant, and to leave.
pub(super) const ORDERS_OF_A_WAITER: usize = 3;

/// What an endpoint says to a waiter.
#[derive(Debug)]
pub(super) struct News {
    pub place: usize,
    pub what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// It waits there.
    Waits,
    /// It is offered a lease, or was given one. From when on it may have lived.
    Granted(Box<LeaseBody>, Instant),
    /// It can never be served there, or must not ask.
    Refused(ClientError),
}

/// What a line is told to do.
#[derive(Debug)]
pub(super) enum Order {
    /// One more waits.
    Enter(Waiter),
    /// What this one was granted is gone: it waits again.
    Again(u64),
    /// This one waits no longer; what it has there is given back unless it keeps it.
    Leave { waiter: u64, keeps: bool, _under_way: UnderWay, _admission: Admission },
}

#[derive(Debug)]
struct Entry {
    waiter: Waiter,
    key: IdempotencyKey,
    stage: Stage,
    /// Whether it was told that it waits.
    is_told: bool,
    /// When it was last known to wait; before it was asked, of one that was not.
    since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not in the endpoint's queue; whether it was tried already.
    Outside { tried: bool },
    /// In the queue, as this lease.
    Queued(u64),
    /// Told what it was granted.
    Told(u64),
}

type Entering = Pin<Box<dyn Future<Output = (u64, Result<LeaseBody, ClientError>)> + Send>>;
type Following = Pin<Box<dyn Future<Output = (Instant, Result<FollowResponse, ClientError>)> + Send>>;

pub(super) struct Line {
    place: Arc<Place>,
    runtime: Handle,
    entries: BTreeMap<u64, Entry>,
    /// The request that is on its way into the queue: never dropped, so that its answer is known.
    entering: Option<Entering>,
    /// The question about those in the queue.
    following: Option<Following>,
    /// Others are in the queue than those that were asked about.
    is_outdated: bool,
    /// Not before this: something went wrong.
    pause: Option<Instant>,
    backoff: Backoff,
}

impl Line {
    pub(super) fn new(place: Arc<Place>) -> Self {
        Self {
            place,
            runtime: Handle::current(),
            entries: BTreeMap::new(),
            entering: None,
            following: None,
            is_outdated: false,
            pause: None,
            backoff: Backoff::default(),
        }
    }

    /// Until nobody can give orders any more.
    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Order>, mut weather: Follower) {
        loop {
            weather.mark_seen();
            let is_usable = self.place.is_usable();
            if is_usable && self.pause.is_none_or(|until| Instant::now() >= until) {
                self.pause = None;
                self.begin();
            }
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    Some(order) => self.take(order),
                    None => break,
                },
                (waiter, answer) = pending(&mut self.entering) => {
                    self.entering = None;
                    self.entered(waiter, answer);
                }
                (began, answer) = pending(&mut self.following) => {
                    self.following = None;
                    self.followed(began, answer);
                }
                () = weather.changed() => {}
                () = at(self.pause), if is_usable => {}
            }
        }
        if let Some(entering) = self.entering.take() {
            let (waiter, answer) = entering.await;
            self.entered(waiter, answer);
        }
        for waiter in self.entries.keys().copied().collect::<Vec<_>>() {
            self.leave(waiter, false);
        }
    }

    /// Begins what can be done now: whoever is outside enters, in order, and those who are inside are followed.
    fn begin(&mut self) {
        if self.entering.is_none() {
            self.enter_next();
        }
        if self.entering.is_none() && self.is_outdated {
            // Not for each that enters: a thousand would be asked about a thousand times.
            self.following = None;
        }
        if self.following.is_none() {
            self.follow_leases();
        }
    }

    fn enter_next(&mut self) {
        let outside = self.entries.values_mut().find(|entry| matches!(entry.stage, Stage::Outside { .. }));
        if let Some(entry) = outside {
            if entry.stage == (Stage::Outside { tried: false }) {
                entry.since = Instant::now();
            }
            entry.stage = Stage::Outside { tried: true };
            let (place, body) = (self.place.clone(), entry.waiter.body.clone());
            let (waiter, key) = (entry.waiter.id, entry.key.clone());
            self.entering = Some(Box::pin(async move { (waiter, place.request(&body, &key).await) }));
        }
    }

    fn follow_leases(&mut self) {
        let queued = self.entries.values().filter_map(|entry| match entry.stage {
            Stage::Queued(lease) => Some(lease),
            Stage::Outside { .. } | Stage::Told(_) => None,
        });
        let leases: Vec<u64> = queued.collect();
        self.is_outdated = false;
        if !leases.is_empty() {
            self.following = Some(Box::pin(follow(self.place.clone(), leases)));
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Enter(waiter) => {
                let (key, stage) = (IdempotencyKey::random(), Stage::Outside { tried: false });
                self.entries.insert(waiter.id, Entry { waiter, key, stage, is_told: false, since: Instant::now() });
            }
            Order::Again(waiter) => self.enter_anew(waiter),
            Order::Leave { waiter, keeps, _under_way, _admission } => self.leave(waiter, keeps),
        }
    }

    fn enter_anew(&mut self, waiter: u64) {
        if let Some(entry) = self.entries.get_mut(&waiter) {
            entry.key = IdempotencyKey::random();
            entry.stage = Stage::Outside { tried: false };
        }
    }

    fn leave(&mut self, waiter: u64, keeps: bool) {
        let Some(entry) = self.entries.remove(&waiter) else { return };
        let stray = match entry.stage {
            _ if keeps => return,
            Stage::Outside { tried: false } => return,
            // Where it is on its way right now, this comes after it, under the same key.
            Stage::Outside { tried: true } => Stray::Asked(entry.waiter.body, entry.key),
            Stage::Queued(lease) => {
                self.is_outdated = true;
                Stray::Lease(lease)
            }
            Stage::Told(lease) => Stray::Lease(lease),
        };
        give_back(&self.runtime, &self.place, stray);
    }

    fn entered(&mut self, waiter: u64, answer: Result<LeaseBody, ClientError>) {
        // Who left meanwhile has seen to it that nothing is left behind.
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match answer {
            Ok(lease) => {
                self.backoff.reset();
                entry.stage = Stage::Queued(lease.id);
                self.is_outdated = true;
                self.heard(waiter, lease);
            }
            Err(error) if is_fault(&error) || error.is_transient() => self.pause_after(&error),
            Err(error) => {
                let entry = self.entries.remove(&waiter);
                self.tell(entry.as_ref(), What::Refused(error));
            }
        }
    }

    fn followed(&mut self, began: Instant, answer: Result<FollowResponse, ClientError>) {
        let followed = match answer {
            Ok(followed) => followed,
            Err(error) => return self.pause_after(&error),
        };
        let is_early = began.elapsed() < FOLLOW_WAIT / 2;
        if followed.changed.is_empty() && followed.unknown.is_empty() && is_early {
            // Answered before its time: an agent that is stopping. Not to be asked without pause.
            self.pause = Some(Instant::now() + self.backoff.next());
            return;
        }
        self.backoff.reset();
        let has_changed = |lease: &u64| followed.changed.iter().any(|changed| changed.id == *lease);
        for entry in self.entries.values_mut() {
            if matches!(&entry.stage, Stage::Queued(lease) if !has_changed(lease)) {
                entry.since = entry.since.max(began);
            }
        }
        for lease in followed.changed {
            if let Some(waiter) = self.waiter_of(lease.id) {
                self.heard(waiter, lease);
            }
        }
        for lease in followed.unknown {
            if let Some(waiter) = self.waiter_of(lease) {
                self.enter_anew(waiter);
            }
        }
    }

    /// The endpoint says how a lease of a waiter stands.
    fn heard(&mut self, waiter: u64, lease: LeaseBody) {
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match lease.state {
            LeaseState::Queued if std::mem::replace(&mut entry.is_told, true) => {}
            LeaseState::Queued => self.tell(self.entries.get(&waiter), What::Waits),
            LeaseState::Offered | LeaseState::Active => {
                entry.stage = Stage::Told(lease.id);
                let since = entry.since;
                self.tell(self.entries.get(&waiter), What::Granted(Box::new(lease), since));
            }
            // Nobody asked for it in time, or it was offered and not taken.
            LeaseState::Expired | LeaseState::Released => self.enter_anew(waiter),
            LeaseState::Revoked | LeaseState::Failed => {
                let entry = self.entries.remove(&waiter);
                self.tell(entry.as_ref(), What::Refused(ClientError::Ended(Box::new(lease))));
            }
        }
    }

    fn tell(&self, entry: Option<&Entry>, what: What) {
        if let Some(entry) = entry {
            // Where nobody listens any more, an order to leave is on its way.
            let told = entry.waiter.tell.try_send(News { place: self.place.number, what });
            debug_assert!(!matches!(told, Err(TrySendError::Full(_))), "a waiter has room for all news there can be");
        }
    }

    fn pause_after(&mut self, error: &ClientError) {
        tracing::debug!(endpoint_id = self.place.id, %error, "waiting there is interrupted");
        self.pause = Some(Instant::now() + self.backoff.next());
    }

    fn waiter_of(&self, lease: u64) -> Option<u64> {
        let found = self.entries.values().find(|entry| entry.stage == Stage::Queued(lease));
        found.map(|entry| entry.waiter.id)
    }
}

/// Asks about all of them at once, and comes back with the first that has something to say.
async fn follow(place: Arc<Place>, leases: Vec<u64>) -> (Instant, Result<FollowResponse, ClientError>) {
    let began = Instant::now();
    let asked = leases.chunks(FOLLOWED_AT_ONCE).map(|some| Box::pin(place.follow_leases(some, FOLLOW_WAIT)));
    let (answer, _, _) = select_all(asked).await;
    (began, answer)
}

/// The outcome of a future that is there; never, where it is not.
async fn pending<T>(future: &mut Option<Pin<Box<dyn Future<Output = T> + Send>>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
