//! Those of this client's requests that wait at one endpoint, in the order they came.
//!
//! One task a endpoint: it enters requests into the endpoint's queue one after the other, follows all of them in one call,
//! and tells each what it was granted. A place in the queue is lost only where the endpoint says so; then the request enters
//! anew. The task ends with the client, and gives back everything that still waits.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::select_all;
use gpupool_api::RequestBody;
use gpupool_api::lease::{Followed, Lease, State};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::place::{Place, is_fault};
use super::returns::UnderWay;
use super::running::at;
use super::stray::{Stray, give_back};
use crate::backoff::Backoff;
use crate::changes::Follower;
use crate::limits::{FOLLOW_WAIT, FOLLOWED_AT_ONCE, LINE_PAUSE_FIRST, LINE_PAUSE_MOST};
use crate::{ClientError, IdempotencyKey};

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiter {
    /// Larger for those who came later.
    pub id: u64,
    pub body: Arc<RequestBody>,
    pub tell: mpsc::UnboundedSender<News>,
}

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
    Granted(Box<Lease>, Instant),
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
    Leave { waiter: u64, keeps: bool, _under_way: UnderWay },
}

#[derive(Debug)]
struct Entry {
    waiter: Waiter,
    key: IdempotencyKey,
    stage: Stage,
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

type Entering = Pin<Box<dyn Future<Output = (u64, Result<Lease, ClientError>)> + Send>>;
type Following = Pin<Box<dyn Future<Output = (Instant, Result<Followed, ClientError>)> + Send>>;

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
    pub fn new(place: Arc<Place>) -> Self {
        Self {
            place,
            runtime: Handle::current(),
            entries: BTreeMap::new(),
            entering: None,
            following: None,
            is_outdated: false,
            pause: None,
            backoff: Backoff::between(LINE_PAUSE_FIRST, LINE_PAUSE_MOST),
        }
    }

    /// Until nobody can give orders any more.
    pub async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, mut weather: Follower) {
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
            self.follow_all();
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

    fn follow_all(&mut self) {
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
                let stage = Stage::Outside { tried: false };
                self.entries
                    .insert(waiter.id, Entry { waiter, key: IdempotencyKey::random(), stage, since: Instant::now() });
            }
            Order::Again(waiter) => self.enter_anew(waiter),
            Order::Leave { waiter, keeps, _under_way } => self.leave(waiter, keeps),
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

    fn entered(&mut self, waiter: u64, answer: Result<Lease, ClientError>) {
        // Who left meanwhile has seen to it that nothing is left behind.
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match answer {
            Ok(lease) => {
                self.backoff.reset();
                entry.stage = Stage::Queued(lease.id);
                self.is_outdated = true;
                self.heard(waiter, lease);
            }
            Err(error) if is_fault(&error) || error.is_passing() => self.pause_after(&error),
            Err(error) => {
                let entry = self.entries.remove(&waiter);
                self.tell(entry.as_ref(), What::Refused(error));
            }
        }
    }

    fn followed(&mut self, began: Instant, answer: Result<Followed, ClientError>) {
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
    fn heard(&mut self, waiter: u64, lease: Lease) {
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match lease.state {
            State::Queued => self.tell(self.entries.get(&waiter), What::Waits),
            State::Offered | State::Active => {
                entry.stage = Stage::Told(lease.id);
                let since = entry.since;
                self.tell(self.entries.get(&waiter), What::Granted(Box::new(lease), since));
            }
            // Nobody asked for it in time, or it was offered and not taken.
            State::Expired | State::Released => self.enter_anew(waiter),
            State::Revoked | State::Failed => {
                let entry = self.entries.remove(&waiter);
                self.tell(entry.as_ref(), What::Refused(ClientError::Ended(Box::new(lease))));
            }
        }
    }

    fn tell(&self, entry: Option<&Entry>, what: What) {
        if let Some(entry) = entry {
            // Where nobody listens any more, an order to leave is on its way.
            let _ = entry.waiter.tell.send(News { place: self.place.number, what });
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
async fn follow(place: Arc<Place>, leases: Vec<u64>) -> (Instant, Result<Followed, ClientError>) {
    let began = Instant::now();
    let asked = leases.chunks(FOLLOWED_AT_ONCE).map(|some| Box::pin(place.follow_all(some, FOLLOW_WAIT)));
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
