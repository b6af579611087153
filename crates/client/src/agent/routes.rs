//! Every route of an agent, one call each: leases first, then what everybody may see, then what administrators do.

use std::time::Duration;

use gpupool_api::history::{HistoryBody, UsageBody};
use gpupool_api::lease::{
    AttachBody, AttachResponse, FencingTokenBody, FollowBody, FollowResponse, LeaseBody, LeaseList, RevokeBody,
};
use gpupool_api::pool::{DeviceBody, DeviceList, PoolBody};
use gpupool_api::simulate::{FaultBody, FaultList};
use gpupool_api::stats::{GpuHistoryBody, HealthBody, StatsBody, SummaryBody};
use gpupool_api::tokens::{AccessTokenList, NewToken, TokenCreated};
use gpupool_api::{IDEMPOTENCY_KEY, RequestBody};
use tokio::time::{Instant, timeout_at};

use super::call::Call;
use crate::limits::{FOLLOW_WAIT_MOST, KEY_BYTES};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, random};

/// Makes a retried request the same request, so that it never takes two GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// A key nobody else has.
    pub fn random() -> Self {
        Self(format!("{:016x}{:016x}", random::number(), random::number()))
    }

    /// A key of the caller's own, such as the id of a job that may be submitted twice.
    pub fn new(text: impl Into<String>) -> Result<Self, ClientError> {
        let text = text.into();
        let is_printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && text.trim() == text;
        if text.is_empty() || text.len() > KEY_BYTES || !is_printable {
            let allowed = format!("1..={KEY_BYTES} printable ASCII characters, no blank at either end");
            return Err(ClientError::setting("idempotency key", format!("{text:?}"), allowed));
        }
        Ok(Self(text))
    }

    /// The key as it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Which leases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseQuery {
    /// Only in this state; `live` (the default) for those that are not over, `all` for all that are remembered.
    pub state: Option<String>,
    /// Only this owner's.
    pub owner: Option<String>,
    /// Only those on the node with this name.
    pub node: Option<String>,
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
    pub async fn request(&self, body: &RequestBody) -> Result<LeaseBody, ClientError> {
        self.request_as(body, &IdempotencyKey::random()).await
    }

    /// The same under a key of the caller's own: asked again with it, even by another process, it is the same request.
    pub async fn request_as(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        let wait = body.wait_secs.and_then(|secs| Duration::try_from_secs_f64(secs).ok()).unwrap_or_default();
        let call = Call::post("/v1/leases", body).header(IDEMPOTENCY_KEY, key.as_str());
        self.ask(&call.waits(wait.min(FOLLOW_WAIT_MOST))).await
    }

    /// One page of leases, by number. Ask with `after` set to the page's `next` for the one after it.
    pub async fn leases(&self, query: &LeaseQuery) -> Result<LeaseList, ClientError> {
        let call = Call::get("/v1/leases")
            .query("state", query.state.as_ref())
            .query("owner", query.owner.as_ref())
            .query("node", query.node.as_ref())
            .query("after", query.after)
            .query("limit", query.limit);
        self.ask(&call).await
    }

    /// A lease as it is, or as it is when it waits no longer, but after `wait` at the latest.
    pub async fn follow(&self, lease: u64, wait: Duration) -> Result<LeaseBody, ClientError> {
        let wait = wait.min(FOLLOW_WAIT_MOST);
        let secs = Some(wait.as_secs_f64()).filter(|secs| *secs > 0.0);
        self.ask(&Call::get(format!("/v1/leases/{lease}")).query("wait_secs", secs).waits(wait)).await
    }

    /// Follows many leases (1 to 4096, each once) by one call, which keeps all of them in the queue: comes back as soon as
    /// any of them does not wait, with all that do not, but after `wait` at the latest. Ask again for those that still do.
    pub async fn follow_leases(&self, leases: &[u64], wait: Duration) -> Result<FollowResponse, ClientError> {
        let wait = wait.min(FOLLOW_WAIT_MOST);
        let body = FollowBody { leases: leases.to_vec(), wait_secs: wait.as_secs_f64() };
        self.ask(&Call::post("/v1/leases/follow", &body).waits(wait)).await
    }

    /// Keeps a lease for another ttl.
    pub async fn renew(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/renew"), &FencingTokenBody { token })).await
    }

    /// Takes what was offered.
    pub async fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/confirm"), &FencingTokenBody { token })).await
    }

    /// Ties a lease to this process, so that it ends with it. Only over the Unix socket.
    pub async fn attach(&self, lease: u64, body: &AttachBody) -> Result<AttachResponse, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/attach"), body)).await
    }

    /// Gives a lease back, or stops waiting. Twice is harmless; `None` where the agent does not know it any more.
    pub async fn release(&self, lease: u64) -> Result<Option<LeaseBody>, ClientError> {
        match self.ask(&Call::delete(format!("/v1/leases/{lease}"))).await {
            Ok(lease) => Ok(Some(lease)),
            Err(error) if error.code() == Some("unknown_lease") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The same, tried for so long where the agent is being restarted. A fault that may pass is what went wrong last.
    pub async fn release_within(&self, lease: u64, patience: Duration) -> Result<Option<LeaseBody>, ClientError> {
        let until = Instant::now() + patience;
        let (mut backoff, mut last) = (Backoff::default(), None);
        loop {
            match timeout_at(until, self.release(lease)).await {
                Ok(Err(error)) if error.is_transient() && Instant::now() < until => {
                    last = Some(error);
                    backoff.pause_until(until).await;
                }
                Ok(outcome) => return outcome,
                Err(_) => return Err(last.unwrap_or_else(|| self.timeout(patience))),
            }
        }
    }
}

// What everybody may see: the pool, its devices, what they read, what happened, who used how much.

/// Which records of the audit trail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryQuery {
    /// Only this owner's.
    pub owner: Option<String>,
    /// Only of devices of the node with this name.
    pub node: Option<String>,
    /// Only of this device.
    pub gpu_id: Option<u32>,
    /// From this time on, ISO 8601 with an offset.
    pub since: Option<String>,
    /// Before this time.
    pub until: Option<String>,
    /// Go on after this: `next` of the page before.
    pub after: Option<String>,
    /// At most so many; as many as the agent gives at once unless said.
    pub limit: Option<usize>,
}

