//! Bodies of the `/v1/leases` routes.

pub use gpupool_core::LeaseState;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Lease))]
pub struct LeaseBody {
    /// Number of the lease. Numbers are never reused.
    pub id: u64,
    /// Current state.
    pub state: LeaseState,
    /// Owner.
    pub owner: String,
    /// The owner's name for the worker that uses the lease.
    pub worker_id: Option<String>,
    /// Summary of the request.
    #[serde(default, rename = "wish")]
    pub request: RequestSummary,
    /// Held devices. Empty while the lease waits and after it ended.
    pub devices: Vec<LeaseDevice>,
    /// Environment variables for the job. `null` means that the variable must be unset.
    pub env: BTreeMap<String, Option<String>>,
    /// Fencing token of a granted lease. Visible to the owner and to administrators only.
    pub token: Option<u64>,
    /// Position in the queue, from 1. `null` if the lease does not wait.
    pub queue_position: Option<usize>,
    /// Reason for waiting, or for the end, as a sentence.
    pub reason: Option<String>,
    /// Stable name of the reason for the end.
    pub cause: Option<String>,
    /// Time of the request.
    pub created_at: String,
    /// Time of the grant.
    pub granted_at: Option<String>,
    /// Time at which the lease ends unless it is renewed, or its latest possible end if that is earlier. `null` if a process
    /// or connection holds the lease and it has no latest end.
    pub expires_at: Option<String>,
    /// Announced time of revocation.
    pub revoke_at: Option<String>,
    /// Time of the end.
    pub ended_at: Option<String>,
    /// Time to live without a renewal. Clients renew after a third of it.
    pub ttl_secs: f64,
    /// Requested priority; higher is served first.
    pub priority: i32,
    /// Priority in the queue: with the policy's boost and the gain by waiting. `null` if the lease does not wait.
    pub queue_priority: Option<i32>,
    /// Holder that replaces renewals: `process`, `cgroup` or `connection`.
    pub holder: Option<HolderBody>,
    /// Whether processes of the ended lease still run on its devices.
    pub draining: bool,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
}

/// Summary of a request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Wish))]
pub struct RequestSummary {
    /// Number of GPUs.
    pub gpus: u16,
    /// Requested fraction of each GPU, or `null`.
    pub fraction: Option<f64>,
    /// Requested memory of each GPU in MiB, or `null`.
    pub memory_mib: Option<u64>,
    /// Whether the request accepts a shared GPU without a reserved part.
    pub sharing: bool,
}

/// Holder of a lease that is not renewed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Holder))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HolderBody {
    /// A process of the node.
    Process {
        /// Process id. `null` if the caller may not see it.
        #[cfg_attr(feature = "schema", schema(required = true))]
        pid: Option<u32>,
    },
    /// All processes of a control group.
    Cgroup {
        /// Path of the group. `null` if the caller may not see it.
        #[cfg_attr(feature = "schema", schema(required = true))]
        path: Option<String>,
    },
    /// An open connection.
    Connection,
}

/// Part of one device that a lease holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseDevice {
    /// Number of the device on its node.
    pub gpu_id: u32,
    /// Name of its node. Empty in the response of an older agent.
    #[serde(default)]
    pub node: String,
    /// UUID of the device, or its bus address if it has no UUID.
    pub uuid: String,
    /// `nvidia`, `amd`, `intel` or `other`.
    pub vendor: String,
    /// Product name.
    pub name: String,
    /// Leased fraction of the device.
    pub fraction: f64,
    /// Leased memory in MiB. `null` if the device's memory is unknown.
    pub memory_mib: Option<u64>,
}

/// The body of `GET /v1/leases`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseList {
    /// Leases, by number.
    pub leases: Vec<LeaseBody>,
    /// Value of `after=` for the next page. `null` on the last page.
    pub next: Option<u64>,
}

/// The body of `POST /v1/leases/follow`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FollowBody {
    /// Numbers of 1 to 4096 leases, without duplicates.
    #[cfg_attr(feature = "schema", schema(min_items = 1, max_items = 4096))]
    pub leases: Vec<u64>,
    /// Longest wait for a change in seconds, 0 to 300. Defaults to 0.
    #[serde(default)]
    pub wait_secs: f64,
}

/// Response of `POST /v1/leases/follow`. Both lists are empty if all leases still wait.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Followed))]
pub struct FollowResponse {
    /// Leases that do not wait, in the order of the request.
    pub changed: Vec<LeaseBody>,
    /// Leases that do not exist or belong to another owner.
    pub unknown: Vec<u64>,
}

/// The body of renew and confirm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = TokenBody))]
#[serde(deny_unknown_fields)]
pub struct FencingTokenBody {
    /// Token that the lease was granted with.
    pub token: u64,
}

/// Condition that ends an attached lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Until))]
#[serde(rename_all = "snake_case")]
pub enum AttachUntil {
    /// The calling process exits.
    #[default]
    Caller,
    /// The job's control group becomes empty. The caller may exit earlier.
    Job,
}

/// Processes that the agent ends when it revokes an attached lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = IfTaken))]
#[serde(rename_all = "snake_case")]
pub enum RevocationAction {
    /// The calling process and its descendants.
    #[default]
    EndCaller,
    /// The attached jobs, their descendants, and their control groups. For a caller that holds several leases. The caller has
    /// five seconds to end the jobs itself.
    EndJobs,
}

impl RevocationAction {
    const fn is_usual(&self) -> bool {
        matches!(self, Self::EndCaller)
    }
}

/// The body of attach: a process of this node keeps the lease alive. Only over the Unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AttachBody {
    /// Token that the lease was granted with.
    pub token: u64,
    /// Process of the caller that has not started its program yet. The agent adds it to the lease's control group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_pid: Option<u32>,
    /// Limit of the group's host memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_mib: Option<u64>,
    /// Condition that ends the lease.
    #[serde(default)]
    pub until: AttachUntil,
    /// Processes that the agent ends when it revokes the lease.
    #[serde(default, rename = "if_taken", skip_serializing_if = "RevocationAction::is_usual")]
    pub on_revocation: RevocationAction,
}

/// Response of attach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Attached))]
pub struct AttachResponse {
    /// Current state of the lease.
    pub lease: LeaseBody,
    /// Control group of the job. `null` if the agent cannot create one.
    pub cgroup: Option<String>,
    /// Whether the group enforces the memory limit.
    pub memory_limited: bool,
    /// Reason why there is no group or no limit.
    pub caveat: Option<String>,
}

/// The body of revoke.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RevokeBody {
    /// Time in seconds for the holder to finish. Defaults to 0.
    pub grace_secs: f64,
    /// Reason for the holder and the audit trail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
