"""Fixture with the pools of a test."""

from __future__ import annotations

from typing import Iterator

import pytest
from pool_kit import MARK_VARIABLE, PoolTracker


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolTracker]:
    tracker = PoolTracker()
    monkeypatch.setenv(MARK_VARIABLE, tracker.name)
    yield tracker
    for pool in tracker.pools:
        pool.shutdown()
    tracker.check_no_process_is_left()
