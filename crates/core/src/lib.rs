//! The heart of gpupool: one pure state machine that decides who holds which GPU.
//!
//! [`Pool::apply`] takes the time and a [`Command`] and gives an answer, effects and rows to keep. It does no I/O, reads
//! no clock and draws no random numbers, so the agent of one box, the coordinator of a cluster, a client's own books,
//! the trace simulator and the tests all run the same rules.

pub mod body;
pub mod command;
pub mod device;
pub mod ids;
pub mod lease;
pub mod limits;
pub mod outcome;
pub mod policy;
pub mod reading;
pub mod request;
pub mod row;
pub mod units;
pub mod workload;

pub use command::Command;
pub use ids::{DeviceId, GpuId, LeaseId, NodeId, Token};
pub use outcome::{Answer, Denied, Effect, Outcome};
pub use request::{Amount, Request, Strategy};
pub use row::Row;
pub use units::{Bytes, MilliCpus, Millis, Percent, Share, Time};
