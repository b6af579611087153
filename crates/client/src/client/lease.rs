//! A lease that is held: renewed in the background until it is released, dropped or lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use gpupool_api::lease::{LeaseBody, LeaseDevice, LeaseState};

use super::books::Books;
use super::direct::Wanted;
use super::place::{Desk, Place, Stray, give_back};
use super::running::{Live, Running};
use super::seek::Won;
use super::status::StatusUpdate;
use crate::agent::ended;
use crate::{AgentClient, ClientError, LeaseGuard, LeaseLost};

/// GPUs that are held. Dropping it gives them back, in the background: where the process ends at once, use
/// [`HeldLease::release`] and wait for it. A copy in a forked child gives nothing back.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct HeldLease {
    held: Held,
    body: Arc<LeaseBody>,
    /// Taken out when it is given back.
    keep: Option<Keep>,
    made_by: u32,
}

/// What names an assignment to the rest of the client.
#[derive(Debug, Clone)]
struct Held {
    running: Arc<Running>,
    place: Arc<Place>,
    number: u64,
    worker_id: Arc<str>,
    assigned_at: SystemTime,
}

#[derive(Debug)]
enum Keep {
    Agent(LeaseGuard),
    Books(Arc<Books>),
}

impl HeldLease {
    pub(super) fn new(running: &Arc<Running>, wanted: &Wanted, won: Won) -> Result<Self, ClientError> {
        let Won { place, lease: body, since, was_blocked } = won;
        let held = Held {
            running: running.clone(),
            number: running.core.counts.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            worker_id: wanted.worker_id.clone(),
            assigned_at: SystemTime::now(),
            place: place.clone(),
        };
        let keep = match place.desk() {
            Some(Desk::Books(books)) => {
                watch_books(&held, &body, books.clone());
                Keep::Books(books)
            }
            _ => {
                let held = held.clone();
                let on_lost = move |lease: &LeaseBody, lost: &LeaseLost| held.lost(lease, lost);
                Keep::Agent(place.agent.guard_lease_with((*body).clone(), since, on_lost)?)
            }
        };
        held.taken(&body, was_blocked);
        Ok(Self { held, body: Arc::from(body), keep: Some(keep), made_by: std::process::id() })
    }

    /// Its number on the endpoint that granted it.
    pub fn id(&self) -> u64 {
        self.body.id
    }

    /// Who holds it.
    pub fn worker_id(&self) -> &str {
        &self.held.worker_id
    }

    /// The endpoint that granted it.
    pub fn endpoint_id(&self) -> &str {
        &self.held.place.id
    }

    /// The number of its GPU on that endpoint; of its first one, where it has several.
    pub fn gpu_id(&self) -> Option<u32> {
        self.body.devices.first().map(|device| device.gpu_id)
    }

    /// Its GPU among those of all endpoints: `endpoint_id:gpu_id`.
    pub fn global_gpu_id(&self) -> Option<String> {
        self.gpu_id().map(|gpu_id| format!("{}:{gpu_id}", self.held.place.id))
    }

    /// What it holds.
    pub fn devices(&self) -> &[LeaseDevice] {
        &self.body.devices
    }

    /// What to set in the environment of its job; `None` means the variable must not be set.
    pub fn env(&self) -> &BTreeMap<String, Option<String>> {
        &self.body.env
    }

    /// Grows with every grant on the endpoint: what is written under it can be fenced by it.
    pub fn token(&self) -> Option<u64> {
        self.body.token
    }

    /// When it was assigned.
    pub fn assigned_at(&self) -> SystemTime {
        self.held.assigned_at
    }

    /// The lease as it was granted.
    pub fn granted(&self) -> &Arc<LeaseBody> {
        &self.body
    }

    /// Waits until it is not held any more, and says why. From then on its GPUs may be somebody else's.
    pub async fn wait_until_lost(&self) -> LeaseLost {
        match &self.keep {
            Some(Keep::Agent(guard)) => guard.wait_until_lost().await,
            Some(Keep::Books(books)) => ended(books.ended(self.body.id).await.unwrap_or_else(|| (*self.body).clone())),
            None => std::future::pending().await,
        }
    }

    /// Whether it is still held, as far as is known here.
    pub fn check_held(&self) -> Result<(), ClientError> {
        let lost = match &self.keep {
            Some(Keep::Agent(guard)) => guard.loss(),
            Some(Keep::Books(books)) => books.lease(self.body.id).filter(|lease| lease.state.is_ended()).map(ended),
            None => None,
        };
        lost.map_or(Ok(()), |lost| Err(self.stale(lost)))
    }

