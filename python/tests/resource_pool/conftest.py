"""A story of its own for each test of resource pools."""

from __future__ import annotations

from typing import Iterator

import pytest
from pool_kit import MARK, Story


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    told = Story()
    monkeypatch.setenv(MARK, told.name)
    yield told
    for pool in told.pools:
        pool.shutdown()
    told.expect_nothing_left()
