//! A granted lease that renews itself until it is released, dropped or lost.
//!
//! It is renewed every third of its ttl, by a task of its own from the first renewal on. The task belongs to the guard:
//! it ends when the guard is dropped (after releasing the lease), when the guard is detached, or with the runtime.

use std::fmt;
use std::time::Duration;

use gpupool_api::lease::{LeaseBody, LeaseState};
use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::renewal_timer::{RenewalKey, RenewalTimer};
use crate::limits::{LEASE_END_MARGIN, RELEASE_TIME_LIMIT};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, LeaseLost};

/// A held lease. Dropping it releases the lease in a task: if the process ends right afterwards, await
/// [`LeaseGuard::release`] instead. A copy in a forked child releases nothing.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct LeaseGuard {
    client: AgentClient,
    status: watch::Receiver<GuardedLease>,
    /// Dropped without a message, it requests the release. Taken out once that is done or not wanted.
    detach: Option<oneshot::Sender<()>>,
    renewal_key: RenewalKey,
    runtime: Handle,
    creator_pid: u32,
}

/// Latest state of the lease.
#[derive(Debug)]
struct GuardedLease {
    lease: LeaseBody,
    lost: Option<LeaseLost>,
}

impl AgentClient {
    /// Holds an active lease by renewing it.
    pub fn guard_lease(&self, lease: LeaseBody) -> Result<LeaseGuard, ClientError> {
        self.guard_lease_since(lease, Instant::now(), |_, _| {})
    }

    /// Same as [`Self::guard_lease`] for a lease that was granted at an earlier instant; calls `on_lost` when it is
    /// lost.
    pub(crate) fn guard_lease_since(
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
        let received_at = Instant::now();
        let ends_at = lease_end(&lease, received_at);
        let (client, ttl) = (self.clone(), ttl(&lease));
        let renewer = LeaseRenewer { client, lease: lease.id, token, ttl, received_at, last_renewed: since };
        let due = renewer.next_renewal(since, ends_at);
        let (status_sender, status) = watch::channel(GuardedLease { lease, lost: None });
        let (detach, detach_receiver) = oneshot::channel();
        let renewal = LeaseRenewal { renewer, status_sender, detach_receiver, on_lost: Box::new(on_lost) };
        let renewal_key = RenewalTimer::add(&self.inner, due, renewal);
        Ok(LeaseGuard {
            client: self.clone(),
            status,
            detach: Some(detach),
            renewal_key,
            runtime: Handle::current(),
            creator_pid: std::process::id(),
        })
    }
}

impl LeaseGuard {
    /// Returns the lease as last reported by the agent.
    pub fn lease(&self) -> LeaseBody {
        self.status.borrow().lease.clone()
    }

    /// Waits until the lease is lost and returns the reason. Its devices may then belong to another lease.
    pub async fn wait_until_lost(&self) -> LeaseLost {
        let mut status = self.status.clone();
        let lost = status.wait_for(|status| status.lost.is_some()).await.ok().and_then(|status| status.lost.clone());
        lost.unwrap_or_else(|| {
            let status = self.status.borrow();
            let error = "the runtime that renewed it has ended".into();
            LeaseLost::Unreachable { lease: status.lease.id, ttl: ttl(&status.lease), error }
        })
    }

    /// Returns the reason for the loss of the lease; `None` while it is held as far as is known.
    pub fn loss(&self) -> Option<LeaseLost> {
        self.status.borrow().lost.clone()
    }

    /// Waits until a revocation is announced and returns its time (ISO 8601). Noticed at the next renewal.
    pub async fn wait_for_revocation(&self) -> String {
        let mut status = self.status.clone();
        let announced = status.wait_for(|status| status.lease.revoke_at.is_some()).await;
        match announced.ok().and_then(|status| status.lease.revoke_at.clone()) {
            Some(at) => at,
            None => std::future::pending().await,
        }
    }

    /// Releases the lease and waits for the agent's response. `None` if the agent had already ended it. If the future
    /// is dropped, the release continues in the background.
    pub async fn release(mut self) -> Result<Option<LeaseBody>, ClientError> {
        let lease = self.status.borrow().lease.id;
        let is_over = matches!(self.loss(), Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. }));
        let released = if is_over { Ok(None) } else { self.client.release_within(lease, RELEASE_TIME_LIMIT).await };
        // If the future is dropped before this point, a task releases the lease.
        self.stop_renewing();
        released
    }

    /// Stops renewing without a release: the lease lives until the end of its ttl, or with the process or connection to
    /// which it is attached.
    pub fn detach(mut self) -> LeaseBody {
        self.stop_renewing();
        self.lease()
    }

    fn stop_renewing(&mut self) {
        let Some(detach) = self.detach.take() else { return };
        if self.client.inner.renewal_timer.take(self.renewal_key).is_none() {
            // The lease has a task; if that task has ended, there is nothing to stop.
            let _ = detach.send(());
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.creator_pid != std::process::id() {
            // A forked child: the lease belongs to the parent, and waking the copy of a task could block forever on a
            // lock that was held at the fork. One more receiver, never dropped, lets this one go without a wake-up.
            std::mem::forget(self.detach.take());
            std::mem::forget(self.status.clone());
            return;
        }
        // If the lease has a task, dropping the sender notifies it.
        if self.detach.is_some()
            && let Some(renewal) = self.client.inner.renewal_timer.take(self.renewal_key)
        {
            // Ends when the lease is released or the time limit is over.
            self.runtime.spawn(async move { renewal.renewer.release_unless_over(false, None).await });
        }
    }
}

/// State of the task that renews a lease.
pub(crate) struct LeaseRenewal {
    renewer: LeaseRenewer,
    status_sender: watch::Sender<GuardedLease>,
    detach_receiver: oneshot::Receiver<()>,
    on_lost: OnLost,
}

