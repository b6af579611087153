//! A resource pool: worker processes that are handed out one by one, each held to limits while somebody has it.
//!
//! - [`ResourceConfig`]: how many workers, what they run, what each may use.
//! - [`ResourcePool`]: [`ResourcePool::acquire`] waits in line and gives a [`HeldWorker`].
//! - [`LeasedGpus`]: a GPU of its own for each worker, from the agent of this machine.
//! - [`HeldWorker`]: work for it, its limits, and giving it back.
//! - [`AuditEntry`]: who held which worker, when, and how it ended.
//!
//! One thread for each pool (the owner) decides, by the `roster`, and keeps time: nobody who blocks a runtime can keep a limit
//! from being kept. On that thread each process has a task that tends it, from its start to its end. All of it ends with the pool.

mod audit;
mod config;
mod error;
mod held;
mod leases;
pub mod limits;
mod owner;
mod pool;
mod roster;
mod status;
mod tend;

pub use audit::{AuditEntry, Ended, HowEnded, read_audit};
pub use config::{Device, ResourceConfig};
pub use error::{AcquireError, ResourceError, WorkerError};
pub use held::HeldWorker;
pub use leases::LeasedGpus;
pub use pool::{Acquiring, ResourcePool};
pub use status::PoolStatus;
