"""A worker somebody has."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, TypeVar

from .._native import HeldWorker
from .errors import WorkerLimitError
from .limit import Limit

Result = TypeVar("Result")


class Worker:
    """A worker process, from `acquire_worker` until it is given back."""

    def __init__(self, held: HeldWorker, task_id: str, limit: Optional[Limit]) -> None:
        self._held = held
        self._limit = limit
        #: Who holds it.
        self.task_id = task_id
        #: Its number, the same for all that ever take its place.
        self.id: int = held.id
        #: What it works on.
        self.device: str = held.device
        #: The leased GPUs it has, by their numbers on this machine.
        self.gpu_ids: List[int] = held.gpu_ids
        #: Its process.
        self.pid: int = held.pid
        self._is_told = False

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Runs the function in the worker's process, and gives what it returns or raises what it raises.

        Several calls are done one after the other. One that is cancelled goes on in the worker, if it was begun.
        """
        work = (function, args, kwargs)
        if self._limit is None:
            return self._value(await self._held.run(work))  # type: ignore[no-any-return]
        is_ours = self._limit.enter_run()
        passed: Optional[WorkerLimitError] = None
        try:
            return self._value(await self._held.run(work))  # type: ignore[no-any-return]
        except WorkerLimitError as error:
            passed = error
            raise
        finally:
            self._limit.leave_run(is_ours, passed)

    def run_sync(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """The same for a thread that waits, as in `with pool.acquire_worker(…) as worker:`."""
        try:
            return self._value(self._held.run_blocking((function, args, kwargs)))  # type: ignore[no-any-return]
        except WorkerLimitError:
            self._is_told = True
            raise

    def get_memory_usage_mb(self) -> float:
        """MiB of host memory it uses now, with all it started."""
        return (self._held.memory_usage() or 0) / 2**20

    def kill(self) -> None:
        """Kills it, with all it started. It can do nothing any more; another takes its place."""
        self._held.kill()

    def __repr__(self) -> str:
        return f"<Worker {self.id} on {self.device}, process {self.pid}>"

    def _value(self, answer: bytes) -> Any:
        value, error, traceback = self._held.unpack(answer)
        if error is not None:
            raise error from RemoteTraceback(traceback)
        return value


class RemoteTraceback(Exception):
    """Where in the worker it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
