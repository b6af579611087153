"""Fixtures that start agents with simulated GPUs, and the list of skipped tests."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, Union

import pytest
from agents import Agent


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    record_skipped(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    record_skipped(report)


def record_skipped(report: Union[pytest.TestReport, pytest.CollectReport]) -> None:
    """Append a skipped test or test file to the file in GPUPOOL_TEST_SKIPS."""
    path = os.environ.get("GPUPOOL_TEST_SKIPS")
    if path and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        with open(path, "a") as skips:
            skips.write(f"{report.nodeid}: {reason}\n")


@pytest.fixture
def start_agent() -> Iterator[Callable[..., Agent]]:
    """Return a function that starts agents; they stop at the end of the test."""
    agents: list[Agent] = []

    def start(*arguments: str, **settings: Any) -> Agent:
        agents.append(Agent(*arguments, **settings))
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    """An agent with four simulated GPUs."""
    return start_agent()
