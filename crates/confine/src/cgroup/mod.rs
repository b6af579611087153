//! Control groups: which kind this machine has, and one group per lease with limits the kernel enforces.
//!
//! Three worlds exist: v2 alone; hybrid, where v1 carries memory and pids and v2 only knows who is in a group and how to
//! kill it; and v1 alone. [`Cgroups::detect`] finds out and says so; [`Cgroups::create`] makes a group below a subtree
//! that is ours alone (`gpupool/NAME`), and a [`Group`] can only be had from there: what is killed is always below it.
//! No threads; a group lives in the kernel until [`Group::remove`], also across a restart of this program.

mod create;
mod detect;
mod device;
mod error;
mod group;
mod kill;
mod leftover;
mod limit;
mod meter;
mod observe;
mod place;
mod texts;
mod wait;

pub use detect::{Cgroups, World};
pub use device::DeviceMemory;
pub(crate) use device::NO_CONTROLLER;
pub use error::GroupError;
pub use group::Group;
pub(crate) use leftover::Leftovers;
pub use limit::Limits;
pub use meter::Meter;
pub use observe::MemoryGroup;
pub use texts::{Membership, Mount, Version, memberships, mounts};
