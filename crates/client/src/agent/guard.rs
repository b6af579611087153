//! A granted lease that renews itself until it is released, dropped or lost.
//!
//! Renewed every third of its ttl, by a task of its own from the first renewal on. The task belongs to the guard: it ends when
//! the guard is dropped (and has given the lease back then), when the guard lets the lease go on without it, or with the
//! runtime.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use gpupool_api::lease::{LeaseBody, LeaseState};
use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, timeout};

use super::Inner;
use crate::limits::{ENDED_BY_THEN, RELEASE_PATIENCE};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, LeaseLost};

/// A lease that is held. Dropping it gives the lease back, by a task: where the process ends at once, use
/// [`LeaseGuard::release`] and wait for it. A copy in a forked child gives nothing back.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct LeaseGuard {
    client: AgentClient,
    news: watch::Receiver<News>,
    /// Dropped without a word it means: give the lease back. Taken out once that is done, or not wanted.
    detach: Option<oneshot::Sender<()>>,
    young: YoungId,
    runtime: Handle,
    made_by: u32,
}

/// What was last heard of the lease.
#[derive(Debug)]
struct News {
    lease: LeaseBody,
    lost: Option<LeaseLost>,
}

impl AgentClient {
    /// Keeps an active lease by renewing it.
    pub fn guard_lease(&self, lease: LeaseBody) -> Result<LeaseGuard, ClientError> {
        self.guard_lease_with(lease, Instant::now(), |_, _| {})
    }

    /// The same for one that has lived since an instant, and says when it is lost.
    pub(crate) fn guard_lease_with(
        &self,
        lease: LeaseBody,
        since: Instant,
        on_lost: impl FnOnce(&LeaseBody, &LeaseLost) + Send + 'static,
    ) -> Result<LeaseGuard, ClientError> {
        let (LeaseState::Active, Some(token)) = (lease.state, lease.token) else {
            if lease.state.is_ended() {
                return Err(ClientError::Ended(Box::new(lease)));
            }
            let value = format!("lease {}, {}", lease.id, lease.state.name());
            return Err(ClientError::setting("lease", value, "active, with its token"));
        };
        let told = Instant::now();
        let ends = ends(&lease, told);
        let keeper = Keeper { client: self.clone(), lease: lease.id, token, ttl: ttl(&lease), told, renewed: since };
        let due = keeper.next(since, ends);
        let (tell, news) = watch::channel(News { lease, lost: None });
        let (detach, orders) = oneshot::channel();
        let young = Young::add(&self.inner, due, Keeping { keeper, tell, orders, on_lost: Box::new(on_lost) });
        Ok(LeaseGuard {
            client: self.clone(),
            news,
            detach: Some(detach),
            young,
            runtime: Handle::current(),
            made_by: std::process::id(),
        })
    }
}

impl LeaseGuard {
    /// The lease as the agent last told it.
    pub fn lease(&self) -> LeaseBody {
        self.news.borrow().lease.clone()
    }

    /// Waits until the lease is not held any more, and says why. From then on its devices may be somebody else's.
    pub async fn wait_until_lost(&self) -> LeaseLost {
        let mut news = self.news.clone();
        let lost = news.wait_for(|news| news.lost.is_some()).await.ok().and_then(|news| news.lost.clone());
        lost.unwrap_or_else(|| {
            let news = self.news.borrow();
            let error = "the runtime that renewed it has ended".into();
            LeaseLost::Unreachable { lease: news.lease.id, ttl: ttl(&news.lease), error }
        })
    }

    /// Why the lease is not held any more; `None` while it is, as far as is known.
    pub fn loss(&self) -> Option<LeaseLost> {
        self.news.borrow().lost.clone()
    }

    /// Waits until it is announced that the lease will be taken back, and says when (ISO 8601). Heard at the next renewal.
    pub async fn wait_for_revocation(&self) -> String {
        let mut news = self.news.clone();
        let told = news.wait_for(|news| news.lease.revoke_at.is_some()).await;
        match told.ok().and_then(|news| news.lease.revoke_at.clone()) {
            Some(at) => at,
            None => std::future::pending().await,
        }
    }