    /// Gives it back, and waits until that is certain. An error where it was lost before. Goes on in the background where
    /// it is not waited for.
    pub async fn release(mut self) -> Result<(), ClientError> {
        self.check_held()?;
        match self.keep.take() {
            Some(Keep::Agent(guard)) => {
                // Counted before it is waited for: dropped half way, it is given back all the same.
                self.held.given_back(&self.body);
                let mut returning = Returning { held: &self.held, lease: self.body.id, is_done: false };
                let released = guard.release().await;
                returning.is_done = released.is_ok();
                self.held.place.judge(None, released.as_ref().err());
                match released? {
                    // It had ended before we knew.
                    Some(lease) if lease.state.is_ended() && lease.state != LeaseState::Released => {
                        Err(self.stale(ended(lease)))
                    }
                    _ => Ok(()),
                }
            }
            Some(Keep::Books(books)) => {
                books.release(self.body.id);
                self.held.given_back(&self.body);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The guard that renews it and the client of the endpoint that granted it: from now on it is no business of this client
    /// any more. Itself, where this client keeps the books.
    #[expect(clippy::result_large_err, reason = "it is given back, and no error")]
    pub fn into_guard(mut self) -> Result<(AgentClient, LeaseGuard), Self> {
        match self.keep.take() {
            Some(Keep::Agent(guard)) => {
                self.held.running.live().remove(&self.held.number);
                Ok((self.held.place.agent.clone(), guard))
            }
            keep => {
                self.keep = keep;
                Err(self)
            }
        }
    }

    fn stale(&self, lost: LeaseLost) -> ClientError {
        ClientError::Stale { worker_id: self.held.worker_id.to_string(), lost }
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        // A forked child's copy is not the child's to give back.
        if self.made_by != std::process::id() {
            return;
        }
        match self.keep.take() {
            Some(Keep::Agent(guard)) => {
                let is_over = matches!(guard.loss(), Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. }));
                let _ = Returning { held: &self.held, lease: self.body.id, is_done: is_over };
                guard.detach();
            }
            Some(Keep::Books(books)) => drop(books.release(self.body.id)),
            None => return,
        }
        self.held.given_back(&self.body);
    }
}

/// A lease on its way back: where that is not certain, it is remembered until its endpoint has it.
struct Returning<'a> {
    held: &'a Held,
    lease: u64,
    is_done: bool,
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            give_back(&self.held.running.runtime, &self.held.place, Stray::Lease(self.lease));
        }
    }
}

impl Held {
    fn taken(&self, body: &LeaseBody, was_blocked: bool) {
        let counts = &self.running.core.counts;
        counts.granted.fetch_add(1, Ordering::Relaxed);
        let live = Live {
            place: self.place.number,
            lease: body.id,
            devices: body.devices.clone(),
            worker_id: self.worker_id.clone(),
            assigned_at: self.assigned_at,
        };
        self.running.live().insert(self.number, live);
        self.place.count(body, true);
        if was_blocked {
            self.running.tell(StatusUpdate::Unblocked { worker_id: self.worker_id.to_string() });
        }
        if self.running.core.telling.wants_frequent_updates() {
            let (worker_id, endpoint_id, gpu_ids) = self.named(body);
            self.running.tell(StatusUpdate::Assigned { worker_id, endpoint_id, gpu_ids });
        }
        tracing::info!(
            worker_id = %self.worker_id, endpoint_id = self.place.id, lease = body.id,
            gpu_ids = ?Numbers(body), unblocked = was_blocked, "GPU assigned"
        );
    }

    fn given_back(&self, body: &LeaseBody) {
        if self.running.live().remove(&self.number).is_none() {
            return;
        }
        self.place.count(body, false);
        if self.running.core.telling.wants_frequent_updates() {
            let (worker_id, endpoint_id, gpu_ids) = self.named(body);
            self.running.tell(StatusUpdate::Released { worker_id, endpoint_id, gpu_ids });
        }
        tracing::info!(
            worker_id = %self.worker_id, endpoint_id = self.place.id, lease = body.id,
            gpu_ids = ?Numbers(body), "GPU released"
        );
    }

    fn lost(&self, body: &LeaseBody, lost: &LeaseLost) {
        if self.running.live().remove(&self.number).is_none() {
            return;
        }
        self.place.count(body, false);
        let (worker_id, endpoint_id, _) = self.named(body);
        tracing::warn!(worker_id, endpoint_id, lease = body.id, %lost, "GPU lost");
        self.running.tell(StatusUpdate::Lost { worker_id, endpoint_id, reason: lost.to_string() });
    }

    fn named(&self, body: &LeaseBody) -> (String, String, Vec<u32>) {
        let gpu_ids = body.devices.iter().map(|device| device.gpu_id).collect();
        (self.worker_id.to_string(), self.place.id.clone(), gpu_ids)
    }
}

/// The numbers of a lease's GPUs, written only where somebody reads the log.
struct Numbers<'a>(&'a LeaseBody);

impl std::fmt::Debug for Numbers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.devices.iter().map(|device| device.gpu_id)).finish()
    }
}

/// What is kept in the books ends by itself only where it was given a time.
fn watch_books(held: &Held, body: &LeaseBody, books: Arc<Books>) {
    let (held, body) = (held.clone(), body.clone());
    let runtime = held.running.runtime.clone();
    let mut stopping = held.running.stopping();
    // Ends with the lease, or when the client stops.
    runtime.spawn(async move {
        tokio::select! {
            biased;
            lease = books.ended(body.id) => held.lost(&body, &ended(lease.unwrap_or_else(|| body.clone()))),
            () = stopping.changed() => {}
        }
    });
}
