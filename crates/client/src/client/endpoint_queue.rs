//! The waiting requests of this client at one endpoint, in the order of their arrival.
//!
//! One task per endpoint enters the requests into the server's queue one after the other, follows all of them in one
//! call, and reports grants to the waiters. A place in the server's queue is lost only if the server says so; the
//! request then enters anew. The task ends with the client and releases all requests that still wait.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::select_all;
use gpupool_api::RequestBody;
use gpupool_api::lease::{FollowResponse, LeaseBody, LeaseState};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;

use super::change_notifier::{ChangeObserver, PendingWorkGuard};
use super::endpoint_state::{EndpointState, is_fault};
use super::orphaned_grants::{OrphanedGrant, release_in_background};
use super::running_client::{WaitPermit, sleep_until_some};
use crate::limits::{FOLLOW_WAIT, MAX_FOLLOWED_LEASES};
use crate::random::Backoff;
use crate::{ClientError, IdempotencyKey};

/// A waiting request as seen by one endpoint queue.
#[derive(Debug)]
pub(super) struct EndpointWaiter {
    /// Number of the request, increasing with arrival.
    pub id: u64,
    pub body: Arc<RequestBody>,
    pub event_sender: mpsc::Sender<WaiterEvent>,
    pub _wait_permit: WaitPermit,
}

/// Maximum number of events of one endpoint that a waiter may not have received: that it waits (sent once), and a grant
/// or refusal. The next grant follows only after the waiter has returned the previous one.
pub(super) const EVENTS_PER_ENDPOINT: usize = 2;
/// Maximum number of pending commands about one waiter: enter, requeue after a grant, and leave.
pub(super) const COMMANDS_PER_WAITER: usize = 3;

/// Event of an endpoint for a waiter.
#[derive(Debug)]
pub(super) struct WaiterEvent {
    pub endpoint: usize,
    pub kind: WaiterEventKind,
}

#[derive(Debug)]
pub(super) enum WaiterEventKind {
    /// The request is queued there.
    Waiting,
    /// The endpoint offered or granted a lease, which may live since the given instant.
    Granted(Box<LeaseBody>, Instant),
    /// The endpoint will never grant the request, or does not accept it.
    Refused(ClientError),
}

/// Command to an endpoint queue.
#[derive(Debug)]
pub(super) enum QueueCommand {
    /// Adds a waiter.
    Enter(EndpointWaiter),
    /// The grant of this waiter is gone: it waits again.
    Requeue(u64),
    /// Removes a waiter and releases its lease there unless the waiter keeps it.
    Leave { waiter: u64, keeps_lease: bool, _pending_work: PendingWorkGuard, _wait_permit: WaitPermit },
}

#[derive(Debug)]
struct QueueEntry {
    waiter: EndpointWaiter,
    key: IdempotencyKey,
    stage: QueueStage,
    /// Whether the waiter was notified that it is queued.
    is_reported: bool,
    /// Instant at which the request was last known to wait, or was sent.
    waiting_since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueStage {
    /// Not in the server's queue. `was_sent`: whether the request was sent.
    Outside { was_sent: bool },
    /// In the server's queue with this lease.
    Queued(u64),
    /// Granted with this lease, which was reported to the waiter.
    Reported(u64),
}

type EnterFuture = Pin<Box<dyn Future<Output = (u64, Result<LeaseBody, ClientError>)> + Send>>;
type FollowFuture = Pin<Box<dyn Future<Output = (Instant, Result<FollowResponse, ClientError>)> + Send>>;

pub(super) struct EndpointQueue {
    endpoint: Arc<EndpointState>,
    runtime: Handle,
    entries: BTreeMap<u64, QueueEntry>,
    /// The request that enters the server's queue: never dropped, so that its response is always known.
    entering: Option<EnterFuture>,
    /// The call that follows the queued leases.
    following: Option<FollowFuture>,
    /// Whether the set of queued leases has changed since the call that follows them.
    is_follow_outdated: bool,
    /// Earliest time of the next call after an error.
    paused_until: Option<Instant>,
    backoff: Backoff,
}

impl EndpointQueue {
    pub(super) fn new(endpoint: Arc<EndpointState>) -> Self {
        Self {
            endpoint,
            runtime: Handle::current(),
            entries: BTreeMap::new(),
            entering: None,
            following: None,
            is_follow_outdated: false,
            paused_until: None,
            backoff: Backoff::default(),
        }
    }

