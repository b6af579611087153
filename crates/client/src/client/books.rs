//! The books of a server that only tells statistics: who holds which of its GPUs, decided here by the same [`Pool`] that
//! decides in an agent. Only this process knows of them: other clients of that server show as foreign load.
//!
//! [`Books::take_in`] is told what the server says, everything else asks or gives back. There is no task and no thread: every
//! call first lets happen what was due, and whoever waits wakes when something is.
//!
//! `told` judges what the server says, `look` makes facts of it for the pool, `words` puts the pool into words.

mod look;
#[cfg(test)]
mod tests;
mod told;
mod words;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{Followed, Lease};
use gpupool_api::stats::{Stats, Summary};
use gpupool_core::lease::{Holder, LeaseState};
use gpupool_core::limits::WAITER_PATIENCE;
use gpupool_core::policy::Policies;
use gpupool_core::{
    Answer, Command, Denied, DeviceId, Drain, Effect, LeaseId, Millis, NodeId, Pool, Request, Settings, Time, Token,
};
use tokio::time::{Instant, sleep_until};

use super::capacity::Gpu;
use crate::changes::{Changes, Follower};
use crate::{ClientError, IdempotencyKey};
use told::Told;

/// Who holds which GPU of one server.
#[derive(Debug)]
pub(crate) struct Books {
    /// A lock and not a task with a channel, because status calls are synchronous. Never held across an await.
    state: Mutex<State>,
}

impl Books {
    /// Empty books: what the server has is told by [`Books::take_in`]. `node` names it, `owner` is who asks where a request
    /// does not say; a reading older than `reading_max_age` says nothing about who else uses a GPU, so nobody gets it.
    pub fn new(node: &str, owner: &str, reading_max_age: Duration) -> Self {
        let max_age = Millis(u64::try_from(reading_max_age.as_millis()).unwrap_or(u64::MAX));
        let settings = Settings { drain: Drain::AtOnce, reading_max_age: Some(max_age) };
        let state = State {
            pool: Pool::new(settings, Policies::default()),
            begun: Instant::now(),
            max_age,
            owner: owner.into(),
            node: node.into(),
            node_id: None,
            devices: BTreeMap::new(),
            told: BTreeMap::new(),
            changes: Arc::default(),
        };
        Self { state: Mutex::new(state) }
    }

    /// A look at the server: GPUs that are new, gone or back, and a reading of each. `stats`, where they were asked for, tell
    /// sizes, UUIDs and health, which hold until the next ones. What the server itself calls stale or failed says nothing.
    pub fn take_in(&self, summary: &Summary, stats: Option<&Stats>) {
        self.lock().take_in(summary, stats);
    }

    /// The server does not answer: no new work there until it is seen again. What is held stays held.
    pub fn away(&self) {
        self.lock().close();
    }

