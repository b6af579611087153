//! Tokens that let people lease over the network.

use serde::{Deserialize, Serialize};

/// The body of `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// On whose account it leases.
    pub owner: String,
    /// Whether it may do what administrators do.
    #[serde(default)]
    pub admin: bool,
}

/// The answer to it: the only time the secret is shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TokenCreated {
    /// Its number, by which it is revoked.
    pub id: u64,
    /// On whose account it leases.
    pub owner: String,
    /// Whether it may do what administrators do.
    pub admin: bool,
    /// What clients show as `Authorization: Bearer …`.
    pub secret: String,
}

impl std::fmt::Debug for TokenCreated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenCreated").field("id", &self.id).field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// The body of `GET /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Tokens {
    /// Every token, revoked ones too, oldest first.
    pub tokens: Vec<Token>,
}

/// A token without its secret, of which only a hash is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Token {
    /// Its number.
    pub id: u64,
    /// On whose account it leases.
    pub owner: String,
    /// Whether it may do what administrators do.
    pub admin: bool,
    /// When it was made.
    pub created_at: String,
    /// When it was revoked.
    pub revoked_at: Option<String>,
}
