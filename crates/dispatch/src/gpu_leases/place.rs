//! The life of one place: asks, waits its turn, ties the lease to us, tells, and asks again when it was lost.
//!
//! A task for each place; it ends when the keeper stops, having given back what it had, or when the agent refuses for good.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, LeaseBody, RevocationAction};
use gpupool_client::limits::{LOCAL_RELEASE_PATIENCE, WAIT_POLL_INTERVAL};
use gpupool_client::local::{LeaseBinding, LeaseNotice, LocalAgent};
use gpupool_client::{ClientError, IdempotencyKey, LeaseGuard, WaitOptions, WaitProgress};
use gpupool_confine::lock;
use tokio::sync::watch;
use tokio::time::Instant;

use super::news::GpuEventSender;
use super::{GpuEvent, GrantedLease};
use crate::limits::{ASK_AGAIN, SHORT_LIFE};

/// Causes for which a request left the queue without anybody having wanted that: we did not ask for it in time.
const ASKED_TOO_LATE: [&str; 3] = ["abandoned", "offer_lapsed", "ttl_passed"];

/// One place, and what it needs.
pub(super) struct Place {
    pub number: usize,
    pub agent: LocalAgent,
    pub body: RequestBody,
    pub board: Board,
    /// Hangs up when everything is to be given back.
    pub stop: watch::Receiver<()>,
}

/// How a step ended.
enum Next<T> {
    Go(T),
    /// It has to be asked for anew.
    Again,
    /// There is nothing more to do, but for a lease that could not be given back.
    End(Option<u64>),
}

impl Place {
    /// Keeps the place until the end; says which lease could not be given back then, because the agent is away.
    pub(super) async fn keep(mut self) -> Option<u64> {
        loop {
            let begun = Instant::now();
            let next = match self.ask().await {
                Next::Go(guard) => self.hold(guard).await,
                Next::Again => Next::Again,
                Next::End(left) => Next::End(left),
            };
            if let Next::End(left) = next {
                return left;
            }
            if begun.elapsed() < SHORT_LIFE && self.paused().await.is_none() {
                return None;
            }
        }
    }

    /// Asks, and waits until it is granted.
    async fn ask(&mut self) -> Next<LeaseGuard> {
        let key = IdempotencyKey::random();
        let mut said = String::new();
        loop {
            let (client, board, place) = (self.agent.client().clone(), &self.board, self.number);
            let options = WaitOptions { key: Some(key.clone()), refresh: WAIT_POLL_INTERVAL };
            let mut waits = |text: String| {
                if text != said {
                    said.clone_from(&text);
                    board.tell(GpuEvent::Waiting { place, text });
                }
            };
            let progress = |progress: WaitProgress| waits(progress.to_string());
            let waiting = client.wait_until_granted(self.body.clone(), options, progress);
            let error = tokio::select! {
                biased;
                () = stopped(&mut self.stop) => {
                    client.cancel_request(&self.body, &key).await;
                    return Next::End(None);
                }
                granted = waiting => match granted {
                    Ok(guard) => return Next::Go(guard),
                    Err(error) => error,
                },
            };
            if !error.is_transient() {
                return self.refused(&error);
            }
            waits(error.to_string());
            if self.paused().await.is_none() {
                client.cancel_request(&self.body, &key).await;
                return Next::End(None);
            }
        }
    }

    fn refused<T>(&self, error: &ClientError) -> Next<T> {
        if let ClientError::Ended(lease) = error
            && lease.cause.as_deref().is_some_and(|cause| ASKED_TOO_LATE.contains(&cause))
        {
            return Next::Again;
        }
        self.board.tell(GpuEvent::Refused { place: self.number, why: error.to_string() });
        Next::End(None)
    }

    /// Holds what was granted until it is lost, or not wanted any more.
    async fn hold(&mut self, guard: LeaseGuard) -> Next<()> {
        let lease = guard.lease();
        let mut tether = match self.bind_lease(&guard, &lease).await {
            Next::Go(tether) => tether,
            Next::Again => return Next::Again,
            Next::End(_) => {
                guard.detach();
                return Next::End(self.give_back(lease.id).await);
            }
        };
        guard.detach();
        let (id, is_bound_to_process) = (lease.id, tether.is_bound_to_process());
        self.board.granted(Held { granted: GrantedLease::new(self.number, lease), is_bound_to_process });
        let lost = tokio::select! {
            biased;
            () = stopped(&mut self.stop) => None,
            why = tether.wait_until_lost(|notice| self.board.notice(self.number, notice)) => Some(why),
        };
        match lost {
            Some(why) => {
                self.board.lost(self.number, why);
                Next::Again
            }
            None => {
                self.board.gives_back(self.number);
                Next::End(self.give_back(id).await)
            }
        }
    }

