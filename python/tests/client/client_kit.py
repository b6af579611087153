"""HTTP requests to an agent, and Python programs in processes of their own, for the tests of the client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from typing import Any, Callable

from agents import Agent

#: Longer than any step of a passing test.
TIMEOUT_SECS = 60.0


def get(agent: Agent, route: str) -> Any:
    with urllib.request.urlopen(agent.url + route, timeout=TIMEOUT_SECS) as response:
        return json.load(response)


def post(agent: Agent, route: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(agent.url + route, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECS) as response:
        return json.load(response)


def delete(agent: Agent, route: str) -> None:
    request = urllib.request.Request(agent.url + route, method="DELETE")
    urllib.request.urlopen(request, timeout=TIMEOUT_SECS).close()


def list_leases(agent: Agent, *states: str) -> list[dict[str, Any]]:
    """Return the leases in these states (default: active, queued and offered)."""
    states = states or ("active", "queued", "offered")
    return [lease for lease in get(agent, "/v1/leases")["leases"] if lease["state"] in states]


def wait_until(agent: Agent, is_true: Callable[[], bool], condition: str) -> None:
    """Wait until `is_true` returns true; test it again after each event of the agent."""
    with urllib.request.urlopen(agent.url + "/v1/events", timeout=TIMEOUT_SECS) as events:
        # The agent sends at least a keep-alive line every few seconds.
        for _ in range(200):
            if is_true():
                return
            if not events.readline():
                break
    raise AssertionError(f"not reached: {condition}; leases: {list_leases(agent)}")


def wait_until_free(agent: Agent) -> None:
    wait_until(agent, lambda: not list_leases(agent), "all leases are released")


def start_program(
    source: str, *arguments: str, environment: dict[str, str] | None = None, stdin: bool = False
) -> subprocess.Popen[str]:
    """Start a Python program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def run_program(source: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a Python program, check that it succeeds, and return its output."""
    process = start_program(source, *arguments, environment=environment)
    output, errors = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0, f"exit code {process.returncode}: {output}\n{errors}"
    return output


def wait_for_line(process: subprocess.Popen[str], prefix: str) -> str:
    """Wait until a program prints a line with this prefix, and return the line."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return line.strip()
    raise AssertionError(f"the program ended without printing {prefix!r}: {process.stderr.read()}")
