"""What can go wrong, by what a program can do about it."""

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
    """Anything that gpupool raises."""

    #: The server's name for its refusal, such as `no_capacity`, where it gave one.
    code: Optional[str] = None


class ConfigurationError(GpupoolError, ValueError):
    """An argument, a variable or the configuration file cannot be used: change what is named."""


class ClientStateError(GpupoolError, RuntimeError):
    """The client was not started, or was started already."""


class InvalidAssignmentError(GpupoolError, ValueError):
    """What was to be given back was never granted by this client."""


class ServiceUnavailableError(GpupoolError):
    """No server can be asked now: wait, or start one."""


class CircuitBreakerOpenError(ServiceUnavailableError):
    """The server failed too often and is left alone for a while."""


class RequestRefusedError(GpupoolError, ValueError):
    """The server says no, whenever it is asked: ask for something else."""


class NoCapacityError(GpupoolError):
    """Nothing is free, and the request was not to wait."""


class NotAllowedError(GpupoolError, PermissionError):
    """The server does not let this caller do that: show a token, or ask as somebody else."""


class WorkerTimeoutError(GpupoolError, TimeoutError):
    """No GPU came free in the time the request had."""

    #: Who asked.
    worker_id: Optional[str] = None


class StaleAssignmentError(GpupoolError):
    """What was assigned is not held any more: stop using it, and ask anew."""

    #: Who held it.
    worker_id: Optional[str] = None
