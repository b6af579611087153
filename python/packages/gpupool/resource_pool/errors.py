"""Exceptions of resource pools."""

from __future__ import annotations


class WorkerError(Exception):
    """A worker failed, or its result cannot be sent; base class of all others except `PoolClosedError`."""


class WorkerLimitError(WorkerError):
    """A worker exceeded a limit and was killed with all processes it started."""


class WorkerTimeoutError(WorkerLimitError):
    """A task used a worker for longer than `worker_timeout_secs`."""


class WorkerMemoryError(WorkerLimitError):
    """A worker used more memory than `worker_memory_mb`."""


class WorkerLostError(WorkerError):
    """A worker died, was killed, or was released before its work was done."""


class WorkerStartError(WorkerError):
    """No worker is running and none can be started; the message gives the reason."""


class PoolClosedError(RuntimeError):
    """The pool is shut down."""