    /// Gives the lease back, and waits until the agent has it. `None` where the agent had ended it already. Goes on in the
    /// background where it is not waited for.
    pub async fn release(mut self) -> Result<Option<LeaseBody>, ClientError> {
        let lease = self.news.borrow().lease.id;
        let is_over = matches!(self.loss(), Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. }));
        let released = if is_over { Ok(None) } else { self.client.release_within(lease, RELEASE_PATIENCE).await };
        // Dropped before this, it is given back by a task.
        self.stop_keeping();
        released
    }

    /// Stops renewing without giving the lease back: it goes on for its ttl, or for as long as whoever it was attached to.
    pub fn detach(mut self) -> LeaseBody {
        self.stop_keeping();
        self.lease()
    }

    fn stop_keeping(&mut self) {
        let Some(detach) = self.detach.take() else { return };
        if self.client.inner.young.take(self.young).is_none() {
            // It has a task; where that has ended, there is nothing to stop.
            let _ = detach.send(());
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.made_by != std::process::id() {
            // A forked child: the lease is the parent's, and waking the copy of a task could wait for ever for a lock that was
            // held at the fork. One more reader, never dropped, lets ours go without waking anybody.
            std::mem::forget(self.detach.take());
            std::mem::forget(self.news.clone());
            return;
        }
        // Where it has a task, dropping the sender is what tells it.
        if self.detach.is_some()
            && let Some(keeping) = self.client.inner.young.take(self.young)
        {
            // Ends when the lease is given back, or could not be for a while.
            self.runtime.spawn(async move { keeping.keeper.end(false, None).await });
        }
    }
}

/// What a task needs to keep a lease.
pub(crate) struct Keeping {
    keeper: Keeper,
    tell: watch::Sender<News>,
    orders: oneshot::Receiver<()>,
    on_lost: OnLost,
}

type OnLost = Box<dyn FnOnce(&LeaseBody, &LeaseLost) + Send>;

impl fmt::Debug for Keeping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeping").field("lease", &self.keeper.lease).finish_non_exhaustive()
    }
}

impl Keeping {
    /// Renews until the guard has other orders, or the lease is lost.
    pub(crate) async fn keep(self) {
        let Self { mut keeper, tell, mut orders, on_lost } = self;
        let lost = tokio::select! {
            biased;
            order = &mut orders => return keeper.end(order.is_ok(), None).await,
            lost = keeper.renew_until_lost(&tell) => lost,
        };
        tracing::warn!(lease = keeper.lease, %lost, "lease lost");
        tell.send_modify(|news| news.lost = Some(lost.clone()));
        on_lost(&tell.borrow().lease, &lost);
        let order = orders.await;
        keeper.end(order.is_ok(), Some(lost)).await;
    }
}

/// Whoever renews a lease.
struct Keeper {
    client: AgentClient,
    lease: u64,
    token: u64,
    ttl: Duration,
    /// When we heard that it was granted.
    told: Instant,
    /// When the last renewal that worked was sent.
    renewed: Instant,
}

impl Keeper {
    async fn end(&self, goes_on: bool, lost: Option<LeaseLost>) {
        if goes_on || matches!(lost, Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. })) {
            return;
        }
        if let Err(error) = self.client.release_within(self.lease, RELEASE_PATIENCE).await {
            tracing::warn!(%error, lease = self.lease, "a lease could not be given back; it ends with its ttl");
        }
    }

    /// Time between two renewals.
    fn every(&self) -> Duration {
        self.ttl / 3
    }

    /// When to ask again: sooner where the lease is over by then, whoever renews it.
    fn next(&self, asked: Instant, ends: Option<Instant>) -> Instant {
        let every = asked + self.every();
        ends.filter(|ends| *ends > asked).map_or(every, |ends| every.min(ends))
    }

    async fn renew_until_lost(&mut self, tell: &watch::Sender<News>) -> LeaseLost {
        let every = self.every();
        let mut backoff = Backoff::default();
        loop {
            let sent = Instant::now();
            // A try that hangs is given up while there is time for another one, on another connection; and when the lease
            // may be over, nobody waits to hear it.
            let left = (self.renewed + self.ttl).saturating_duration_since(sent);
            let answer = timeout(every.min(left), self.client.renew(self.lease, self.token)).await;
            let answer = answer.unwrap_or_else(|_| Err(self.client.timeout(every)));
            match answer {
                Ok(lease) if lease.state.is_ended() => return ended(lease),
                Ok(lease) => {
                    self.renewed = sent;
                    backoff.reset();
                    let next = self.next(sent, ends(&lease, self.told));
                    tell.send_modify(|news| news.lease = lease);
                    tokio::time::sleep_until(next).await;
                }
                Err(error) => {
                    if let Some(lost) = self.judge(&error).await {
                        return lost;
                    }
                    tracing::debug!(%error, lease = self.lease, "not renewed; trying again");
                    backoff.pause_until(self.renewed + self.ttl).await;
                }
            }
        }
    }

    /// Whether an error means that the lease is lost.
    async fn judge(&self, error: &ClientError) -> Option<LeaseLost> {
        if error.code() == Some("stale") {
            return Some(LeaseLost::Stale { lease: self.lease, token: self.token });
        }
        if error.is_lease_lost() {
            return Some(self.why_ended(error).await);
        }
        let is_over = self.renewed.elapsed() >= self.ttl;
        is_over.then(|| LeaseLost::Unreachable { lease: self.lease, ttl: self.ttl, error: error.to_string() })
    }

    /// The agent said that it is over; it may remember why.
    async fn why_ended(&self, error: &ClientError) -> LeaseLost {
        match self.client.follow(self.lease, Duration::ZERO).await {
            Ok(lease) => ended(lease),
            Err(_) => LeaseLost::Ended { lease: self.lease, cause: None, reason: error.to_string() },
        }
    }
}

