"""Real agents with simulated GPUs, for tests that need them; and the list of tests that this machine cannot run."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, Union

import pytest
from agents import Agent


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    list_skipped(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    list_skipped(report)


def list_skipped(report: Union[pytest.TestReport, pytest.CollectReport]) -> None:
    """Adds a skipped test, or file of tests, to the file that GPUPOOL_TEST_SKIPS names."""
    path = os.environ.get("GPUPOOL_TEST_SKIPS")
    if path and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        with open(path, "a") as skips:
            skips.write(f"{report.nodeid}: {reason}\n")


@pytest.fixture
def start_agent() -> Iterator[Callable[..., Agent]]:
    """Starts agents, and ends them with the test."""
    agents: list[Agent] = []

    def start(*arguments: str, **settings: Any) -> Agent:
        agents.append(Agent(*arguments, **settings))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    """An agent with four simulated GPUs."""
    return start_agent()
