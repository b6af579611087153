//! Resource pools for Python: workers that are handed out one by one, each held to limits while somebody has it.
//!
//! - `config`: what Python says a pool is to be.
//! - `pool`: the pool; its end is told to whoever waits, in a loop or in a thread.
//! - `held`: a worker somebody has; `carrying`: what goes to it and comes back.
//! - `errors`: what went wrong, as the exceptions of `gpupool.resource_pool.errors`.

mod carrying;
mod config;
mod errors;
mod held;
mod pool;

pub(crate) use held::HeldWorker;
pub(crate) use pool::ResourcePool;