/// What usage is summed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UsageGrouping {
    /// Whoever took the leases.
    #[default]
    Owner,
    /// The devices.
    Gpu,
}

impl AgentClient {
    /// Who decides there, and how things stand.
    pub async fn pool(&self) -> Result<PoolBody, ClientError> {
        self.ask(&Call::get("/v1/pool")).await
    }

    /// Each device with what it reads and who holds it.
    pub async fn devices(&self) -> Result<DeviceList, ClientError> {
        self.ask(&Call::get("/v1/devices")).await
    }

    /// What the GPUs read.
    pub async fn stats(&self) -> Result<StatsBody, ClientError> {
        self.ask(&Call::get("/gpu/stats").may_be_degraded()).await
    }

    /// What the GPUs read, in short.
    pub async fn summary(&self) -> Result<SummaryBody, ClientError> {
        self.ask(&Call::get("/gpu/summary").may_be_degraded()).await
    }

    /// The last readings of each GPU.
    pub async fn gpu_history(&self) -> Result<GpuHistoryBody, ClientError> {
        self.ask(&Call::get("/gpu/history")).await
    }

    /// Whether all is well there; an agent that is not well answers too.
    pub async fn health(&self) -> Result<HealthBody, ClientError> {
        self.ask(&Call::get("/health").may_be_degraded()).await
    }

    /// How the agent is set up.
    pub async fn config(&self) -> Result<serde_json::Value, ClientError> {
        self.ask(&Call::get("/config")).await
    }

