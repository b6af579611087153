"""Each test has a time after which it fails, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any, Iterator

import pytest

from dispatch_kit import MARK, PATIENCE_SECS, marked_processes, until


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What processes of this test have in their environment; none may be left at its end."""
    text = uuid.uuid4().hex
    monkeypatch.setenv(MARK, text)
    yield text
    try:
        # A zombie of ours has no environment any more, so it does not count.
        until(lambda: not marked_processes(), f"no process is left of this test: {marked_processes()}")
    finally:
        for process in marked_processes():
            os.kill(process, signal.SIGKILL)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A test that hangs fails, and says where."""

    def fail(_number: int, _frame: Any) -> None:
        raise AssertionError(f"the test hangs: it took longer than {PATIENCE_SECS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
