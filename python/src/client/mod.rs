//! The client in Python's hands: asking for GPUs and keeping what was granted.
//!
//! - `handle`: the client itself, each call for `asyncio` and for threads that block.
//! - `lease`: what was granted.
//! - `setup`: from arguments and the environment to a client.
//! - `wish`: from a dict to a request.
//! - `follow`: what happens, told to a Python function.
//! - `ending`: clients that nobody refers to any more.
//! - `errors`: what went wrong, as Python's exceptions.
//!
//! Tasks in the background belong to the client and end when it is stopped, collected, or with the process.

mod ending;
mod errors;
mod follow;
mod handle;
mod lease;
mod setup;
mod wish;

pub(crate) use ending::wait_for_ending;
pub(crate) use handle::Client;
pub(crate) use lease::Lease;
pub(crate) use setup::client_settings;
