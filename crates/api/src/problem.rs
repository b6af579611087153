//! Errors of `/v1`, as `application/problem+json`.

use serde::{Deserialize, Serialize};

/// What went wrong, by a code that never changes and in words.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Problem {
    /// Identifies the kind of problem; `about:blank` where the code says it all.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind of problem in a few words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The kind of problem by a name that never changes.
    pub code: String,
    /// What happened, to what, and what to do.
    pub detail: String,
    /// The field that is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// What is allowed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
}

/// The media type of a [`Problem`].
pub const MEDIA_TYPE: &str = "application/problem+json";