/// Why a lease that is over was lost.
pub(crate) fn ended(lease: LeaseBody) -> LeaseLost {
    let reason = lease.reason.unwrap_or_else(|| format!("it is {}", lease.state.name()));
    LeaseLost::Ended { lease: lease.id, cause: lease.cause, reason }
}

/// When a lease that was granted before that is over, unless it is renewed, or whether or not it is.
fn ends(lease: &LeaseBody, told: Instant) -> Option<Instant> {
    let time = |text: &Option<String>| text.as_ref()?.parse::<Timestamp>().ok();
    let life = time(&lease.expires_at)?.duration_since(time(&lease.granted_at)?);
    told.checked_add(Duration::try_from(life).ok()? + ENDED_BY_THEN)
}

/// How long a lease lives without a renewal, whatever a server says.
fn ttl(lease: &LeaseBody) -> Duration {
    let least = Duration::from_millis(gpupool_core::limits::MIN_TTL.0);
    Duration::try_from_secs_f64(lease.ttl_secs).unwrap_or(least).max(least)
}

// Leases that were granted a moment ago and need no renewal yet. Most are given back before they do: until then none has a
// task of its own, which would cost more than everything else that is done for a lease.
//
// One task for all leases of a client sleeps until the first one is due, hands those that are to tasks of their own, and
// ends when there are none.

/// Which young lease: when it is due, and a number.
pub(crate) type YoungId = (Instant, u64);

/// The young leases of one client.
#[derive(Debug)]
pub(crate) struct Young {
    leases: Mutex<Leases>,
    /// One is due before the task planned to wake, or the client is gone.
    sooner: Arc<Notify>,
    made_by: u32,
}

impl Default for Young {
    fn default() -> Self {
        Self { leases: Mutex::default(), sooner: Arc::default(), made_by: std::process::id() }
    }
}

impl Drop for Young {
    fn drop(&mut self) {
        // The task ends with the client. In a forked child there is none, and waking it could wait for ever for a lock.
        if self.made_by == std::process::id() {
            self.sooner.notify_one();
        }
    }
}

#[derive(Debug, Default)]
struct Leases {
    last: u64,
    by_due: BTreeMap<YoungId, Keeping>,
    /// When the task wakes; `None` where there is no task.
    planned: Option<Instant>,
}

impl Young {
    /// Keeps one until it is due.
    pub(crate) fn add(inner: &Arc<Inner>, due: Instant, keeping: Keeping) -> YoungId {
        let mut leases = inner.young.lock();
        leases.last += 1;
        let id = (due, leases.last);
        leases.by_due.insert(id, keeping);
        match leases.planned {
            None => {
                leases.planned = Some(due);
                tokio::spawn(hand_on(Arc::downgrade(inner), inner.young.sooner.clone(), due));
            }
            Some(planned) if due < planned => inner.young.sooner.notify_one(),
            Some(_) => {}
        }
        id
    }

    /// Takes one out; `None` where it has a task of its own by now.
    pub(crate) fn take(&self, id: YoungId) -> Option<Keeping> {
        self.lock().by_due.remove(&id)
    }

    /// Those that are due; then when the next one is, where there is any.
    fn due(&self, now: Instant) -> (Vec<Keeping>, Option<Instant>) {
        let mut leases = self.lock();
        let later = leases.by_due.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut leases.by_due, later);
        leases.planned = leases.by_due.keys().next().map(|(due, _)| *due);
        (due.into_values().collect(), leases.planned)
    }

    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn hand_on(inner: Weak<Inner>, sooner: Arc<Notify>, mut next: Instant) {
    let gone = Gone(inner.clone());
    loop {
        tokio::select! {
            biased;
            () = sooner.notified() => {}
            () = tokio::time::sleep_until(next) => {}
        }
        // A lease that is kept keeps its client; where there is none, there is none.
        let Some(inner) = inner.upgrade() else { return };
        let (due, later) = inner.young.due(Instant::now());
        for keeping in due {
            // Ends when the guard is dropped, or the lease is lost.
            tokio::spawn(keeping.keep());
        }
        match later {
            Some(later) => next = later,
            // Whoever comes from now on has another task.
            None => return std::mem::forget(gone),
        }
    }
}

/// Where the task ends with its runtime, the next lease needs another.
struct Gone(Weak<Inner>);

impl Drop for Gone {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.young.lock().planned = None;
        }
    }
}

#[cfg(test)]
mod tests;
