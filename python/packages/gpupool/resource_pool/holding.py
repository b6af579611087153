"""Waiting in line for a worker, having it, and giving it back."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Optional, Type

from .. import _native
from .errors import WorkerLimitError
from .limit import Limit, passed_limit
from .worker import Worker

logger = logging.getLogger("gpupool.resource_pool")


class Holding:
    """What `acquire_worker` gives, for one `async with`, or one `with` in a program without a loop."""

    def __init__(self, pool: _native.ResourcePool, task_id: str) -> None:
        self._pool = pool
        self._task_id = task_id
        self._is_begun = False
        self._held: Optional[_native.HeldWorker] = None
        self._worker: Optional[Worker] = None
        self._limit: Optional[Limit] = None

    async def __aenter__(self) -> Worker:
        self._begin()
        self._held = await self._pool.acquire(self._task_id)
        self._limit = Limit(self._held)
        return self._got(self._held)

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assert self._held is not None and self._limit is not None
        if isinstance(raised, GeneratorExit):
            # The loop has gone, and with it everybody who could wait.
            return self._held.give_back()
        error = self._limit.end(raised)
        self._told_of(passed_limit(self._held))
        # Done at the call; the wait is only for others to see it.
        await self._held.release()
        if error is not None:
            raise error from raised

    def __enter__(self) -> Worker:
        self._begin()
        self._held = self._pool.acquire_blocking(self._task_id)
        return self._got(self._held)

    def __exit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        assert self._held is not None and self._worker is not None
        passed = passed_limit(self._held)
        self._told_of(passed)
        self._held.release_blocking()
        if passed is not None and raised is None and not self._worker._is_told:
            raise passed

    def _begin(self) -> None:
        if self._is_begun:
            raise RuntimeError("acquire_worker is called anew for each worker")
        self._is_begun = True

    def _got(self, held: _native.HeldWorker) -> Worker:
        self._worker = Worker(held, self._task_id, self._limit)
        logger.info("Task %s has worker %d on %s", self._task_id, held.id, held.device, extra=self._extra(held))
        return self._worker

    def _told_of(self, passed: Optional[WorkerLimitError]) -> None:
        held = self._held
        assert held is not None
        extra = self._extra(held)
        if passed is not None:
            logger.critical("Task %s: %s; worker %d is replaced", self._task_id, passed, held.id, extra=extra)
        else:
            logger.info("Task %s gives worker %d back", self._task_id, held.id, extra=extra)

    def _extra(self, held: _native.HeldWorker) -> dict[str, object]:
        return {"task_id": self._task_id, "worker_id": held.id, "device": held.device, "worker_pid": held.pid}
