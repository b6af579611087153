"""Real agents with simulated GPUs, for tests that need them."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
from agents import Agent


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
