//! Types of the HTTP interface between agent and clients. Names and units are defined here for both sides.
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

/// Environment variables of a job, besides those of the GPU vendor.
pub mod job_environment {
    /// Number of the job's lease.
    pub const LEASE: &str = "GPUPOOL_LEASE";
    /// Fencing token of the lease. It grows with every grant on a node, so a storage system can reject writes with an older one.
    pub const FENCING_TOKEN: &str = "GPUPOOL_FENCING_TOKEN";
    /// Endpoint of the agent that granted the lease. Set if the job's GPU was chosen from several agents.
    pub const LEASE_ENDPOINT: &str = "GPUPOOL_LEASE_ENDPOINT";
    /// Numbers of the leased devices, separated by commas.
    pub const GPU_IDS: &str = "GPUPOOL_GPU_IDS";
    /// Leased fraction of each device, 0.001..=1.
    pub const FRACTION: &str = "GPUPOOL_FRACTION";
    /// Leased memory of each device in MiB. Not set if the device's memory is unknown.
    pub const MEMORY_MIB: &str = "GPUPOOL_MEMORY_MIB";
}

/// Events of `GET /v1/events`. Each is the data of one server-sent event.
pub mod events {
    use serde::{Deserialize, Serialize};

    /// A change of a lease or device. The agent publishes it after the commit.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Event))]
    pub struct EventBody {
        /// Kind: `queued`, `offered`, `granted`, `revoking`, `ended`, `draining`, `freed`, `quarantined`, `device_open`,
        /// `device_closed`, `reset` (events were missed: read the full state again).
        pub kind: String,
        /// Time.
        pub at: String,
        /// Number of the lease that the event is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub lease: Option<u64>,
        /// Owner of that lease.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub owner: Option<String>,
        /// The owner's name for the worker that uses the lease.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub worker_id: Option<String>,
        /// Devices that the event is about.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub gpu_ids: Vec<u32>,
        /// Name of the node of these devices.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub node: Option<String>,
        /// Reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub reason: Option<String>,
    }
}

/// Errors of `/v1`, as `application/problem+json`.
pub mod problem {
    use serde::{Deserialize, Serialize};

    /// An error with a stable code and a text for people.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Problem))]
    pub struct ProblemBody {
        /// URI of the kind of problem; `about:blank` because `code` identifies it.
        #[serde(rename = "type")]
        pub kind: String,
        /// The kind of problem in a few words.
        pub title: String,
        /// The HTTP status.
        pub status: u16,
        /// Stable code of the kind of problem.
        pub code: String,
        /// Explanation for people: the cause and the next step.
        pub detail: String,
        /// Name of the invalid field.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub field: Option<String>,
        /// Invalid value.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub value: Option<String>,
        /// Allowed values.
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
        /// Number of the device. All devices if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub gpu_id: Option<u32>,
        /// Fault, by name or as an object with parameters. `null` clears all faults of the device.
        #[cfg_attr(feature = "schema", schema(value_type = Object, nullable))]
        pub fault: Value,
    }

    /// The body of `GET /v1/simulate/faults`.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Faults))]
    pub struct FaultList {
        /// The faults in force.
        pub faults: Vec<DeviceFaultBody>,
        /// Names of all faults that can be set.
        pub known: Vec<String>,
    }

    /// A fault in force.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = DeviceFault))]
    pub struct DeviceFaultBody {
        /// Number of the device.
        pub gpu_id: u32,
        /// The fault with its parameters.
        #[cfg_attr(feature = "schema", schema(value_type = Object))]
        pub fault: Value,
    }
}

/// Access tokens for leasing over the network.
pub mod tokens {
    use serde::{Deserialize, Serialize};

    /// The body of `POST /v1/tokens`.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
    #[serde(deny_unknown_fields)]
    pub struct NewToken {
        /// Owner of the leases that are taken with this token.
        pub owner: String,
        /// Whether the token has the rights of an administrator.
        #[serde(default)]
        pub admin: bool,
        /// Whether the token may only read: everything that a user of the agent's machine may read.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub read_only: bool,
    }

    /// Response of `POST /v1/tokens`, the only one that contains the secret.
    #[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
    pub struct TokenCreated {
        /// Number of the token, which identifies it when it is revoked.
        pub id: u64,
        /// Owner of the leases that are taken with this token.
        pub owner: String,
        /// Whether the token has the rights of an administrator.
        pub admin: bool,
        /// Whether the token may only read.
        #[serde(default)]
        pub read_only: bool,
        /// Secret that clients send as `Authorization: Bearer …`.
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
        /// All tokens including revoked ones, oldest first.
        pub tokens: Vec<AccessToken>,
    }

    /// A token without its secret. The agent stores only a hash of the secret.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Token))]
    pub struct AccessToken {
        /// Number of the token.
        pub id: u64,
        /// Owner of the leases that are taken with this token.
        pub owner: String,
        /// Whether the token has the rights of an administrator.
        pub admin: bool,
        /// Whether the token may only read.
        #[serde(default)]
        pub read_only: bool,
        /// Time of creation.
        pub created_at: String,
        /// Time of revocation.
        pub revoked_at: Option<String>,
    }
}
