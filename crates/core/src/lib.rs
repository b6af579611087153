//! The heart of gpupool: one pure state machine that decides who holds which GPU.
//!
//! [`Pool::apply`] takes the time and a [`Command`] and gives an answer, effects and rows to keep. It does no I/O, reads
//! no clock and draws no random numbers, so the agent of one box, the coordinator of a cluster, a client's own books,
//! the trace simulator and the tests all run the same rules.

pub mod body;
mod classes;
pub mod device;
pub mod ids;
mod inventory;
pub mod lease;
pub mod limits;
pub mod outcome;
pub mod placement;
pub mod policy;
pub mod pool;
mod queue;
pub mod reading;
pub mod request;
pub mod row;
pub mod units;
pub mod workload;

pub use device::model_matches;
pub use ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
pub use outcome::{Answer, Denied, Effect, Outcome};
pub use pool::{Command, Drain, Pool, Settings};
pub use request::{Amount, Request, Strategy};
pub use row::Row;
pub use units::{Bytes, MilliCpus, Millis, Percent, Share, Time};
