//! Requests GPUs and waits for the grant. Cancelling the wait at any instant leaves nothing behind.
//!
//! The request runs in a task of its own, which ends with the agent's response. So the response is always known, and a
//! grant that arrives after the caller has gone is released.

use std::fmt;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits::{AGENT_AWAY_LIMIT, CANCEL_TIME_LIMIT, FOLLOW_WAIT, RELEASE_TIME_LIMIT};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, IdempotencyKey, LeaseGuard};

/// Options of a wait.
#[derive(Debug, Clone)]
pub struct WaitOptions {
    /// Idempotency key of the request; a random one if unset.
    pub key: Option<IdempotencyKey>,
    /// Maximum time between two progress reports.
    pub refresh: Duration,
}

impl Default for WaitOptions {
    fn default() -> Self {
        Self { key: None, refresh: FOLLOW_WAIT }
    }
}

/// Progress of a wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitProgress {
    /// The request is queued.
    Waiting {
        /// Number of the future lease.
        lease: u64,
        /// Position in the queue; 1 is the next request.
        position: Option<usize>,
        /// Reason for the wait, in a sentence.
        reason: Option<String>,
    },
    /// The agent is away; the client keeps trying.
    AgentAway {
        /// Number of the future lease.
        lease: u64,
        /// Error of the last attempt.
        error: String,
    },
}

impl fmt::Display for WaitProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lease, reason) = match self {
            Self::Waiting { lease, reason, .. } => (lease, reason.as_deref()),
            Self::AgentAway { lease, error } => (lease, Some(error.as_str())),
        };
        write!(f, "lease {lease} waits")?;
        if let Self::Waiting { position: Some(position), .. } = self {
            write!(f, ", number {position} in the queue")?;
        }
        reason.map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}

impl AgentClient {
    /// Requests GPUs, waits until they are granted, and renews the lease.
    ///
    /// The body's `wait_limit_secs` limits the wait; after it the error is [`ClientError::Ended`]. `queue: false` does
    /// not wait at all. The queue position survives a restart of the agent.
    ///
    /// Dropping the future cancels the request, even while its response is on its way. A task does that, so the runtime
    /// has to live on for a moment; otherwise the agent drops the waiter after 15 s, and a grant after its ttl.
    pub async fn wait_until_granted(
        &self,
        body: RequestBody,
        options: WaitOptions,
        mut on_progress: impl FnMut(WaitProgress),
    ) -> Result<LeaseGuard, ClientError> {
        let body = RequestBody { wait_secs: None, ..body };
        let mut unclaimed = self.request_unclaimed(body, options.key.unwrap_or_else(IdempotencyKey::random)).await?;
        if unclaimed.lease.state == LeaseState::Queued {
            on_progress(waiting_progress(&unclaimed.lease));
        }
        let mut away_since: Option<Instant> = None;
        let mut backoff = Backoff::default();
        loop {
            let (lease, token) = (unclaimed.lease.id, unclaimed.lease.token);
            match unclaimed.lease.state {
                LeaseState::Active => return self.guard_lease(unclaimed.into_lease()),
                LeaseState::Queued | LeaseState::Offered => {}
                _ => return Err(ClientError::Ended(Box::new(unclaimed.into_lease()))),
            }
            let sent = Instant::now();
            let response = match (unclaimed.lease.state, token) {
                // The request waits at no other server, so it takes the offer.
                (LeaseState::Offered, Some(token)) => self.confirm(lease, token).await,
                _ => self.follow(lease, options.refresh).await,
            };
            match response {
                Ok(response) => {
                    away_since = None;
                    unclaimed.lease = response;
                }
                Err(error)
                    if error.is_transient() && away_since.is_none_or(|since| since.elapsed() < AGENT_AWAY_LIMIT) =>
                {
                    away_since.get_or_insert(sent);
                    on_progress(WaitProgress::AgentAway { lease, error: error.to_string() });
                }
                Err(error) => return Err(error),
            }
            if unclaimed.lease.state == LeaseState::Queued {
                if away_since.is_none() {
                    on_progress(waiting_progress(&unclaimed.lease));
                }
                if sent.elapsed() < options.refresh / 2 {
                    // The response came early: the agent is stopping or away. It must not be called without a pause.
                    tokio::time::sleep(backoff.next_pause().min(options.refresh)).await;
                } else {
                    backoff.reset();
                }
            }
        }
    }

    /// Cancels a request with a key of the caller and waits until the agent has done so: sent again, it is the same
    /// request, whether or not its response ever arrived. For programs that exit right after they stop waiting.
    pub async fn cancel_request(&self, body: &RequestBody, key: &IdempotencyKey) {
        let body = RequestBody { wait_secs: None, ..body.clone() };
        let cancelled = async {
            if let Ok(lease) = self.request_as(&body, key).await {
                // If it fails, the agent drops the waiter, which is no longer followed.
                let _ = self.release(lease.id).await;
            }
        };
        let _ = tokio::time::timeout(CANCEL_TIME_LIMIT, cancelled).await;
    }

    async fn request_unclaimed(&self, body: RequestBody, key: IdempotencyKey) -> Result<UnclaimedLease, ClientError> {
        let (sender, receiver) = oneshot::channel();
        let client = self.clone();
        // Ends with the response, or when the retries are exhausted.
        tokio::spawn(async move {
            let requested = client.request_as(&body, &key).await;
            // If the caller has gone, dropping the result releases the lease.
            let _ = sender.send(requested.map(|lease| UnclaimedLease::new(client, lease)));
        });
        receiver.await.unwrap_or_else(|_| Err(self.unreachable("the runtime is ending")))
    }
}

fn waiting_progress(lease: &LeaseBody) -> WaitProgress {
    WaitProgress::Waiting { lease: lease.id, position: lease.queue_position, reason: lease.reason.clone() }
}

/// A lease that is released on drop unless it is claimed.
struct UnclaimedLease {
    client: AgentClient,
    lease: LeaseBody,
    runtime: Handle,
    creator_pid: u32,
    is_claimed: bool,
}

impl UnclaimedLease {
    fn new(client: AgentClient, lease: LeaseBody) -> Self {
        Self { client, lease, runtime: Handle::current(), creator_pid: std::process::id(), is_claimed: false }
    }

    fn into_lease(mut self) -> LeaseBody {
        self.is_claimed = true;
        self.lease.clone()
    }
}

impl Drop for UnclaimedLease {
    fn drop(&mut self) {
        // A copy in a forked child must not release the lease.
        if self.is_claimed || self.creator_pid != std::process::id() {
            return;
        }
        let (client, lease) = (self.client.clone(), self.lease.id);
        // Ends within the time limit.
        self.runtime.spawn(async move {
            if let Err(error) = client.release_within(lease, RELEASE_TIME_LIMIT).await {
                tracing::warn!(%error, lease, "cannot cancel an abandoned request; it ends by itself");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_reads_as_a_sentence() {
        let waiting = WaitProgress::Waiting { lease: 7, position: Some(2), reason: Some("all GPUs are taken".into()) };
        assert_eq!(waiting.to_string(), "lease 7 waits, number 2 in the queue: all GPUs are taken");
        let waiting = WaitProgress::Waiting { lease: 7, position: None, reason: None };
        assert_eq!(waiting.to_string(), "lease 7 waits");
        assert_eq!(WaitProgress::AgentAway { lease: 7, error: "gone".into() }.to_string(), "lease 7 waits: gone");
    }
}
