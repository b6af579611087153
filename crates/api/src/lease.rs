//! Leases, as the `/v1/leases` routes show and take them.

pub use gpupool_core::LeaseState;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Lease))]
pub struct LeaseBody {
    /// Its number; never used again.
    pub id: u64,
    /// Where it is in its life.
    pub state: LeaseState,
    /// Whose it is.
    pub owner: String,
    /// The owner's own name for whoever uses it.
    pub worker_id: Option<String>,
    /// What was asked for.
    #[serde(default, rename = "wish")]
    pub request: RequestSummary,
    /// What it holds; empty while it waits and after its end.
    pub devices: Vec<LeaseDevice>,
    /// What to set in the environment of its job; `null` means the variable must not be set.
    pub env: BTreeMap<String, Option<String>>,
    /// Its fencing token, once granted. Shown to its owner and to administrators only.
    pub token: Option<u64>,
    /// 1 for the next one in the queue; `null` where it does not wait.
    pub queue_position: Option<usize>,
    /// Why it waits, or why it ended, in a sentence.
    pub reason: Option<String>,
    /// Why it ended, by a name that never changes.
    pub cause: Option<String>,
    /// When it was asked for.
    pub created_at: String,
    /// When it was granted.
    pub granted_at: Option<String>,
    /// When it ends unless it is renewed, or at the latest where that is before; `null` where a process or connection keeps it
    /// for as long as that lives.
    pub expires_at: Option<String>,
    /// When it will be taken back, where that was announced.
    pub revoke_at: Option<String>,
    /// When it ended.
    pub ended_at: Option<String>,
    /// Life without a renewal; renew every third of it.
    pub ttl_secs: f64,
    /// Higher goes first.
    pub priority: i32,
    /// Who keeps it alive in place of renewals: `process`, `cgroup` or `connection`.
    pub holder: Option<HolderBody>,
    /// Whether processes of it are still on its devices after its end.
    pub draining: bool,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
}

/// What a lease was asked for, in short.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Wish))]
pub struct RequestSummary {
    /// How many GPUs.
    pub gpus: u16,
    /// How much of each; `null` where no part was named.
    pub fraction: Option<f64>,
    /// How much memory of each, in MiB; `null` where none was named.
    pub memory_mib: Option<u64>,
    /// A place among equals on a shared GPU.
    pub sharing: bool,
}

/// Who keeps a lease alive without renewing it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Holder))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HolderBody {
    /// A process of the node.
    Process {
        /// Its number.
        pid: u32,
    },
    /// Everything in a control group.
    Cgroup {
        /// Its path.
        path: String,
    },
    /// An open connection.
    Connection,
}

/// What a lease holds on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseDevice {
    /// The device's number on its node.
    pub gpu_id: u32,
    /// The name of its node; empty from an older agent.
    #[serde(default)]
    pub node: String,
    /// Its UUID, or its place on the bus where it has none.
    pub uuid: String,
    /// `nvidia`, `amd`, `intel` or `other`.
    pub vendor: String,
    /// Its name.
    pub name: String,
    /// How much of it.
    pub fraction: f64,
    /// How much of its memory, in MiB; `null` where the device's memory is unknown.
    pub memory_mib: Option<u64>,
}

/// The body of `GET /v1/leases`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseList {
    /// Leases, by number.
    pub leases: Vec<LeaseBody>,
    /// Ask for `after=` this number to go on; `null` at the end.
    pub next: Option<u64>,
}

/// The body of `POST /v1/leases/follow`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FollowBody {
    /// Which leases: 1 to 4096, each once.
    #[cfg_attr(feature = "schema", schema(min_items = 1, max_items = 4096))]
    pub leases: Vec<u64>,
    /// How long the answer may take, 0 to 300; at once unless said.
    #[serde(default)]
    pub wait_secs: f64,
}

/// The answer to it; both lists are empty where all of them still wait.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Followed))]
pub struct FollowResponse {
    /// Those that do not wait (any more), in the order they were asked for.
    pub changed: Vec<LeaseBody>,
    /// Those that are not known, or not the caller's to follow.
    pub unknown: Vec<u64>,
}

/// The body of renew and confirm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = TokenBody))]
#[serde(deny_unknown_fields)]
pub struct FencingTokenBody {
    /// The token the lease was granted with.
    pub token: u64,
}

/// Whose end is the end of an attached lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Until))]
#[serde(rename_all = "snake_case")]
pub enum AttachUntil {
    /// The calling process'.
    #[default]
    Caller,
    /// The job's: the lease lives while anything runs in its control group, and the caller may go.
    Job,
}

/// Who is made to end where an attached lease is taken back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = IfTaken))]
#[serde(rename_all = "snake_case")]
pub enum RevocationAction {
    /// The calling process, with all that descends from it.
    #[default]
    EndCaller,
    /// Only the jobs that were named, with all that descends from them, and whatever is in their control group. For a caller
    /// that holds several leases; it is expected to end them itself, and has five seconds to.
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
    /// The token the lease was granted with.
    pub token: u64,
    /// A process of the caller, not running yet, to be put into the control group of the lease. Each call adds one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_pid: Option<u32>,
    /// Most host memory of that group, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_mib: Option<u64>,
    /// Whose end is the end of the lease; the caller's unless said.
    #[serde(default)]
    pub until: AttachUntil,
    /// Who is made to end where the lease is taken back; the caller unless said.
    #[serde(default, rename = "if_taken", skip_serializing_if = "RevocationAction::is_usual")]
    pub on_revocation: RevocationAction,
}

/// The answer to attach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = Attached))]
pub struct AttachResponse {
    /// The lease as it is now.
    pub lease: LeaseBody,
    /// The control group the job is in; `null` where the agent can make none.
    pub cgroup: Option<String>,
    /// Whether that group holds the job to the memory asked for.
    pub memory_limited: bool,
    /// Why there is no group, or no limit.
    pub caveat: Option<String>,
}

/// The body of revoke.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RevokeBody {
    /// How long its holder has to finish; at once unless said.
    pub grace_secs: f64,
}
