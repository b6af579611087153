//! One call for each route of an agent: leases, then read-only routes, then administration.

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

use super::api_call::ApiCall;
use crate::limits::{MAX_FOLLOW_WAIT, MAX_IDEMPOTENCY_KEY_BYTES};
use crate::random::Backoff;
use crate::{AgentClient, ClientError, random};

/// Key that identifies a retried request, so that it never takes two GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// Returns a unique key.
    pub fn random() -> Self {
        Self(format!("{:016x}{:016x}", random::random_u64(), random::random_u64()))
    }

    /// Uses a key of the caller, such as the id of a job that may be submitted twice.
    pub fn new(text: impl Into<String>) -> Result<Self, ClientError> {
        let text = text.into();
        let is_printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && text.trim() == text;
        if text.is_empty() || text.len() > MAX_IDEMPOTENCY_KEY_BYTES || !is_printable {
            let allowed = format!("1..={MAX_IDEMPOTENCY_KEY_BYTES} printable ASCII characters, no blank at either end");
            return Err(ClientError::setting("idempotency key", format!("{text:?}"), allowed));
        }
        Ok(Self(text))
    }

    /// Returns the key as it is sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Filter and page of a list of leases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseQuery {
    /// State of the leases; `live` (the default) for those that have not ended, `all` for all that are retained.
    pub state: Option<String>,
    /// Owner of the leases.
    pub owner: Option<String>,
    /// Node of the leases.
    pub node: Option<String>,
    /// Lower bound of the lease number (exclusive): `next` of the previous page.
    pub after: Option<u64>,
    /// Maximum number of leases; the agent's page size if unset.
    pub limit: Option<usize>,
}

impl AgentClient {
    /// Requests GPUs and returns a lease that is active, or still queued after the body's `wait_secs`. Follow a queued
    /// lease: a waiter that is not followed leaves the queue. [`AgentClient::wait_until_granted`] does all of it.
    ///
    /// Retries use the same key, so that the request never takes two GPUs.
    pub async fn request(&self, body: &RequestBody) -> Result<LeaseBody, ClientError> {
        self.request_as(body, &IdempotencyKey::random()).await
    }

    /// Same as [`Self::request`] with a key of the caller: requests with the same key, even from different processes,
    /// are one request.
    pub async fn request_as(&self, body: &RequestBody, key: &IdempotencyKey) -> Result<LeaseBody, ClientError> {
        let wait = body.wait_secs.and_then(|secs| Duration::try_from_secs_f64(secs).ok()).unwrap_or_default();
        let call = ApiCall::post("/v1/leases", body).header(IDEMPOTENCY_KEY, key.as_str());
        self.send(&call.with_wait(wait.min(MAX_FOLLOW_WAIT))).await
    }

    /// Returns one page of leases, ordered by number. Set `after` to the page's `next` to get the following one.
    pub async fn leases(&self, query: &LeaseQuery) -> Result<LeaseList, ClientError> {
        let call = ApiCall::get("/v1/leases")
            .query("state", query.state.as_ref())
            .query("owner", query.owner.as_ref())
            .query("node", query.node.as_ref())
            .query("after", query.after)
            .query("limit", query.limit);
        self.send(&call).await
    }

    /// Returns a lease as soon as it no longer waits, but after `wait` at the latest.
    pub async fn follow(&self, lease: u64, wait: Duration) -> Result<LeaseBody, ClientError> {
        let wait = wait.min(MAX_FOLLOW_WAIT);
        let secs = Some(wait.as_secs_f64()).filter(|secs| *secs > 0.0);
        self.send(&ApiCall::get(format!("/v1/leases/{lease}")).query("wait_secs", secs).with_wait(wait)).await
    }

    /// Follows many leases (1 to 4096, each once) in one call, which keeps all of them in the queue. Returns all leases
    /// that no longer wait as soon as there is one, but after `wait` at the latest. Call again for the rest.
    pub async fn follow_leases(&self, leases: &[u64], wait: Duration) -> Result<FollowResponse, ClientError> {
        let wait = wait.min(MAX_FOLLOW_WAIT);
        let body = FollowBody { leases: leases.to_vec(), wait_secs: wait.as_secs_f64() };
        self.send(&ApiCall::post("/v1/leases/follow", &body).with_wait(wait)).await
    }

