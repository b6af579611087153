//! Core of gpupool: a pure state machine that grants GPUs to requests.
//!
//! [`Pool::apply`] takes the time and a [`PoolCommand`] and returns a reply, effects and rows to commit. It does no
//! I/O, reads no clock and draws no random numbers, so the agent of one machine, the coordinator of a cluster, a client
//! of plain statistics servers, the trace simulator and the tests all run the same rules.

mod body;
mod classes;
mod device;
mod ids;
mod inventory;
mod lease;
pub mod limits;
mod outcome;
mod placement;
mod plain_text;
mod policy;
mod pool;
mod queue;
mod reading;
mod request;
mod row;
mod units;
mod workload;

pub use body::{OneOrMany, RequestBody, SelectBody};
pub use device::{
    CordonState, DeviceFacts, DeviceHealth, DeviceIdentity, DeviceLink, DeviceMemory, IsolationSupport, LinkKind,
    NodeFacts, PartitionFacts, PciAddress, Vendor, model_matches,
};
pub use ids::{DeviceId, GpuId, Labels, LeaseId, NodeId, Token, labels_match};
pub use lease::{DevicePromise, EndCause, Lease, LeaseHolder, LeaseState, PlacementDecision, QueueTurn, Revocation};
pub use outcome::{ApplyOutcome, CommandDenied, CommandReply, DeviceClosure, InUseReason, PoolEffect, Unsatisfiable};
pub use plain_text::{check_plain_text, escape_text, is_plain};
pub use policy::{OwnerQuota, Policies, PolicyMatch, PolicyViolation, QueueOrder, RequestPolicy, RequestSize};
pub use pool::{
    DeviceView, DrainMode, NodeView, Pool, PoolCommand, PoolSettings, RestoreError, WaitExplanation, WaitReason,
};
pub use reading::{DeviceReading, ForeignLoad, ProcessAttribution, ProcessUsage, ReadingField};
pub use request::{
    DeviceSelector, FieldError, IsolationLevel, LoadThresholds, PlacementStrategy, Request, RequestedAmount,
};
pub use row::{DeviceRow, LeaseRow, NodeRow, PoolCounters, PoolRow, UsageRow, WorkloadRow};
pub use units::{Bytes, MilliCpus, Millis, Percent, PoolTime, Share};
pub use workload::{TaskClass, Turnover};
