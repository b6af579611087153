//! What went wrong, as the exceptions of `gpupool.resource_pool.errors`.

use gpupool_dispatch::resource_pool::{AcquireError, ResourceError, WorkerError};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Why there is no pool.
pub(super) fn of_config(error: &ResourceError) -> PyErr {
    match error {
        ResourceError::Config { .. } => PyValueError::new_err(error.to_string()),
        ResourceError::Gpus(_) => PyRuntimeError::new_err(error.to_string()),
        ResourceError::Audit { .. } | ResourceError::System(_) => PyOSError::new_err(error.to_string()),
    }
}

/// Why somebody got no worker.
pub(super) fn of_acquire(py: Python<'_>, error: &AcquireError) -> PyErr {
    let text = error.to_string();
    match error {
        AcquireError::Timeout { .. } => named(py, "asyncio", "TimeoutError", text),
        AcquireError::NoWorker(_) => ours(py, "WorkerStartError", text),
        AcquireError::Closed => ours(py, "PoolClosedError", text),
        AcquireError::TooManyWaiting => PyRuntimeError::new_err(text),
        AcquireError::TaskId(_) => PyValueError::new_err(text),
    }
}

/// Why a worker did not do what was wanted. What functions raise is not here: that is an answer.
pub(super) fn of_worker(py: Python<'_>, error: &WorkerError) -> PyErr {
    let text = error.to_string();
    match error {
        WorkerError::Failed(_) => ours(py, "WorkerError", text),
        WorkerError::Timeout(_) => ours(py, "WorkerTimeoutError", text),
        WorkerError::Memory(_) => ours(py, "WorkerMemoryError", text),
        WorkerError::Excess(_) => ours(py, "WorkerLimitError", text),
        WorkerError::Killed | WorkerError::Lost(_) | WorkerError::GivenBack => ours(py, "WorkerLostError", text),
        WorkerError::Closed => ours(py, "PoolClosedError", text),
        WorkerError::Refused(_) => PyValueError::new_err(text),
    }
}

fn ours<'py>(py: Python<'py>, name: &str, about: impl IntoPyObject<'py>) -> PyErr {
    named(py, "gpupool.resource_pool.errors", name, about)
}

fn named<'py>(py: Python<'py>, module: &str, name: &str, about: impl IntoPyObject<'py>) -> PyErr {
    let made = py.import(module).and_then(|module| module.getattr(name)).and_then(|class| class.call1((about,)));
    made.map_or_else(|error| error, PyErr::from_value)
}
