"""Fixtures that fail a test after a deadline, or if one of its processes is left."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any, Iterator

import pytest

from dispatch_kit import MARK_VARIABLE, TIMEOUT_SECS, marked_processes, wait_until


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes of this test by a variable in their environment; none may be left at the end."""
    text = uuid.uuid4().hex
    monkeypatch.setenv(MARK_VARIABLE, text)
    yield text
    try:
        # A zombie has no environment, so it does not count.
        wait_until(lambda: not marked_processes(), f"all processes of the test have exited: {marked_processes()}")
    finally:
        for process in marked_processes():
            os.kill(process, signal.SIGKILL)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Fail a test that hangs, with a traceback."""

    def fail(_number: int, _frame: Any) -> None:
        raise AssertionError(f"the test exceeded {TIMEOUT_SECS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SECS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