    /// One page of the audit trail, oldest first. Ask with `after` set to the page's `next` for the one after it.
    pub async fn history(&self, query: &HistoryQuery) -> Result<HistoryBody, ClientError> {
        let call = Call::get("/v1/history")
            .query("owner", query.owner.as_ref())
            .query("node", query.node.as_ref())
            .query("gpu_id", query.gpu_id)
            .query("since", query.since.as_ref())
            .query("until", query.until.as_ref())
            .query("after", query.after.as_ref())
            .query("limit", query.limit);
        self.ask(&call).await
    }

    /// Who held how much, since a time (ISO 8601 with an offset) or for the last 7 days.
    pub async fn usage(&self, by: UsageGrouping, since: Option<&str>) -> Result<UsageBody, ClientError> {
        let by = match by {
            UsageGrouping::Owner => "owner",
            UsageGrouping::Gpu => "gpu",
        };
        self.ask(&Call::get("/v1/usage").query("by", Some(by)).query("since", since)).await
    }

    /// What Prometheus reads.
    pub async fn metrics(&self) -> Result<String, ClientError> {
        self.ask_text(&Call::get("/metrics")).await
    }

    /// The description of all routes.
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.ask(&Call::get("/openapi.json")).await
    }
}

// What administrators do: take back, cordon, hand out tokens, and break simulated devices.

impl AgentClient {
    /// Takes a lease back, at once or after so many seconds of grace.
    pub async fn revoke(&self, lease: u64, grace_secs: f64) -> Result<LeaseBody, ClientError> {
        self.ask(&Call::post(format!("/v1/leases/{lease}/revoke"), &RevokeBody { grace_secs })).await
    }

    /// Stops new work on a device.
    pub async fn cordon(&self, gpu_id: u32) -> Result<DeviceBody, ClientError> {
        self.ask(&Call::post(format!("/v1/devices/{gpu_id}/cordon"), &serde_json::json!({}))).await
    }

    /// Allows new work on a device again.
    pub async fn uncordon(&self, gpu_id: u32) -> Result<DeviceBody, ClientError> {
        self.ask(&Call::post(format!("/v1/devices/{gpu_id}/uncordon"), &serde_json::json!({}))).await
    }

    /// Makes a token. Not repeated after a broken connection: it might be made twice.
    pub async fn create_token(&self, token: &NewToken) -> Result<TokenCreated, ClientError> {
        self.ask(&Call::post("/v1/tokens", token).only_once()).await
    }

    /// Every token, without its secret.
    pub async fn tokens(&self) -> Result<AccessTokenList, ClientError> {
        self.ask(&Call::get("/v1/tokens")).await
    }

    /// Makes a token worthless.
    pub async fn revoke_token(&self, token: u64) -> Result<(), ClientError> {
        self.tell(&Call::delete(format!("/v1/tokens/{token}")).only_once()).await
    }

    /// The faults of simulated devices.
    pub async fn faults(&self) -> Result<FaultList, ClientError> {
        self.ask(&Call::get("/v1/simulate/faults")).await
    }

    /// Breaks a simulated device, or mends it; answers with what is wrong now.
    pub async fn set_fault(&self, fault: &FaultBody) -> Result<FaultList, ClientError> {
        self.ask(&Call::post("/v1/simulate/faults", fault)).await
    }

    /// Mends all simulated devices.
    pub async fn clear_faults(&self) -> Result<FaultList, ClientError> {
        self.set_fault(&FaultBody { gpu_id: None, fault: serde_json::Value::Null }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_sendable_or_refused_with_what_is_allowed() {
        assert_ne!(IdempotencyKey::random(), IdempotencyKey::random());
        assert!(IdempotencyKey::new("job 17").is_ok());
        for bad in ["", " x", "a\nb", "ü", &"x".repeat(KEY_BYTES + 1)] {
            let refused = IdempotencyKey::new(bad).unwrap_err().to_string();
            assert!(refused.contains("idempotency key") && refused.contains("1..=253"), "{refused}");
        }
    }
}
