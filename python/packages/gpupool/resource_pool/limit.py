"""A limit that is passed interrupts whoever holds the worker, as `asyncio.timeout` does.

The task that holds it is cancelled, and the cancellation becomes the limit's exception where the hold ends. Cancelling from
outside stays that, also when both happen at once.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from typing import Any, Iterator, Optional

from .._native import HeldWorker
from .errors import WorkerLimitError


class Limit:
    """Watches a worker for the task that holds it; over with the hold."""

    def __init__(self, held: HeldWorker) -> None:
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._task: Optional["asyncio.Task[Any]"] = asyncio.current_task()
        self._cancelling = _cancelling(self._task)
        self._error: Optional[WorkerLimitError] = None
        #: Calls of `run` that the task itself waits for: they raise the error where it belongs.
        self._runs = 0
        self._is_told = False
        self._has_cancelled = False
        self._is_over = False
        #: Before Python 3.11: somebody else cancelled the task as well.
        self._is_outside = False
        # What waits for it outside of Python must not keep alive a hold that everybody forgot.
        held.on_limit(functools.partial(_tell, weakref.ref(self)))

    def enter_run(self) -> bool:
        """Somebody begins to wait for work; whether it is the task that holds the worker."""
        is_ours = self._task is not None and asyncio.current_task() is self._task
        self._runs += is_ours
        return is_ours

    def leave_run(self, is_ours: bool, error: Optional[WorkerLimitError]) -> None:
        """The wait for work is over, by this error if by a limit."""
        self._runs -= is_ours
        self._is_told |= is_ours and error is not None
        if self._error is not None:
            # Not now: a task that runs is cancelled at its next wait, which may be none of the body's.
            self._loop.call_soon(self._interrupt)

    def end(self, raised: Optional[BaseException]) -> Optional[WorkerLimitError]:
        """The hold is over, with what its body raised; which error is to be raised in its place."""
        self._is_over = True
        error = self._error or passed_limit(self._held)
        is_ours = self._has_cancelled and self._take_cancellation_back(raised)
        if error is None or self._is_told:
            return None
        if raised is None:
            return error
        if isinstance(raised, asyncio.CancelledError):
            return error if is_ours else None
        return error if _is_made_of_limits(raised) else None

    def _pass(self, error: WorkerLimitError) -> None:
        self._error = error
        self._interrupt()

    def _interrupt(self) -> None:
        if self._is_over or self._is_told or self._has_cancelled or self._runs or self._task is None:
            return
        self._has_cancelled = True
        if sys.version_info >= (3, 11):
            self._task.cancel()
        else:
            # Runs right before the task does, and after all who may cancel it until then.
            self._loop.call_soon(self._look_outside)
            self._task.cancel(msg=self)

    def _look_outside(self) -> None:
        self._is_outside |= bool(getattr(self._task, "_must_cancel", False))

    def _take_cancellation_back(self, raised: Optional[BaseException]) -> bool:
        """Whether nobody else cancelled the task."""
        assert self._task is not None
        if sys.version_info >= (3, 11):
            return self._task.uncancel() <= self._cancelling
        return not self._is_outside and self._is_mark_of(raised)

    def _is_mark_of(self, raised: Optional[BaseException]) -> bool:
        # What several futures hand on, such as those of `gather`, is only the context of what comes out.
        while isinstance(raised, asyncio.CancelledError):
            if raised.args[:1] == (self,):
                return True
            raised = raised.__context__
        return False


def _tell(limit: "weakref.ref[Limit]", error: Exception) -> None:
    told = limit()
    if told is not None and isinstance(error, WorkerLimitError):
        told._pass(error)


def passed_limit(held: HeldWorker) -> Optional[WorkerLimitError]:
    """The limit that ended the worker, if one did."""
    error = held.ended()
    return error if isinstance(error, WorkerLimitError) else None


def _cancelling(task: Optional["asyncio.Task[Any]"]) -> int:
    if sys.version_info >= (3, 11):
        return task.cancelling() if task is not None else 0
    return 0


def _is_made_of_limits(raised: BaseException) -> bool:
    """A group of nothing but limits, as a `TaskGroup` makes of several `run` that ended by the same one."""
    if isinstance(raised, WorkerLimitError):
        return False
    leaves = list(_leaves(raised))
    return all(isinstance(leaf, (WorkerLimitError, asyncio.CancelledError)) for leaf in leaves)


def _leaves(raised: BaseException) -> Iterator[BaseException]:
    members = getattr(raised, "exceptions", None)
    if not isinstance(members, tuple):
        yield raised
        return
    for member in members:
        yield from _leaves(member)
