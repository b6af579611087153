//! What everybody may see: the pool, its devices, what they read, what happened, who used how much.

use gpupool_api::history::{History, Usage};
use gpupool_api::pool::{Devices, Pool};
use gpupool_api::stats::{GpuHistory, Health, Stats, Summary};

use super::call::Call;
use crate::{AgentClient, ClientError};

/// Which records of the audit trail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryQuery {
    /// Only this owner's.
    pub owner: Option<String>,
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
pub enum UsageBy {
    /// Whoever took the leases.
    #[default]
    Owner,
    /// The devices.
    Gpu,
}

impl AgentClient {
    /// Who decides there, and how things stand.
    pub async fn pool(&self) -> Result<Pool, ClientError> {
        self.ask(&Call::get("/v1/pool")).await
    }

    /// Each device with what it reads and who holds it.
    pub async fn devices(&self) -> Result<Devices, ClientError> {
        self.ask(&Call::get("/v1/devices")).await
    }

    /// What the GPUs read.
    pub async fn stats(&self) -> Result<Stats, ClientError> {
        self.ask(&Call::get("/gpu/stats").may_be_degraded()).await
    }

    /// What the GPUs read, in short.
    pub async fn summary(&self) -> Result<Summary, ClientError> {
        self.ask(&Call::get("/gpu/summary").may_be_degraded()).await
    }

    /// The last readings of each GPU.
    pub async fn gpu_history(&self) -> Result<GpuHistory, ClientError> {
        self.ask(&Call::get("/gpu/history")).await
    }

    /// Whether all is well there; an agent that is not well answers too.
    pub async fn health(&self) -> Result<Health, ClientError> {
        self.ask(&Call::get("/health").may_be_degraded()).await
    }

    /// How the agent is set up.
    pub async fn config(&self) -> Result<serde_json::Value, ClientError> {
        self.ask(&Call::get("/config")).await
    }

    /// One page of the audit trail, oldest first. Ask with `after` set to the page's `next` for the one after it.
    pub async fn history(&self, query: &HistoryQuery) -> Result<History, ClientError> {
        let call = Call::get("/v1/history")
            .query("owner", query.owner.as_ref())
            .query("gpu_id", query.gpu_id)
            .query("since", query.since.as_ref())
            .query("until", query.until.as_ref())
            .query("after", query.after.as_ref())
            .query("limit", query.limit);
        self.ask(&call).await
    }

    /// Who held how much, since a time (ISO 8601 with an offset) or for the last 7 days.
    pub async fn usage(&self, by: UsageBy, since: Option<&str>) -> Result<Usage, ClientError> {
        let by = match by {
            UsageBy::Owner => "owner",
            UsageBy::Gpu => "gpu",
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
