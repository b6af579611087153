//! The native module of the Python package: thin classes over the client and the dispatcher.
//!
//! - `runtime`: the thread that drives futures, its access to the interpreter, and values that belong to one process
//!   and not to its forked children.
//! - `asyncio_bridge`: converts a Rust future into an `asyncio` future or a blocking call.
//! - `conversion`: Rust data as Python values.
//! - `value_codec`: packs Python values for other processes, with large ones in `shared_memory`.
//! - `client`: requests and leases.
//! - `dispatch`: a run of the dispatcher; `task_worker`: a worker process.
//! - `resource_pool`: workers that callers acquire one by one.
//!
//! Rules: no code waits while it holds the interpreter; our threads block all signals, so that Ctrl-C goes to Python;
//! objects made before a fork do nothing in the child.

mod asyncio_bridge;
mod client;
mod conversion;
mod dispatch;
mod resource_pool;
mod runtime;
mod shared_memory;
mod task_worker;
mod value_codec;

use pyo3::prelude::*;

/// Private module of the Python packages.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::client::{PyClient, PyLease, client_settings, wait_for_ending};
    #[pymodule_export]
    use crate::dispatch::PyRun;
    #[pymodule_export]
    use crate::resource_pool::{PyHeldWorker, PyResourcePool};
    #[pymodule_export]
    use crate::task_worker::{interrupted, serve_as_worker};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        runtime::register_shutdown(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
