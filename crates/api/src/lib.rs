//! What agent and clients say to each other over HTTP, as types: one place for the names and units of both sides.
//!
//! Times are ISO 8601 with an offset, memory is in MiB (`_mb` in the statistics routes, whose names are older than this
//! project, means the same), seconds may have fractions. The request body is [`gpupool_core::RequestBody`].

#![warn(missing_docs)]

pub mod history;
pub mod lease;
pub mod node;
pub mod pool;
pub mod stats;
pub mod view;

pub use gpupool_core::{RequestBody, SelectBody};

/// The version of the `/v1` routes that this crate describes.
pub const API_VERSION: &str = "1";

/// The header that makes a retried request the same request.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Names of the variables a job finds in its environment, besides the vendor's.
pub mod job_environment {
    /// The number of its lease.
    pub const LEASE: &str = "GPUPOOL_LEASE";
    /// The fencing token of its lease: grows with every grant on a node, so what it writes can be fenced by it.
    pub const FENCING_TOKEN: &str = "GPUPOOL_FENCING_TOKEN";
    /// Where its agent answers; set where one of several was chosen.
    pub const LEASE_ENDPOINT: &str = "GPUPOOL_LEASE_ENDPOINT";
    /// The numbers of its devices, comma between.
    pub const GPU_IDS: &str = "GPUPOOL_GPU_IDS";
    /// How much of each device it was given, 0.001..=1.
    pub const FRACTION: &str = "GPUPOOL_FRACTION";
    /// How much memory of each device it was given, in MiB; not set where the device's memory is unknown.
    pub const MEMORY_MIB: &str = "GPUPOOL_MEMORY_MIB";
}

/// What `GET /v1/events` streams: each event as the data of one server-sent event.
pub mod events {
    use serde::{Deserialize, Serialize};

    /// Something that happened, told after it was made durable.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Event))]
    pub struct EventBody {
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
        /// The name of the node these devices are on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub node: Option<String>,
        /// Why.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reason: Option<String>,
    }
}

/// Errors of `/v1`, as `application/problem+json`.
pub mod problem {
    use serde::{Deserialize, Serialize};

    /// What went wrong, by a code that never changes and in words.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Problem))]
    pub struct ProblemBody {
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

    /// The media type of a [`ProblemBody`].
    pub const MEDIA_TYPE: &str = "application/problem+json";
}

/// Faults on simulated devices.
pub mod simulate {
    use serde::{Deserialize, Serialize};
    use serde_json::Value;

    /// The body of `POST /v1/simulate/faults`.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
    #[serde(deny_unknown_fields)]
    pub struct FaultBody {
        /// Which device, by number; all where it is not said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub gpu_id: Option<u32>,
        /// Which fault, by name or as an object with its parameters; `null` mends the device.
        #[cfg_attr(feature = "schema", schema(value_type = Object, nullable))]
        pub fault: Value,
    }

    /// The body of `GET /v1/simulate/faults`.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Faults))]
    pub struct FaultList {
        /// The faults in force.
        pub faults: Vec<DeviceFaultBody>,
        /// The names of faults there are.
        pub known: Vec<String>,
    }

    /// A fault in force.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = DeviceFault))]
    pub struct DeviceFaultBody {
        /// Which device.
        pub gpu_id: u32,
        /// Which fault.
        #[cfg_attr(feature = "schema", schema(value_type = Object))]
        pub fault: Value,
    }
}

/// Tokens that let people lease over the network.
pub mod tokens {
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
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Tokens))]
    pub struct AccessTokenList {
        /// Every token, revoked ones too, oldest first.
        pub tokens: Vec<AccessToken>,
    }

    /// A token without its secret, of which only a hash is kept.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Token))]
    pub struct AccessToken {
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
}
