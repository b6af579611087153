"""The pool of workers."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Awaitable, Generator, List, Optional, Type

from .. import _calls, _native, _program
from .config import ResourceConfig
from .holding import Holding


class ResourcePool:
    """Worker processes that are handed out one by one, first come first served.

    It can be made outside of a loop, and be used by several. It ends with `shutdown()`, at the end of `async with` or `with`,
    when nobody has it any more, and with the program; no process is left then. A forked child cannot use it.
    """

    def __init__(self, config: Optional[ResourceConfig] = None) -> None:
        self.config = ResourceConfig() if config is None else config
        self.config.check()
        _program.check_not_imported("a resource pool")
        program = _program.Program(_calls.start)
        self._native = _native.ResourcePool(
            {
                **self.config._wish(),
                "program": program.arguments,
                "settings": program.settings,
                "helper": program.helper,
                "by_value": program.by_value,
            }
        )
        self._close = weakref.finalize(self, self._native.close)

    def acquire_worker(self, task_id: str) -> Holding:
        """`async with pool.acquire_worker(task_id) as worker:` waits in line, and gives the worker back at the end.

        Who waits for too long gets an `asyncio.TimeoutError`. A limit that is passed interrupts the block, which then
        raises `WorkerTimeoutError` or `WorkerMemoryError`.
        """
        return Holding(self._native, str(task_id))

    def get_pool_status(self) -> dict[str, Any]:
        """How it stands now. Available are all that nobody has; `ready_workers` of them run, the others are being started."""
        status: dict[str, Any] = self._native.status()
        is_failing = status["failure"] is not None
        free = status["ready_workers"] if is_failing else status["total_workers"] - status["active_tasks"]
        return {
            **status,
            "available_workers": free,
            "worker_timeout_secs": self.config.worker_timeout_secs,
            "worker_memory_mb": self.config.worker_memory_mb,
        }

    def audit(self) -> List[AuditEntry]:
        """The last 10,000 holds, in the order they began."""
        return [AuditEntry._of(entry) for entry in self._native.audit()]

    async def ready(self) -> None:
        """Waits until `min_workers` are set up, or says why none can be."""
        await self._native.ready()

    def shutdown(self) -> Awaitable[None]:
        """Ends it: who waits is told, and workers finish what they are at. Begun at the call; awaited, it is over.

        Without a running loop it is over when the call comes back.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._native.shutdown_blocking()
            return _Over()
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
    """Who held which worker, when, and how it ended."""

    task_id: str
    worker_id: int
    device: str
    pid: int
    #: Seconds since 1970.
    acquired_at: float
    ended_at: Optional[float]
    #: released, timeout, memory, excess, killed, lost, abandoned (given back at work), closed; None while it is held.
    outcome: Optional[str]
    #: More about it.
    detail: Optional[str]

    @classmethod
    def _of(cls, entry: dict[str, Any]) -> AuditEntry:
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


class _Over:
    """Awaited, it is over at once."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield
