"""Pool of worker processes."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Awaitable, Generator, List, Optional, Type

from .. import _function_worker, _native, _worker_program
from .config import ResourceConfig
from .acquisition import WorkerAcquisition


class ResourcePool:
    """Pool of worker processes; tasks acquire workers in first-in, first-out order.

    A pool can be created without an event loop and used by several. It ends with `shutdown()`, at the end of `async with` or
    `with`, when it is garbage-collected, and at program exit; all its processes end with it. A forked child cannot use it.
    """

    def __init__(self, config: Optional[ResourceConfig] = None) -> None:
        self.config = ResourceConfig() if config is None else config
        self.config.check()
        _worker_program.check_not_loading_main("a resource pool")
        program = _worker_program.WorkerProgram(_function_worker.start_worker)
        self._native = _native.ResourcePool(
            {
                **self.config._native_settings(),
                "program": program.arguments,
                "settings": program.settings,
                "helper": program.helper,
                "by_value": program.by_value,
            }
        )
        self._close = weakref.finalize(self, self._native.close)

    def acquire_worker(self, task_id: str) -> WorkerAcquisition:
        """Return a context manager that acquires a worker: `async with pool.acquire_worker(task_id) as worker:`.

        The wait for a worker raises `asyncio.TimeoutError` after `acquire_timeout_secs`. An exceeded limit interrupts the
        block, which then raises `WorkerTimeoutError` or `WorkerMemoryError`.
        """
        return WorkerAcquisition(self._native, str(task_id))

    def get_pool_status(self) -> dict[str, Any]:
        """Return the current state. `ready_workers` of the `available_workers` run; the others are being started."""
        status: dict[str, Any] = self._native.status()
        is_failing = status["failure"] is not None
        available_workers = status["ready_workers"] if is_failing else status["total_workers"] - status["active_tasks"]
        return {
            **status,
            "available_workers": available_workers,
            "worker_timeout_secs": self.config.worker_timeout_secs,
            "worker_memory_mb": self.config.worker_memory_mb,
        }

    def audit(self) -> List[AuditEntry]:
        """Return the last 10,000 acquisitions, in the order of their start."""
        return [AuditEntry._from_native(entry) for entry in self._native.audit()]

    async def ready(self) -> None:
        """Wait until `min_workers` workers are set up; raise an error if none can be."""
        await self._native.ready()

    def shutdown(self) -> Awaitable[None]:
        """Shut the pool down: waiting tasks get an error, and workers finish their current work.

        The call starts the shutdown; await the result to wait for its end. Without a running loop the call itself waits.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._native.shutdown_blocking()
            return _CompletedShutdown()
        return self._native.shutdown()

    async def __aenter__(self) -> ResourcePool:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self._native.shutdown()

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], raised: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._native.shutdown_blocking()


@dataclass(frozen=True)
class AuditEntry:
    """Task that used a worker, with its times and its outcome."""

    task_id: str
    worker_id: int
    device: str
    pid: int
    #: Unix time in seconds.
    acquired_at: float
    ended_at: Optional[float]
    #: released, timeout, memory, excess, killed, lost, abandoned (released during its work) or closed; `None` if not ended.
    outcome: Optional[str]
    #: Details of the outcome.
    detail: Optional[str]

    @classmethod
    def _from_native(cls, entry: dict[str, Any]) -> AuditEntry:
        ended = entry.get("ended") or {}
        return cls(
            task_id=entry["task_id"],
            worker_id=entry["worker_id"],
            device=entry["device"],
            pid=entry["pid"],
            acquired_at=entry["acquired_at_ms"] / 1000,
            ended_at=ended["at_ms"] / 1000 if ended else None,
            outcome=ended.get("how"),
            detail=ended.get("why"),
        )


class _CompletedShutdown:
    """Awaitable that is already done."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield
