"""What can go wrong with a resource pool, by what one can do about it."""

from __future__ import annotations


class WorkerError(Exception):
    """Something about a worker, such as a result that cannot be sent; all others but `PoolClosedError` are one."""


class WorkerLimitError(WorkerError):
    """A worker passed a limit, and was killed with everything it started."""


class WorkerTimeoutError(WorkerLimitError):
    """A worker was held for longer than it may be."""


class WorkerMemoryError(WorkerLimitError):
    """A worker used more memory than it may."""


class WorkerLostError(WorkerError):
    """A worker died, was killed, or was given back before it was done."""


class WorkerStartError(WorkerError):
    """There is no worker, and none can be started; the message says why."""


class PoolClosedError(RuntimeError):
    """The pool is shut down."""
