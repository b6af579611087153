"""Worker of a resource pool, while a task uses it."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, TypeVar

from .._native import HeldWorker
from .errors import WorkerLimitError
from .limit_watcher import LimitWatcher

Result = TypeVar("Result")


class Worker:
    """Worker process, from `acquire_worker` until its release."""

    def __init__(self, native_worker: HeldWorker, task_id: str, limit_watcher: Optional[LimitWatcher]) -> None:
        self._native_worker = native_worker
        self._limit_watcher = limit_watcher
        #: Task that uses the worker.
        self.task_id = task_id
        #: Number of the worker; a replacement keeps it.
        self.id: int = native_worker.id
        #: Device of the worker, such as `cpu` or `cuda:0`.
        self.device: str = native_worker.device
        #: Numbers of the worker's leased GPUs on this machine.
        self.gpu_ids: List[int] = native_worker.gpu_ids
        #: Process id of the worker.
        self.pid: int = native_worker.pid
        self._raised_limit_error = False

    async def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run the function in the worker's process. Return its result, or raise its exception.

        Calls run one after the other. A cancelled call that has begun continues in the worker.
        """
        work = (function, args, kwargs)
        if self._limit_watcher is None:
            return self._unpack_result(await self._native_worker.run(work))  # type: ignore[no-any-return]
        is_ours = self._limit_watcher.enter_run()
        exceeded: Optional[WorkerLimitError] = None
        try:
            return self._unpack_result(await self._native_worker.run(work))  # type: ignore[no-any-return]
        except WorkerLimitError as error:
            exceeded = error
            raise
        finally:
            self._limit_watcher.leave_run(is_ours, exceeded)

    def run_sync(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Do the same as `run`, for code without an event loop (`with pool.acquire_worker(…) as worker:`)."""
        try:
            result = self._native_worker.run_blocking((function, args, kwargs))
            return self._unpack_result(result)  # type: ignore[no-any-return]
        except WorkerLimitError:
            self._raised_limit_error = True
            raise

    def get_memory_usage_mb(self) -> float:
        """Return the current host memory in MiB of the worker and all processes it started."""
        return (self._native_worker.memory_usage() or 0) / 2**20

    def kill(self) -> None:
        """Kill the worker and all processes it started. The pool replaces it."""
        self._native_worker.kill()

    def __repr__(self) -> str:
        return f"<Worker {self.id} on {self.device}, process {self.pid}>"

    def _unpack_result(self, result: bytes) -> Any:
        value, error, traceback = self._native_worker.unpack(result)
        if error is not None:
            raise error from RemoteTraceback(traceback)
        return value


class RemoteTraceback(Exception):
    """Traceback of the exception in the worker."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