type OnLost = Box<dyn FnOnce(&LeaseBody, &LeaseLost) + Send>;

impl fmt::Debug for LeaseRenewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRenewal").field("lease", &self.renewer.lease).finish_non_exhaustive()
    }
}

impl LeaseRenewal {
    /// Renews until the guard is dropped, released or detached, or the lease is lost.
    pub(crate) async fn renew_until_detached(self) {
        let Self { mut renewer, status_sender, mut detach_receiver, on_lost } = self;
        let lost = tokio::select! {
            biased;
            detached = &mut detach_receiver => return renewer.release_unless_over(detached.is_ok(), None).await,
            lost = renewer.renew_until_lost(&status_sender) => lost,
        };
        tracing::warn!(lease = renewer.lease, %lost, "lease lost");
        status_sender.send_modify(|status| status.lost = Some(lost.clone()));
        on_lost(&status_sender.borrow().lease, &lost);
        let detached = detach_receiver.await;
        renewer.release_unless_over(detached.is_ok(), Some(lost)).await;
    }
}

/// The calls that renew and release a lease.
struct LeaseRenewer {
    client: AgentClient,
    lease: u64,
    token: u64,
    ttl: Duration,
    /// Instant at which the grant was received.
    received_at: Instant,
    /// Instant at which the last successful renewal was sent.
    last_renewed: Instant,
}

impl LeaseRenewer {
    async fn release_unless_over(&self, is_detached: bool, lost: Option<LeaseLost>) {
        if is_detached || matches!(lost, Some(LeaseLost::Ended { .. } | LeaseLost::Stale { .. })) {
            return;
        }
        if let Err(error) = self.client.release_within(self.lease, RELEASE_TIME_LIMIT).await {
            tracing::warn!(%error, lease = self.lease, "cannot release the lease; it ends with its ttl");
        }
    }

    /// Returns the time between two renewals.
    fn renewal_interval(&self) -> Duration {
        self.ttl / 3
    }

    /// Returns the instant of the next renewal: earlier if the lease ends before then regardless of renewals.
    fn next_renewal(&self, sent: Instant, ends_at: Option<Instant>) -> Instant {
        let regular = sent + self.renewal_interval();
        ends_at.filter(|ends_at| *ends_at > sent).map_or(regular, |ends_at| regular.min(ends_at))
    }

    async fn renew_until_lost(&mut self, status_sender: &watch::Sender<GuardedLease>) -> LeaseLost {
        let interval = self.renewal_interval();
        let mut backoff = Backoff::default();
        loop {
            let sent = Instant::now();
            // An attempt that hangs is abandoned while there is time for another one on another connection, and at the
            // latest when the ttl is over.
            let left = (self.last_renewed + self.ttl).saturating_duration_since(sent);
            let renewed = timeout(interval.min(left), self.client.renew(self.lease, self.token)).await;
            let renewed = renewed.unwrap_or_else(|_| Err(self.client.timeout(interval)));
            match renewed {
                Ok(lease) if lease.state.is_ended() => return ended_loss(lease),
                Ok(lease) => {
                    self.last_renewed = sent;
                    backoff.reset();
                    let next = self.next_renewal(sent, lease_end(&lease, self.received_at));
                    status_sender.send_modify(|status| status.lease = lease);
                    tokio::time::sleep_until(next).await;
                }
                Err(error) => {
                    if let Some(lost) = self.classify_error(&error).await {
                        return lost;
                    }
                    tracing::debug!(%error, lease = self.lease, "renewal failed; retrying");
                    backoff.pause_until(self.last_renewed + self.ttl).await;
                }
            }
        }
    }

    /// Returns the loss if an error means that the lease is lost.
    async fn classify_error(&self, error: &ClientError) -> Option<LeaseLost> {
        if error.code() == Some("stale") {
            return Some(LeaseLost::Stale { lease: self.lease, token: self.token });
        }
        if error.is_lease_lost() {
            return Some(self.fetch_end_reason(error).await);
        }
        let is_over = self.last_renewed.elapsed() >= self.ttl;
        is_over.then(|| LeaseLost::Unreachable { lease: self.lease, ttl: self.ttl, error: error.to_string() })
    }

    /// Fetches the reason of the end from the agent; if that fails, uses the error.
    async fn fetch_end_reason(&self, error: &ClientError) -> LeaseLost {
        match self.client.follow(self.lease, Duration::ZERO).await {
            Ok(lease) => ended_loss(lease),
            Err(_) => LeaseLost::Ended { lease: self.lease, cause: None, reason: error.to_string() },
        }
    }
}

/// Converts an ended lease to its loss.
pub(crate) fn ended_loss(lease: LeaseBody) -> LeaseLost {
    let reason = lease.reason.unwrap_or_else(|| format!("the lease is {}", lease.state.name()));
    LeaseLost::Ended { lease: lease.id, cause: lease.cause, reason }
}

/// Returns the instant at which a lease is over, whether it expires without a renewal or has a maximum duration.
fn lease_end(lease: &LeaseBody, received_at: Instant) -> Option<Instant> {
    let time = |text: &Option<String>| text.as_ref()?.parse::<Timestamp>().ok();
    let life = time(&lease.expires_at)?.duration_since(time(&lease.granted_at)?);
    received_at.checked_add(Duration::try_from(life).ok()? + LEASE_END_MARGIN)
}

/// Returns the lifetime of a lease without a renewal, with a lower bound.
fn ttl(lease: &LeaseBody) -> Duration {
    let least = Duration::from_millis(gpupool_core::limits::MIN_TTL.0);
    Duration::try_from_secs_f64(lease.ttl_secs).unwrap_or(least).max(least)
}

#[cfg(test)]
mod tests;