    /// Extends a lease by another ttl.
    pub async fn renew(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.send(&ApiCall::post(format!("/v1/leases/{lease}/renew"), &FencingTokenBody { token })).await
    }

    /// Confirms an offer.
    pub async fn confirm(&self, lease: u64, token: u64) -> Result<LeaseBody, ClientError> {
        self.send(&ApiCall::post(format!("/v1/leases/{lease}/confirm"), &FencingTokenBody { token })).await
    }

    /// Ties a lease to this process, so that the lease ends with it. Works only over the Unix socket.
    pub async fn attach(&self, lease: u64, body: &AttachBody) -> Result<AttachResponse, ClientError> {
        self.send(&ApiCall::post(format!("/v1/leases/{lease}/attach"), body)).await
    }

    /// Releases a lease, or leaves the queue. Idempotent; `None` if the agent no longer knows the lease.
    pub async fn release(&self, lease: u64) -> Result<Option<LeaseBody>, ClientError> {
        match self.send(&ApiCall::delete(format!("/v1/leases/{lease}"))).await {
            Ok(lease) => Ok(Some(lease)),
            Err(error) if error.code() == Some("unknown_lease") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Same as [`Self::release`], retried for `patience` while the agent restarts. Returns the last transient error.
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

// Read-only routes: the pool, its devices and readings, the audit trail and usage.

/// Filter and page of the audit trail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryQuery {
    /// Owner of the records.
    pub owner: Option<String>,
    /// Node of the devices of the records.
    pub node: Option<String>,
    /// Device of the records.
    pub gpu_id: Option<u32>,
    /// Start time, ISO 8601 with an offset.
    pub since: Option<String>,
    /// End time (exclusive).
    pub until: Option<String>,
    /// Position after which the page starts: `next` of the previous page.
    pub after: Option<String>,
    /// Maximum number of records; the agent's page size if unset.
    pub limit: Option<usize>,
}

/// Key by which usage is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UsageGrouping {
    /// Owner of the leases.
    #[default]
    Owner,
    /// Device.
    Gpu,
}

impl AgentClient {
    /// Returns the authority and the state of the pool.
    pub async fn pool(&self) -> Result<PoolBody, ClientError> {
        self.send(&ApiCall::get("/v1/pool")).await
    }

    /// Returns each device with its readings and leases.
    pub async fn devices(&self) -> Result<DeviceList, ClientError> {
        self.send(&ApiCall::get("/v1/devices")).await
    }

    /// Returns the statistics of the GPUs.
    pub async fn stats(&self) -> Result<StatsBody, ClientError> {
        self.send(&ApiCall::get("/gpu/stats").may_be_degraded()).await
    }

    /// Returns the summary of the GPUs.
    pub async fn summary(&self) -> Result<SummaryBody, ClientError> {
        self.send(&ApiCall::get("/gpu/summary").may_be_degraded()).await
    }

    /// Returns the recent readings of each GPU.
    pub async fn gpu_history(&self) -> Result<GpuHistoryBody, ClientError> {
        self.send(&ApiCall::get("/gpu/history")).await
    }

    /// Returns the health of the agent, including that of an unhealthy one.
    pub async fn health(&self) -> Result<HealthBody, ClientError> {
        self.send(&ApiCall::get("/health").may_be_degraded()).await
    }

    /// Returns the configuration of the agent.
    pub async fn config(&self) -> Result<serde_json::Value, ClientError> {
        self.send(&ApiCall::get("/config")).await
    }

    /// Returns one page of the audit trail, oldest first. Set `after` to the page's `next` to get the following one.
    pub async fn history(&self, query: &HistoryQuery) -> Result<HistoryBody, ClientError> {
        let call = ApiCall::get("/v1/history")
            .query("owner", query.owner.as_ref())
            .query("node", query.node.as_ref())
            .query("gpu_id", query.gpu_id)
            .query("since", query.since.as_ref())
            .query("until", query.until.as_ref())
            .query("after", query.after.as_ref())
            .query("limit", query.limit);
        self.send(&call).await
    }

