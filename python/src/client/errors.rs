//! What went wrong, as the exceptions of `gpupool.errors`, with the words of the client.

use gpupool_client::ClientError;
use pyo3::prelude::*;

/// The exception for an error.
pub(super) fn exception(py: Python<'_>, error: &ClientError) -> PyErr {
    made(py, error).unwrap_or_else(|failed| failed)
}

fn made(py: Python<'_>, error: &ClientError) -> PyResult<PyErr> {
    let class = py.import("gpupool.errors")?.getattr(class_of(error))?;
    let raised = class.call1((error.to_string(),))?;
    if let Some(code) = error.code() {
        raised.setattr("code", code)?;
    }
    if let ClientError::WaitedTooLong { worker_id, .. } | ClientError::Stale { worker_id, .. } = error {
        raised.setattr("worker_id", worker_id)?;
    }
    Ok(PyErr::from_value(raised))
}

/// The name of a class, by what a program can do about the error.
fn class_of(error: &ClientError) -> &'static str {
    match error {
        ClientError::InvalidEndpoint { .. } | ClientError::Setting { .. } | ClientError::Configuration(_) => {
            "ConfigurationError"
        }
        ClientError::AlreadyStarted | ClientError::NotStarted { .. } => "ClientStateError",
        ClientError::WaitedTooLong { .. } => "WorkerTimeoutError",
        ClientError::Stale { .. } => "StaleAssignmentError",
        ClientError::BreakerOpen { .. } => "CircuitBreakerOpenError",
        ClientError::NeverGranted { .. } => "InvalidAssignmentError",
        ClientError::Problem(problem) => match (problem.code.as_str(), problem.status) {
            ("no_capacity", _) => "NoCapacityError",
            (_, 401 | 403) => "NotAllowedError",
            (_, 429 | 500..) => "ServiceUnavailableError",
            _ => "RequestRefusedError",
        },
        ClientError::Ended(_) => "RequestRefusedError",
        _ => "ServiceUnavailableError",
    }
}
