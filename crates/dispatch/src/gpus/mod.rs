//! GPUs from the pool: a run wishes for some, and holds leases on them for as long as it lives.
//!
//! [`GpuKeeper`] asks an agent of this machine for each GPU on its own, so that work begins on the first one while others are
//! still waited for. It says by [`GpuNews`] what workers may be started on, and what they must leave: a lease that is lost is
//! asked for anew. Everything is given back when it is stopped or dropped. Where the whole process
//! is killed the agent sees its end: over the Unix socket it watches the process, over TCP a connection.
//!
//! A worker that runs under a lease is told to the agent ([`GpuKeeper::attach`]) and gets the environment of the lease
//! ([`Granted::env`]). Its processes are known to be the lease's by the control group they are in, where the agent can make
//! one, and else by descending from us with an environment that names the lease; so several workers can share one lease, and
//! several leases one device.

mod board;
mod error;
mod keeper;
mod limits;
mod memory;
mod news;
mod place;
mod wish;

pub use error::GpuError;
pub use keeper::GpuKeeper;
pub use memory::GpuMemory;
pub use news::{GpuNews, Granted};
pub use wish::GpuWish;