    /// Returns the usage since a time (ISO 8601 with an offset), or of the last 7 days.
    pub async fn usage(&self, by: UsageGrouping, since: Option<&str>) -> Result<UsageBody, ClientError> {
        let by = match by {
            UsageGrouping::Owner => "owner",
            UsageGrouping::Gpu => "gpu",
        };
        self.send(&ApiCall::get("/v1/usage").query("by", Some(by)).query("since", since)).await
    }

    /// Returns the metrics in the Prometheus format.
    pub async fn metrics(&self) -> Result<String, ClientError> {
        self.send_for_text(&ApiCall::get("/metrics")).await
    }

    /// Returns the OpenAPI description of all routes.
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.send(&ApiCall::get("/openapi.json")).await
    }
}

// Administration: revocation, cordons, tokens, and faults of simulated devices.

impl AgentClient {
    /// Revokes a lease, at once or after a grace in seconds.
    pub async fn revoke(&self, lease: u64, grace_secs: f64) -> Result<LeaseBody, ClientError> {
        self.revoke_with(lease, &RevokeBody { grace_secs, reason: None }).await
    }

    /// Revokes a lease with a grace and a reason.
    pub async fn revoke_with(&self, lease: u64, revocation: &RevokeBody) -> Result<LeaseBody, ClientError> {
        self.send(&ApiCall::post(format!("/v1/leases/{lease}/revoke"), revocation)).await
    }

    /// Cordons a device of a node, by default the agent's own: it takes no new work.
    pub async fn cordon(&self, gpu_id: u32, node: Option<&str>) -> Result<DeviceBody, ClientError> {
        let call = ApiCall::post(format!("/v1/devices/{gpu_id}/cordon"), &serde_json::json!({}));
        self.send(&call.query("node", node)).await
    }

    /// Uncordons a device: it takes new work again.
    pub async fn uncordon(&self, gpu_id: u32, node: Option<&str>) -> Result<DeviceBody, ClientError> {
        let call = ApiCall::post(format!("/v1/devices/{gpu_id}/uncordon"), &serde_json::json!({}));
        self.send(&call.query("node", node)).await
    }

    /// Forgets a device that is gone and holds no lease. If it returns, it is a new device.
    pub async fn forget_device(&self, gpu_id: u32, node: Option<&str>) -> Result<(), ClientError> {
        let call = ApiCall::delete(format!("/v1/devices/{gpu_id}")).query("node", node);
        self.send_for_success(&call.not_repeatable()).await
    }

    /// Creates a token. Not retried after a broken connection, because the token might be created twice.
    pub async fn create_token(&self, token: &NewToken) -> Result<TokenCreated, ClientError> {
        self.send(&ApiCall::post("/v1/tokens", token).not_repeatable()).await
    }

    /// Returns all tokens without their secrets.
    pub async fn tokens(&self) -> Result<AccessTokenList, ClientError> {
        self.send(&ApiCall::get("/v1/tokens")).await
    }

    /// Revokes a token.
    pub async fn revoke_token(&self, token: u64) -> Result<(), ClientError> {
        self.send_for_success(&ApiCall::delete(format!("/v1/tokens/{token}")).not_repeatable()).await
    }

    /// Returns the faults of simulated devices.
    pub async fn faults(&self) -> Result<FaultList, ClientError> {
        self.send(&ApiCall::get("/v1/simulate/faults")).await
    }

    /// Injects or clears a fault of a simulated device and returns the current faults.
    pub async fn set_fault(&self, fault: &FaultBody) -> Result<FaultList, ClientError> {
        self.send(&ApiCall::post("/v1/simulate/faults", fault)).await
    }

    /// Clears the faults of all simulated devices.
    pub async fn clear_faults(&self) -> Result<FaultList, ClientError> {
        self.set_fault(&FaultBody { gpu_id: None, fault: serde_json::Value::Null }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsendable_keys_are_refused_with_the_allowed_form() {
        assert_ne!(IdempotencyKey::random(), IdempotencyKey::random());
        assert!(IdempotencyKey::new("job 17").is_ok());
        for bad in ["", " x", "a\nb", "ü", &"x".repeat(MAX_IDEMPOTENCY_KEY_BYTES + 1)] {
            let refused = IdempotencyKey::new(bad).unwrap_err().to_string();
            assert!(refused.contains("idempotency key") && refused.contains("1..=253"), "{refused}");
        }
    }
}
