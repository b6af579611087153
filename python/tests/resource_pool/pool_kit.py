"""Resource pools for tests, whose processes have a marking variable in their environment."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import uuid
from pathlib import Path
from typing import Any, Coroutine, TypeVar

from gpupool.resource_pool import ResourceConfig, ResourcePool

TIMEOUT_SECS = 60
MARK_VARIABLE = "GPUPOOL_TEST_POOLS"
Result = TypeVar("Result")


class PoolTracker:
    """Pools and processes of one test."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.pools: list[ResourcePool] = []

    def create(
        self, workers: int = 1, timeout_secs: float = TIMEOUT_SECS, memory_mb: float = 1024, **options: Any
    ) -> ResourcePool:
        self.pools.append(ResourcePool(ResourceConfig(workers, timeout_secs, memory_mb, **options)))
        return self.pools[-1]

    def processes(self) -> list[int]:
        """Return the pids of this test's processes, except itself and zombies."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def workers(self) -> list[int]:
        """Return the pids of this test's Python processes, which excludes supervisor processes."""
        return [pid for pid in self.processes() if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]

    def check_no_process_is_left(self) -> None:
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()}
        assert not left, f"processes are left: {left}"

    def _is_ours(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK_VARIABLE}={self.name}".encode() in variables and pid != os.getpid()


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in its own loop, with a deadline."""
    return asyncio.run(with_deadline(coroutine))


async def with_deadline(awaitable: Any, timeout_secs: float = TIMEOUT_SECS) -> Any:
    """Await with a deadline, without cancelling an awaitable that is in time."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=timeout_secs)
    if not done:
        task.cancel()
        raise AssertionError(f"not done within {timeout_secs} s: {awaitable}")
    return task.result()


def wait_for_exit(*pids: int) -> None:
    """Block until these processes have exited."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            exited, _, _ = select.select([pidfd], [], [], TIMEOUT_SECS)
        finally:
            os.close(pidfd)
        assert exited, f"process {pid} is still there"


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command line of a Python program."""
    return [sys.executable, "-c", program, *arguments]
