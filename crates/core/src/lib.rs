//! The heart of gpupool: one pure state machine that decides who holds which GPU.
//!
//! [`Pool::apply`] takes the time and a [`Command`] and gives an answer, effects and rows to keep. It does no I/O, reads
//! no clock and draws no random numbers, so the agent of one box, the coordinator of a cluster, a client's own books,
//! the trace simulator and the tests all run the same rules.

mod body;
mod classes;
mod device;
mod ids;
mod inventory;
mod lease;
pub mod limits;
mod outcome;
mod placement;
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
    Cordon, DeviceFacts, DeviceIdentity, DeviceMemory, Health, IsolationSupport, Link, LinkKind, NodeFacts, Partition,
    PciAddress, Vendor, model_matches,
};
pub use ids::{DeviceId, GpuId, Labels, LeaseId, NodeId, Token, labels_match};
pub use lease::{Decision, EndCause, Holder, Lease, LeaseState, Promise, Turn};
pub use outcome::{Answer, Closed, Denied, Effect, InUse, Outcome, Unsatisfiable};
pub use policy::{Policies, Policy, PolicyMatch, PolicyRule, QueueOrder, Quota, Size};
pub use pool::{Command, DeviceView, Drain, Explanation, NodeView, Pool, Reason, RestoreError, Settings};
pub use reading::{Attribution, Field, Foreign, ProcessUse, Reading};
pub use request::{Amount, FieldError, Isolation, Request, Select, Strategy, Thresholds};
pub use row::{Counters, DeviceRow, LeaseRow, NodeRow, Row, UsageRow, WorkloadRow};
pub use units::{Bytes, MilliCpus, Millis, Percent, Share, Time};
pub use workload::{TaskClass, Turnover};
