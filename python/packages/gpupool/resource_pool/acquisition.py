"""Wait for a worker, use it, and release it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Optional, Type

from .. import _native
from .errors import WorkerLimitError
from .limit_watcher import LimitWatcher, exceeded_limit
from .worker import Worker

logger = logging.getLogger("gpupool.resource_pool")


class WorkerAcquisition:
    """Context manager that `acquire_worker` returns, for one `async with`, or for one `with` without an event loop."""

    def __init__(self, pool: _native.ResourcePool, task_id: str) -> None:
        self._pool = pool
        self._task_id = task_id
        self._is_used = False
        self._native_worker: Optional[_native.HeldWorker] = None
        self._worker: Optional[Worker] = None
        self._limit_watcher: Optional[LimitWatcher] = None

    async def __aenter__(self) -> Worker:
        self._mark_used()
        self._native_worker = await self._pool.acquire(self._task_id)
        self._limit_watcher = LimitWatcher(self._native_worker)
        return self._enter_worker(self._native_worker)

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assert self._native_worker is not None and self._limit_watcher is not None
        if isinstance(raised, GeneratorExit):
            # The event loop was closed, so nothing can wait for the release.
            return self._native_worker.give_back()
        error = self._limit_watcher.end(raised)
        self._log_end(exceeded_limit(self._native_worker))
        # The call itself releases the worker; waiting makes the release visible to other tasks.
        await self._native_worker.release()
        if error is not None:
            raise error from raised

    def __enter__(self) -> Worker:
        self._mark_used()
        self._native_worker = self._pool.acquire_blocking(self._task_id)
        return self._enter_worker(self._native_worker)

    def __exit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assert self._native_worker is not None and self._worker is not None
        exceeded = exceeded_limit(self._native_worker)
        self._log_end(exceeded)
        self._native_worker.release_blocking()
        if exceeded is not None and raised is None and not self._worker._raised_limit_error:
            raise exceeded

    def _mark_used(self) -> None:
        if self._is_used:
            raise RuntimeError("a context manager of acquire_worker can be used once: call acquire_worker again")
        self._is_used = True

    def _enter_worker(self, native_worker: _native.HeldWorker) -> Worker:
        self._worker = Worker(native_worker, self._task_id, self._limit_watcher)
        extra = self._log_fields(native_worker)
        logger.info("Task %s acquired worker %d on %s", self._task_id, native_worker.id, native_worker.device, extra=extra)
        return self._worker

    def _log_end(self, exceeded: Optional[WorkerLimitError]) -> None:
        native_worker = self._native_worker
        assert native_worker is not None
        extra = self._log_fields(native_worker)
        if exceeded is not None:
            logger.critical("Task %s: %s; worker %d is replaced", self._task_id, exceeded, native_worker.id, extra=extra)
        else:
            logger.info("Task %s released worker %d", self._task_id, native_worker.id, extra=extra)

    def _log_fields(self, worker: _native.HeldWorker) -> dict[str, object]:
        return {"task_id": self._task_id, "worker_id": worker.id, "device": worker.device, "worker_pid": worker.pid}
