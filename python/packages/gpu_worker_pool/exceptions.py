"""Exceptions of the client; the same classes as in `gpupool.errors`."""

from __future__ import annotations

from gpupool.errors import (
    CircuitBreakerOpenError,
    ClientStateError,
    ConfigurationError,
    GpupoolError,
    InvalidAssignmentError,
    NoCapacityError,
    NotAllowedError,
    RequestRefusedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)

__all__ = [
    "CircuitBreakerOpenError",
    "ClientStateError",
    "ConfigurationError",
    "GpupoolError",
    "InvalidAssignmentError",
    "NoCapacityError",
    "NotAllowedError",
    "RequestRefusedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerTimeoutError",
]