    /// Runs until all command senders are dropped.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<QueueCommand>, mut availability: ChangeObserver) {
        loop {
            availability.mark_seen();
            let is_usable = self.endpoint.is_usable();
            if is_usable && self.paused_until.is_none_or(|until| Instant::now() >= until) {
                self.paused_until = None;
                self.start_calls();
            }
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(command) => self.apply_command(command),
                    None => break,
                },
                (waiter, response) = poll_optional(&mut self.entering) => {
                    self.entering = None;
                    self.handle_enter_response(waiter, response);
                }
                (began, response) = poll_optional(&mut self.following) => {
                    self.following = None;
                    self.handle_follow_response(began, response);
                }
                () = availability.changed() => {}
                () = sleep_until_some(self.paused_until), if is_usable => {}
            }
        }
        if let Some(entering) = self.entering.take() {
            let (waiter, response) = entering.await;
            self.handle_enter_response(waiter, response);
        }
        for waiter in self.entries.keys().copied().collect::<Vec<_>>() {
            self.remove_waiter(waiter, false);
        }
    }

    /// Starts what can be done now: enters the next request and follows the queued ones.
    fn start_calls(&mut self) {
        if self.entering.is_none() {
            self.enter_next();
        }
        if self.entering.is_none() && self.is_follow_outdated {
            // Only after all requests have entered: otherwise a thousand requests would restart the call a thousand
            // times.
            self.following = None;
        }
        if self.following.is_none() {
            self.follow_leases();
        }
    }

    fn enter_next(&mut self) {
        let outside = self.entries.values_mut().find(|entry| matches!(entry.stage, QueueStage::Outside { .. }));
        if let Some(entry) = outside {
            if entry.stage == (QueueStage::Outside { was_sent: false }) {
                entry.waiting_since = Instant::now();
            }
            entry.stage = QueueStage::Outside { was_sent: true };
            let (endpoint, body) = (self.endpoint.clone(), entry.waiter.body.clone());
            let (waiter, key) = (entry.waiter.id, entry.key.clone());
            self.entering = Some(Box::pin(async move { (waiter, endpoint.request(&body, &key).await) }));
        }
    }

    fn follow_leases(&mut self) {
        let queued = self.entries.values().filter_map(|entry| match entry.stage {
            QueueStage::Queued(lease) => Some(lease),
            QueueStage::Outside { .. } | QueueStage::Reported(_) => None,
        });
        let leases: Vec<u64> = queued.collect();
        self.is_follow_outdated = false;
        if !leases.is_empty() {
            self.following = Some(Box::pin(follow_all(self.endpoint.clone(), leases)));
        }
    }

    fn apply_command(&mut self, command: QueueCommand) {
        match command {
            QueueCommand::Enter(waiter) => {
                let (key, stage) = (IdempotencyKey::random(), QueueStage::Outside { was_sent: false });
                let waiting_since = Instant::now();
                self.entries.insert(waiter.id, QueueEntry { waiter, key, stage, is_reported: false, waiting_since });
            }
            QueueCommand::Requeue(waiter) => self.reset_entry(waiter),
            QueueCommand::Leave { waiter, keeps_lease, _pending_work, _wait_permit } => {
                self.remove_waiter(waiter, keeps_lease)
            }
        }
    }

    fn reset_entry(&mut self, waiter: u64) {
        if let Some(entry) = self.entries.get_mut(&waiter) {
            entry.key = IdempotencyKey::random();
            entry.stage = QueueStage::Outside { was_sent: false };
        }
    }

    fn remove_waiter(&mut self, waiter: u64, keeps_lease: bool) {
        let Some(entry) = self.entries.remove(&waiter) else { return };
        let orphan = match entry.stage {
            _ if keeps_lease => return,
            QueueStage::Outside { was_sent: false } => return,
            // If the request is still on its way, the release follows it under the same key.
            QueueStage::Outside { was_sent: true } => OrphanedGrant::Unanswered(entry.waiter.body, entry.key),
            QueueStage::Queued(lease) => {
                self.is_follow_outdated = true;
                OrphanedGrant::Lease(lease)
            }
            QueueStage::Reported(lease) => OrphanedGrant::Lease(lease),
        };
        release_in_background(&self.runtime, &self.endpoint, orphan);
    }

    fn handle_enter_response(&mut self, waiter: u64, response: Result<LeaseBody, ClientError>) {
        // A request that left meanwhile has already arranged its release.
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match response {
            Ok(lease) => {
                self.backoff.reset();
                entry.stage = QueueStage::Queued(lease.id);
                self.is_follow_outdated = true;
                self.handle_lease(waiter, lease);
            }
            Err(error) if is_fault(&error) || error.is_transient() => self.pause_after(&error),
            Err(error) => {
                let entry = self.entries.remove(&waiter);
                self.notify_waiter(entry.as_ref(), WaiterEventKind::Refused(error));
            }
        }
    }

    fn handle_follow_response(&mut self, began: Instant, response: Result<FollowResponse, ClientError>) {
        let followed = match response {
            Ok(followed) => followed,
            Err(error) => return self.pause_after(&error),
        };
        let is_early = began.elapsed() < FOLLOW_WAIT / 2;
        if followed.changed.is_empty() && followed.unknown.is_empty() && is_early {
            // The response came early: the agent is stopping. It must not be called without a pause.
            self.paused_until = Some(Instant::now() + self.backoff.next_pause());
            return;
        }
        self.backoff.reset();
        let has_changed = |lease: &u64| followed.changed.iter().any(|changed| changed.id == *lease);
        for entry in self.entries.values_mut() {
            if matches!(&entry.stage, QueueStage::Queued(lease) if !has_changed(lease)) {
                entry.waiting_since = entry.waiting_since.max(began);
            }
        }
        for lease in followed.changed {
            if let Some(waiter) = self.waiter_with_lease(lease.id) {
                self.handle_lease(waiter, lease);
            }
        }
        for lease in followed.unknown {
            if let Some(waiter) = self.waiter_with_lease(lease) {
                self.reset_entry(waiter);
            }
        }
    }

    /// Handles the state of a waiter's lease.
    fn handle_lease(&mut self, waiter: u64, lease: LeaseBody) {
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        match lease.state {
            LeaseState::Queued if std::mem::replace(&mut entry.is_reported, true) => {}
            LeaseState::Queued => self.notify_waiter(self.entries.get(&waiter), WaiterEventKind::Waiting),
            LeaseState::Offered | LeaseState::Active => {
                entry.stage = QueueStage::Reported(lease.id);
                let waiting_since = entry.waiting_since;
                self.notify_waiter(self.entries.get(&waiter), WaiterEventKind::Granted(Box::new(lease), waiting_since));
            }
            // The request was not followed in time, or its offer was not confirmed.
            LeaseState::Expired | LeaseState::Released => self.reset_entry(waiter),
            LeaseState::Revoked | LeaseState::Failed => {
                let entry = self.entries.remove(&waiter);
                self.notify_waiter(entry.as_ref(), WaiterEventKind::Refused(ClientError::Ended(Box::new(lease))));
            }
        }
    }

    fn notify_waiter(&self, entry: Option<&QueueEntry>, kind: WaiterEventKind) {
        if let Some(entry) = entry {
            // If the receiver is gone, a command to leave is on its way.
            let sent = entry.waiter.event_sender.try_send(WaiterEvent { endpoint: self.endpoint.index, kind });
            debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "a waiter has capacity for all possible events");
        }
    }

    fn pause_after(&mut self, error: &ClientError) {
        tracing::debug!(endpoint_id = self.endpoint.id, %error, "waiting at the endpoint is interrupted");
        self.paused_until = Some(Instant::now() + self.backoff.next_pause());
    }

    fn waiter_with_lease(&self, lease: u64) -> Option<u64> {
        let found = self.entries.values().find(|entry| entry.stage == QueueStage::Queued(lease));
        found.map(|entry| entry.waiter.id)
    }
}

/// Follows all leases in as few calls as possible and returns with the first response.
async fn follow_all(endpoint: Arc<EndpointState>, leases: Vec<u64>) -> (Instant, Result<FollowResponse, ClientError>) {
    let began = Instant::now();
    let calls = leases.chunks(MAX_FOLLOWED_LEASES).map(|some| Box::pin(endpoint.follow_leases(some, FOLLOW_WAIT)));
    let (response, _, _) = select_all(calls).await;
    (began, response)
}

/// Awaits a future if there is one; otherwise never completes.
async fn poll_optional<T>(future: &mut Option<Pin<Box<dyn Future<Output = T> + Send>>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
