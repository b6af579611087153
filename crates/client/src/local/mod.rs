//! GPUs for processes that are started on this machine: an agent of this machine, and leases that are this process' own.
//!
//! [`LocalAgent`] is such an agent, asked over its Unix socket where there is a way, because there it knows our process.
//! [`Tether`] ties a lease to us, so that it ends with us in whatever way we end, and says when it is lost.

mod find;
mod tether;

pub use find::LocalAgent;
pub use tether::{Notice, Tether, lost_by_others};