    /// Asks. The answer is active, offered (a hedged request), or waits and must be followed; asked again with the same key it
    /// is the same lease. Refusals carry the codes of an agent, or `not_seen` before the server was first looked at.
    pub fn request(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<Lease, ClientError> {
        let mut state = self.lock();
        if state.node_id.is_none() {
            return Err(words::not_seen(&state.node));
        }
        let mut body = body.clone();
        body.owner.get_or_insert_with(|| Arc::clone(&state.owner));
        state.select_by_number(&mut body.select);
        let request = Request::try_from(body).map_err(|error| words::refused(error.into()))?;
        let key = Some(key.as_str().into());
        state.ask(Command::Request { request: Arc::new(request), key })
    }

    /// Keeps waiting requests in the queue, and answers as soon as any of them does not wait; after `wait` at the latest.
    /// Nobody asking for a request for 15 s takes it out of the queue.
    pub async fn follow_all(&self, leases: &[u64], wait: Duration) -> Followed {
        let now = Instant::now();
        let until = now.checked_add(wait).unwrap_or(now + FAR);
        let mut changes = self.lock().changes.follow();
        loop {
            changes.mark_seen();
            let (followed, due) = self.lock().follow(leases);
            let now = Instant::now();
            if !followed.changed.is_empty() || !followed.unknown.is_empty() || now >= until {
                return followed;
            }
            let again = until.min(now + Duration::from_millis(WAITER_PATIENCE.0 / 3));
            change_or(&mut changes, due.map_or(again, |due| due.min(again))).await;
        }
    }

    /// Takes an offer.
    pub fn confirm(&self, lease: u64, token: u64) -> Result<Lease, ClientError> {
        self.lock().ask(Command::Confirm { lease: LeaseId(lease), token: Token(token) })
    }

    /// Gives a lease back, or stops waiting. Twice is harmless; `None` where there is no such lease.
    pub fn release(&self, lease: u64) -> Option<Lease> {
        self.lock().ask(Command::Release { lease: LeaseId(lease) }).ok()
    }

    /// A lease as it is now; `None` where there is no such lease, or it is long over.
    pub fn lease(&self, lease: u64) -> Option<Lease> {
        let mut state = self.lock();
        state.tick();
        state.body(LeaseId(lease))
    }

    /// Waits for the end of a lease (such as after its `max_duration_secs`); `None` where it is not known any more.
    pub async fn ended(&self, lease: u64) -> Option<Lease> {
        let mut changes = self.lock().changes.follow();
        loop {
            changes.mark_seen();
            let due = {
                let mut state = self.lock();
                state.tick();
                let known = state.pool.lease(LeaseId(lease))?;
                if known.state.is_ended() {
                    return state.body(LeaseId(lease));
                }
                state.due()
            };
            change_or(&mut changes, due.unwrap_or_else(|| Instant::now() + FAR)).await;
        }
    }

    /// Every GPU the server was seen to have, by number.
    pub fn gpus(&self) -> Vec<Gpu> {
        let mut state = self.lock();
        state.tick();
        words::gpus(&state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock is known to panic; should it, one caller's panic is not made everybody's.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Later than anybody waits in one go.
const FAR: Duration = Duration::from_secs(86_400);

async fn change_or(changes: &mut Follower, due: Instant) {
    tokio::select! {
        biased;
        () = changes.changed() => {}
        () = sleep_until(due) => {}
    }
}

#[derive(Debug)]
struct State {
    pool: Pool,
    /// When the pool's clock stood at zero.
    begun: Instant,
    max_age: Millis,
    owner: Arc<str>,
    node: Arc<str>,
    /// The server in the pool, once it was looked at.
    node_id: Option<NodeId>,
    /// Its GPUs in the pool, by its numbers.
    devices: BTreeMap<u32, DeviceId>,
    /// What it told of them.
    told: BTreeMap<u32, Told>,
    /// Wakes whoever waits when a lease is granted, offered or over.
    changes: Arc<Changes>,
}

impl State {
    fn now(&self) -> Time {
        Time(u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// When the pool wants to hear the clock.
    fn due(&self) -> Option<Instant> {
        let at = self.pool.next_deadline()?;
        Some(self.begun.checked_add(Duration::from_millis(at.0)).unwrap_or_else(|| Instant::now() + FAR))
    }

    fn tick(&mut self) {
        self.tell(Command::Tick);
    }

    /// A command that is never denied.
    fn tell(&mut self, command: Command) {
        let told = self.apply(command);
        debug_assert!(told.is_ok(), "{told:?}");
    }

    /// A command about a lease.
    fn ask(&mut self, command: Command) -> Result<Lease, ClientError> {
        let lease = match self.apply(command).map_err(words::refused)? {
            Answer::Lease(lease) => lease,
            Answer::Done | Answer::Node(..) => unreachable!("a command about a lease is answered with the lease"),
        };
        self.body(lease).ok_or_else(|| words::refused(Denied::UnknownLease(lease)))
    }

    fn apply(&mut self, command: Command) -> Result<Answer, Denied> {
        let now = self.now();
        let (answer, outcome) = self.pool.apply(now, command);
        let mut is_change = false;
        for effect in outcome.effects {
            is_change |= matches!(effect, Effect::Granted { .. } | Effect::Offered { .. } | Effect::Ended { .. });
            if let Effect::Granted { lease, token, .. } = effect {
                // It lives in this process, so there is nobody whose heartbeat could stop. It may be over already.
                let _ = self.pool.apply(now, Command::Attach { lease, token, holder: Holder::Connection });
            }
        }
        if is_change {
            self.changes.tell();
        }
        answer
    }

    fn follow(&mut self, leases: &[u64]) -> (Followed, Option<Instant>) {
        self.tick();
        let mut followed = Followed::default();
        for &lease in leases {
            match self.apply(Command::Follow { lease: LeaseId(lease) }) {
                Err(_) => followed.unknown.push(lease),
                Ok(_) => {
                    let known = self.pool.lease(LeaseId(lease));
                    let waits_no_more = known.filter(|known| known.state != LeaseState::Queued);
                    followed.changed.extend(waits_no_more.map(|known| words::lease(self, known)));
                }
            }
        }
        (followed, self.due())
    }

    fn body(&self, lease: LeaseId) -> Option<Lease> {
        Some(words::lease(self, self.pool.lease(lease)?))
    }
}
