//! Asking for GPUs, following, renewing and giving back, one call each.

use std::time::Duration;

use gpupool_api::lease::{AttachBody, Attached, FollowBody, Followed, Lease, LeaseList, TokenBody};
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody};

use tokio::time::{Instant, timeout_at};

use super::call::Call;
use crate::backoff::Backoff;
use crate::limits::FOLLOW_WAIT_MOST;
use crate::{AgentClient, ClientError, IdempotencyKey};

/// Which leases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseQuery {
    /// Only in this state; `live` (the default) for those that are not over, `all` for all that are remembered.
    pub state: Option<String>,
    /// Only this owner's.
    pub owner: Option<String>,
    /// Only those with a larger number: `next` of the page before.
    pub after: Option<u64>,
    /// At most so many; as many as the agent gives at once unless said.
    pub limit: Option<usize>,
}

impl AgentClient {
    /// Asks for GPUs, and answers with a lease that is active, or queued after the body's `wait_secs`. Follow it then: a
    /// waiter nobody asks for leaves the queue. [`AgentClient::wait_until_granted`] does all of it.
    ///
    /// What breaks on the way is asked again under the same key, so that it never takes two GPUs.
    pub async fn request(&self, body: &RequestBody) -> Result<Lease, ClientError> {
        self.request_as(body, &IdempotencyKey::random()).await
    }

    /// The same under a key of the caller's own: asked again with it, even by another process, it is the same request.
    pub async fn request_as(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<Lease, ClientError> {
        let wait = body.wait_secs.and_then(|secs| Duration::try_from_secs_f64(secs).ok()).unwrap_or_default();
        let call = Call::post("/v1/leases", body).header(IDEMPOTENCY_KEY, key.as_str());
        self.ask(&call.waits(wait.min(FOLLOW_WAIT_MOST))).await
    }

    /// One page of leases, by number. Ask with `after` set to the page's `next` for the one after it.
    pub async fn leases(&self, query: &LeaseQuery) -> Result<LeaseList, ClientError> {
        let call = Call::get("/v1/leases")
            .query("state", query.state.as_ref())
            .query("owner", query.owner.as_ref())
            .query("after", query.after)
            .query("limit", query.limit);
        self.ask(&call).await
    }

    /// A lease as it is, or as it is when it waits no longer, but after `wait` at the latest.
    pub async fn follow(&self, lease: u64, wait: Duration) -> Result<Lease, ClientError> {
        let wait = wait.min(FOLLOW_WAIT_MOST);
        let secs = Some(wait.as_secs_f64()).filter(|secs| *secs > 0.0);
        self.ask(&Call::get(format!("/v1/leases/{lease}")).query("wait_secs", secs).waits(wait)).await
    }

    /// Follows many leases (1 to 4096, each once) by one call, which keeps all of them in the queue: comes back as soon as
    /// any of them does not wait, with all that do not, but after `wait` at the latest. Ask again for those that still do.
    pub async fn follow_all(&self, leases: &[u64], wait: Duration) -> Result<Followed, ClientError> {
        let wait = wait.min(FOLLOW_WAIT_MOST);
        let body = FollowBody { leases: leases.to_vec(), wait_secs: wait.as_secs_f64() };
        self.ask(&Call::post("/v1/leases/follow", &body).waits(wait)).await
    }

    /// Keeps a lease for another ttl.
    pub async fn renew(&self, lease: u64, token: u64) -> Result<Lease, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/renew"), &TokenBody { token })).await
    }

    /// Takes what was offered.
    pub async fn confirm(&self, lease: u64, token: u64) -> Result<Lease, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/confirm"), &TokenBody { token })).await
    }

    /// Ties a lease to this process, so that it ends with it. Only over the Unix socket.
    pub async fn attach(&self, lease: u64, body: &AttachBody) -> Result<Attached, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/attach"), body)).await
    }

    /// Gives a lease back, or stops waiting. Twice is harmless; `None` where the agent does not know it any more.
    pub async fn release(&self, lease: u64) -> Result<Option<Lease>, ClientError> {
        match self.ask(&Call::delete(format!("/v1/leases/{lease}"))).await {
            Ok(lease) => Ok(Some(lease)),
            Err(error) if error.code() == Some("unknown_lease") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The same, tried for so long where the agent is being restarted. A fault that may pass is what went wrong last.
    pub async fn release_within(&self, lease: u64, patience: Duration) -> Result<Option<Lease>, ClientError> {
        let until = Instant::now() + patience;
        let (mut backoff, mut last) = (Backoff::default(), None);
        loop {
            match timeout_at(until, self.release(lease)).await {
                Ok(Err(error)) if error.is_passing() && Instant::now() < until => {
                    last = Some(error);
                    backoff.pause_until(until).await;
                }
                Ok(outcome) => return outcome,
                Err(_) => return Err(last.unwrap_or_else(|| self.timeout(patience))),
            }
        }
    }
}
