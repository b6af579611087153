"""Exceptions, grouped by how a program can handle them."""

from __future__ import annotations

from typing import Optional

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


class GpupoolError(Exception):
    """Base class of all exceptions of gpupool."""

    #: Problem code of the server, such as `no_capacity`, if it sent one.
    code: Optional[str] = None


class ConfigurationError(GpupoolError, ValueError):
    """An argument, a variable or the configuration file is invalid: change the setting that the message names."""


class ClientStateError(GpupoolError, RuntimeError):
    """The client is not started, or is already started."""


class InvalidAssignmentError(GpupoolError, ValueError):
    """This client never granted the assignment."""


class ServiceUnavailableError(GpupoolError):
    """No server is available: wait, or start one."""


class CircuitBreakerOpenError(ServiceUnavailableError):
    """The server failed repeatedly; its circuit breaker rejects requests for a while."""


class RequestRefusedError(GpupoolError, ValueError):
    """The server can never grant this request: change the request."""


class NoCapacityError(GpupoolError):
    """No capacity is free, and the request does not wait."""


class NotAllowedError(GpupoolError, PermissionError):
    """The caller lacks the permission: use a token, or another user."""


class WorkerTimeoutError(GpupoolError, TimeoutError):
    """No GPU became free before the request's timeout."""

    #: Worker of the request.
    worker_id: Optional[str] = None


class StaleAssignmentError(GpupoolError):
    """The assignment is no longer valid: stop using its GPU and request another."""

    #: Worker of the assignment.
    worker_id: Optional[str] = None