    /// Ties the lease to us. The guard renews it until that is done.
    async fn bind_lease(&mut self, guard: &LeaseGuard, lease: &LeaseBody) -> Next<LeaseBinding> {
        // We hold several leases: one that is taken back is to end its workers, not us.
        let body = AttachBody { on_revocation: RevocationAction::EndJobs, ..AttachBody::default() };
        loop {
            let error = tokio::select! {
                biased;
                () = stopped(&mut self.stop) => return Next::End(None),
                tied = self.agent.bind_lease(lease, body.clone()) => match tied {
                    Ok((tether, _)) => return Next::Go(tether),
                    Err(error) => error,
                },
            };
            if error.is_lease_lost() || guard.loss().is_some() {
                return Next::Again;
            }
            if !error.is_transient() {
                self.board.tell(GpuEvent::Refused { place: self.number, why: error.to_string() });
                return Next::End(None);
            }
            if self.paused().await.is_none() {
                return Next::End(None);
            }
        }
    }

    /// Gives the lease back; says which where the agent is away.
    async fn give_back(&self, lease: u64) -> Option<u64> {
        let error = self.agent.client().release_within(lease, LOCAL_RELEASE_PATIENCE).await.err()?;
        self.board.tell(GpuEvent::Note(format!("lease {lease} could not be given back ({error}); it ends with us")));
        error.is_transient().then_some(lease)
    }

    /// Pauses before something is tried again; `None` where everything is to be given back.
    async fn paused(&mut self) -> Option<()> {
        tokio::select! {
            biased;
            () = stopped(&mut self.stop) => None,
            () = tokio::time::sleep(ASK_AGAIN) => Some(()),
        }
    }
}

/// Comes back when everything is to be given back.
pub(super) async fn stopped(stop: &mut watch::Receiver<()>) {
    // Nothing is ever sent: it hangs up.
    let _ = stop.changed().await;
}

// What all places of a run show: which leases are held, and the news about them.

/// Shared by the places of one keeper. A lock rather than messages: it is held for a look, or for one piece of news, and all
/// of them are tasks of one thread.
#[derive(Clone)]
pub(super) struct Board(Arc<Mutex<Inner>>);

struct Inner {
    news: GpuEventSender,
    held: Vec<Option<Held>>,
    /// Places that miss the agent.
    away: BTreeSet<usize>,
}

/// A lease that is held now.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub granted: GrantedLease,
    /// Whether the agent watches our process.
    pub is_bound_to_process: bool,
}

impl Board {
    pub(super) fn new(places: usize, news: GpuEventSender) -> Self {
        Self(Arc::new(Mutex::new(Inner { news, held: vec![None; places], away: BTreeSet::new() })))
    }

    /// What is held, place by place.
    pub(super) fn held(&self) -> Vec<Option<Held>> {
        lock(&self.0).held.clone()
    }

    pub(super) fn tell(&self, news: GpuEvent) {
        lock(&self.0).news.send(news);
    }

    pub(super) fn granted(&self, held: Held) {
        let (place, granted) = (held.granted.place, held.granted.clone());
        let mut inner = lock(&self.0);
        inner.held[place] = Some(held);
        inner.news.send(GpuEvent::Granted(granted));
    }

    pub(super) fn lost(&self, place: usize, why: String) {
        // Whoever says so is there.
        self.notice(place, LeaseNotice::AgentReturned);
        let mut inner = lock(&self.0);
        inner.held[place] = None;
        inner.news.send(GpuEvent::Lost { place, why });
    }

    /// It is given back, or about to be: nobody starts anything on it any more.
    pub(super) fn gives_back(&self, place: usize) {
        lock(&self.0).held[place] = None;
    }

    /// Tells what happens around a lease; once where it happens to all of them.
    pub(super) fn notice(&self, place: usize, notice: LeaseNotice) {
        let mut inner = lock(&self.0);
        let text = match notice {
            LeaseNotice::AgentAway(error) => {
                let is_first = inner.away.is_empty();
                inner.away.insert(place);
                is_first.then(|| format!("the agent is away, the work goes on ({error})"))
            }
            LeaseNotice::AgentReturned => {
                let was_away = inner.away.remove(&place);
                (was_away && inner.away.is_empty()).then(|| "the agent is back".into())
            }
            LeaseNotice::RevocationAnnounced(reason) => {
                let gpus = inner.held[place].as_ref().map(|held| numbers(&held.granted)).unwrap_or_default();
                let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                Some(format!("GPU {gpus} will be taken back soon{reason}"))
            }
        };
        if let Some(text) = text {
            inner.news.send(GpuEvent::Note(text));
        }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Board").finish_non_exhaustive()
    }
}

fn numbers(granted: &GrantedLease) -> String {
    granted.gpu_ids().iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::super::news::gpu_event_channel;
    use super::*;

    #[test]
    fn an_agent_that_all_places_miss_is_told_of_once() {
        let (news, mut told) = gpu_event_channel();
        let board = Board::new(3, news);
        for place in 0..3 {
            board.notice(place, LeaseNotice::AgentAway(format!("try {place}")));
        }
        for place in 0..3 {
            board.notice(place, LeaseNotice::AgentReturned);
        }
        board.notice(1, LeaseNotice::AgentReturned);
        drop(board);
        let told: Vec<GpuEvent> = std::iter::from_fn(|| told.blocking_next()).collect();
        let note = |text: &str| GpuEvent::Note(text.into());
        assert_eq!(told, [note("the agent is away, the work goes on (try 0)"), note("the agent is back")]);
    }
}
