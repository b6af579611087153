//! The native module of the Python package: thin classes over the client and the dispatcher.
//!
//! - `runtime`: the thread that carries what is asynchronous, how it gets hold of the interpreter, and what belongs to one process
//!   and not to its forked children.
//! - `awaiting`: from a Rust future to something `asyncio`, or a thread, waits for.
//! - `values`: facts as Python values; `carry`: Python values on their way between processes, through `memory` they share.
//! - `client`: asking for GPUs and keeping them.
//! - `dispatch`: a run of the dispatcher; `worker`: a worker process.
//! - `resource_pool`: workers that are handed out one by one.
//!
//! Rules of the house: nothing is waited for while the interpreter is held; a thread of ours takes no signals, so that Ctrl-C
//! is Python's; what was made before a fork does nothing after it.

mod awaiting;
mod carry;
mod client;
mod dispatch;
mod memory;
mod resource_pool;
mod runtime;
mod values;
mod worker;

use pyo3::prelude::*;

/// What the packages stand on; not for others.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::client::{Client, Lease, client_settings, wait_for_ending};
    #[pymodule_export]
    use crate::dispatch::Run;
    #[pymodule_export]
    use crate::resource_pool::{HeldWorker, ResourcePool};
    #[pymodule_export]
    use crate::worker::{interrupted, serve_as_worker};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        runtime::watch(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
