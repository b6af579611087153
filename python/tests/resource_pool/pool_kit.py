"""Pools of real worker processes, known by a variable of their environment."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import uuid
from pathlib import Path
from typing import Any, Coroutine, TypeVar

from gpupool.resource_pool import ResourceConfig, ResourcePool

PATIENCE_SECS = 60
MARK = "GPUPOOL_TEST_STORY"
Result = TypeVar("Result")


class Story:
    """The processes of one test, and pools that are gone at its end."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.pools: list[ResourcePool] = []

    def pool(
        self, workers: int = 1, timeout_secs: float = PATIENCE_SECS, memory_mb: float = 1024, **more: Any
    ) -> ResourcePool:
        self.pools.append(ResourcePool(ResourceConfig(workers, timeout_secs, memory_mb, **more)))
        return self.pools[-1]

    def processes(self) -> list[int]:
        """All that are there because of this test, but for itself and what only waits to be seen off."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def workers(self) -> list[int]:
        """The same without those that only keep others."""
        return [pid for pid in self.processes() if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]

    def expect_nothing_left(self) -> None:
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()}
        assert not left, f"processes are left: {left}"

    def _is_ours(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK}={self.name}".encode() in variables and pid != os.getpid()


def run(story: Coroutine[Any, Any, Result]) -> Result:
    """Runs it in a loop of its own, but not for ever."""
    return asyncio.run(in_time(story))


async def in_time(what: Any, patience_secs: float = PATIENCE_SECS) -> Any:
    """Waits, but not for ever; the wait itself cancels nothing that is not late."""
    task = asyncio.ensure_future(what)
    done, _ = await asyncio.wait([task], timeout=patience_secs)
    if not done:
        task.cancel()
        raise AssertionError(f"it did not come within {patience_secs} s: {what}")
    return task.result()


def wait_for_end(*pids: int) -> None:
    """Waits, and blocks meanwhile, until these processes have ended."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([handle], [], [], PATIENCE_SECS)
        finally:
            os.close(handle)
        assert ended, f"process {pid} is still there"


def python(program: str, *arguments: str) -> list[str]:
    """The command line of another interpreter that runs this."""
    return [sys.executable, "-c", program, *arguments]
