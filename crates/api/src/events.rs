//! What `GET /v1/events` streams: each event as the data of one server-sent event.

use serde::{Deserialize, Serialize};

/// Something that happened, told after it was made durable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Event {
    /// What: `queued`, `offered`, `granted`, `revoking`, `ended`, `draining`, `freed`, `quarantined`, `device_open`,
    /// `device_closed`, `reset` (events were missed: look at the whole again).
    pub kind: String,
    /// When.
    pub at: String,
    /// Which lease it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Whose lease that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The owner's own name for whoever uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// The devices it is about.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_ids: Vec<u32>,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
