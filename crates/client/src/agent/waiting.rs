//! Asking and waiting one's turn, such that giving up at any instant leaves nothing behind.
//!
//! The asking runs in a task of its own, which ends with the agent's answer: so the answer is known, and what it granted
//! can be given back, even when nobody waits for it any more.

use std::fmt;
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{LeaseBody, LeaseState};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits::{AGENT_AWAY_LIMIT, CANCEL_PATIENCE, FOLLOW_WAIT, RELEASE_PATIENCE};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, IdempotencyKey, LeaseGuard};

/// How to wait.
#[derive(Debug, Clone)]
pub struct WaitOptions {
    /// Makes it the same request as another one with this key; a random one unless given.
    pub key: Option<IdempotencyKey>,
    /// How often at least progress is told.
    pub refresh: Duration,
}

impl Default for WaitOptions {
    fn default() -> Self {
        Self { key: None, refresh: FOLLOW_WAIT }
    }
}

/// How the waiting goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitProgress {
    /// It waits its turn.
    Waiting {
        /// The lease it will be.
        lease: u64,
        /// 1 for the next one in the queue.
        position: Option<usize>,
        /// Why it waits, in a sentence.
        reason: Option<String>,
    },
    /// The agent is away; it is asked again.
    AgentAway {
        /// The lease it will be.
        lease: u64,
        /// How it does not answer.
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
    /// Asks for GPUs, waits until they are granted, and keeps them by renewing the lease.
    ///
    /// How long to wait at most is the body's `wait_limit_secs`; where it passes, the error is [`ClientError::Ended`].
    /// `queue: false` does not wait at all. An agent that is restarted meanwhile keeps the place in the queue.
    ///
    /// Dropping the future takes the request back, also while the answer is on its way. That is done by a task, so the
    /// runtime has to live on for a moment; where it does not, the agent forgets the waiter after 15 s, and what it granted
    /// after the ttl.
    pub async fn wait_until_granted(
        &self,
        body: RequestBody,
        options: WaitOptions,
        mut on_progress: impl FnMut(WaitProgress),
    ) -> Result<LeaseGuard, ClientError> {
        let body = RequestBody { wait_secs: None, ..body };
        let mut wanted = self.want(body, options.key.unwrap_or_else(IdempotencyKey::random)).await?;
        if wanted.lease.state == LeaseState::Queued {
            on_progress(waiting(&wanted.lease));
        }
        let mut away: Option<Instant> = None;
        let mut backoff = Backoff::default();
        loop {
            let (lease, token) = (wanted.lease.id, wanted.lease.token);
            match wanted.lease.state {
                LeaseState::Active => return self.guard_lease(wanted.into_lease()),
                LeaseState::Queued | LeaseState::Offered => {}
                _ => return Err(ClientError::Ended(Box::new(wanted.into_lease()))),
            }
            let asked = Instant::now();
            let answer = match (wanted.lease.state, token) {
                // Offered: it waits nowhere else, so it takes what it can get.
                (LeaseState::Offered, Some(token)) => self.confirm(lease, token).await,
                _ => self.follow(lease, options.refresh).await,
            };
            match answer {
                Ok(answer) => {
                    away = None;
                    wanted.lease = answer;
                }
                Err(error) if error.is_transient() && away.is_none_or(|since| since.elapsed() < AGENT_AWAY_LIMIT) => {
                    away.get_or_insert(asked);
                    on_progress(WaitProgress::AgentAway { lease, error: error.to_string() });
                }
                Err(error) => return Err(error),
            }
            if wanted.lease.state == LeaseState::Queued {
                if away.is_none() {
                    on_progress(waiting(&wanted.lease));
                }
                if asked.elapsed() < options.refresh / 2 {
                    // Answered before its time: an agent that is stopping, or away. Not to be asked without pause.
                    tokio::time::sleep(backoff.next().min(options.refresh)).await;
                } else {
                    backoff.reset();
                }
            }
        }
    }

    /// Takes back what was asked for under a key of the caller's own, and waits until it is: asked again it is the same
    /// request, whether or not its answer ever came. For who ends at once after it stopped waiting.
    pub async fn cancel_request(&self, body: &RequestBody, key: &IdempotencyKey) {
        let body = RequestBody { wait_secs: None, ..body.clone() };
        let again = async {
            if let Ok(lease) = self.request_as(&body, key).await {
                // Where it fails, the agent forgets a waiter nobody asks for.
                let _ = self.release(lease.id).await;
            }
        };
        let _ = tokio::time::timeout(CANCEL_PATIENCE, again).await;
    }

    async fn want(&self, body: RequestBody, key: IdempotencyKey) -> Result<Wanted, ClientError> {
        let (answer, answered) = oneshot::channel();
        let client = self.clone();
        // Ends with the answer, or when the client has tried for long enough.
        tokio::spawn(async move {
            let asked = client.request_as(&body, &key).await;
            // Where nobody waits for the answer any more, dropping it gives the lease back.
            let _ = answer.send(asked.map(|lease| Wanted::new(client, lease)));
        });
        answered.await.unwrap_or_else(|_| Err(self.unreachable("the runtime is ending")))
    }
}

fn waiting(lease: &LeaseBody) -> WaitProgress {
    WaitProgress::Waiting { lease: lease.id, position: lease.queue_position, reason: lease.reason.clone() }
}

/// A request that is given back unless it is taken out.
struct Wanted {
    client: AgentClient,
    lease: LeaseBody,
    runtime: Handle,
    made_by: u32,
    is_wanted: bool,
}

impl Wanted {
    fn new(client: AgentClient, lease: LeaseBody) -> Self {
        Self { client, lease, runtime: Handle::current(), made_by: std::process::id(), is_wanted: false }
    }

    fn into_lease(mut self) -> LeaseBody {
        self.is_wanted = true;
        self.lease.clone()
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        // A forked child's copy is not the child's to give back.
        if self.is_wanted || self.made_by != std::process::id() {
            return;
        }
        let (client, lease) = (self.client.clone(), self.lease.id);
        // Ends within the patience.
        self.runtime.spawn(async move {
            if let Err(error) = client.release_within(lease, RELEASE_PATIENCE).await {
                tracing::warn!(%error, lease, "a request nobody waits for could not be taken back; it ends by itself");
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
