"""Interrupt the task that uses a worker when the worker exceeds a limit, as `asyncio.timeout` does.

The task is cancelled, and the cancellation becomes the limit's exception at the end of the worker's block. A cancellation
from elsewhere remains a cancellation, even if both happen at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from typing import Any, Iterator, Optional

from .._native import HeldWorker
from .errors import WorkerLimitError


class LimitWatcher:
    """Watches a worker's limits for the task that uses the worker, until the worker is released."""

    def __init__(self, native_worker: HeldWorker) -> None:
        self._native_worker = native_worker
        self._loop = asyncio.get_running_loop()
        self._task: Optional["asyncio.Task[Any]"] = asyncio.current_task()
        self._initial_cancellations = _count_cancellations(self._task)
        self._error: Optional[WorkerLimitError] = None
        #: Number of `run` calls that the task itself awaits; these raise the error directly.
        self._own_runs = 0
        self._raised_in_run = False
        self._has_cancelled = False
        self._has_ended = False
        #: Before Python 3.11: whether other code has also cancelled the task.
        self._was_cancelled_elsewhere = False
        # The native callback must not keep an abandoned acquisition alive.
        native_worker.on_limit(functools.partial(_notify_limit, weakref.ref(self)))

    def enter_run(self) -> bool:
        """Note the start of a `run` call. Return whether the task that uses the worker awaits it."""
        is_ours = self._task is not None and asyncio.current_task() is self._task
        self._own_runs += is_ours
        return is_ours

    def leave_run(self, is_ours: bool, error: Optional[WorkerLimitError]) -> None:
        """Note the end of a `run` call, which a limit may have ended with an error."""
        self._own_runs -= is_ours
        self._raised_in_run |= is_ours and error is not None
        if self._error is not None:
            # A running task is cancelled at its next await, which must belong to the body: interrupt it later.
            self._loop.call_soon(self._interrupt)

    def end(self, raised: Optional[BaseException]) -> Optional[WorkerLimitError]:
        """End the watch. Return the limit's error if it replaces the body's exception, else `None`."""
        self._has_ended = True
        error = self._error or exceeded_limit(self._native_worker)
        is_ours = self._has_cancelled and self._withdraw_cancellation(raised)
        if error is None or self._raised_in_run:
            return None
        if raised is None:
            return error
        if isinstance(raised, asyncio.CancelledError):
            return error if is_ours else None
        return error if _contains_only_limit_errors(raised) else None

    def _on_limit(self, error: WorkerLimitError) -> None:
        self._error = error
        self._interrupt()

    def _interrupt(self) -> None:
        if self._has_ended or self._raised_in_run or self._has_cancelled or self._own_runs or self._task is None:
            return
        self._has_cancelled = True
        if sys.version_info >= (3, 11):
            self._task.cancel()
        else:
            # This callback runs directly before the task, and after all code that may cancel the task until then.
            self._loop.call_soon(self._check_other_cancellation)
            self._task.cancel(msg=self)

    def _check_other_cancellation(self) -> None:
        self._was_cancelled_elsewhere |= bool(getattr(self._task, "_must_cancel", False))

    def _withdraw_cancellation(self, raised: Optional[BaseException]) -> bool:
        """Withdraw the cancellation of this watcher. Return whether no other code cancelled the task."""
        assert self._task is not None
        if sys.version_info >= (3, 11):
            return self._task.uncancel() <= self._initial_cancellations
        return not self._was_cancelled_elsewhere and self._caused_cancellation(raised)

    def _caused_cancellation(self, raised: Optional[BaseException]) -> bool:
        # `gather` and similar functions raise a new exception, whose context is the original cancellation.
        while isinstance(raised, asyncio.CancelledError):
            if raised.args[:1] == (self,):
                return True
            raised = raised.__context__
        return False


def _notify_limit(watcher_ref: "weakref.ref[LimitWatcher]", error: Exception) -> None:
    watcher = watcher_ref()
    if watcher is not None and isinstance(error, WorkerLimitError):
        watcher._on_limit(error)


def exceeded_limit(native_worker: HeldWorker) -> Optional[WorkerLimitError]:
    """Return the error of the limit that ended the worker, if a limit did."""
    error = native_worker.ended()
    return error if isinstance(error, WorkerLimitError) else None


def _count_cancellations(task: Optional["asyncio.Task[Any]"]) -> int:
    if sys.version_info >= (3, 11):
        return task.cancelling() if task is not None else 0
    return 0


def _contains_only_limit_errors(raised: BaseException) -> bool:
    """Return whether an exception group has only limit errors, as when one limit ends several `run` in a `TaskGroup`."""
    if isinstance(raised, WorkerLimitError):
        return False
    leaves = list(_leaf_exceptions(raised))
    return all(isinstance(leaf, (WorkerLimitError, asyncio.CancelledError)) for leaf in leaves)


def _leaf_exceptions(raised: BaseException) -> Iterator[BaseException]:
    members = getattr(raised, "exceptions", None)
    if not isinstance(members, tuple):
        yield raised
        return
    for member in members:
        yield from _leaf_exceptions(member)
