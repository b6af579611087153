"""What a test sees of an agent from outside, and programs that run beside the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from typing import Any, Callable

from agents import Agent

#: Far longer than anything takes; a test that needs it has failed.
PATIENCE = 60.0


def get(agent: Agent, route: str) -> Any:
    with urllib.request.urlopen(agent.url + route, timeout=PATIENCE) as answer:
        return json.load(answer)


def post(agent: Agent, route: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(agent.url + route, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def delete(agent: Agent, route: str) -> None:
    request = urllib.request.Request(agent.url + route, method="DELETE")
    urllib.request.urlopen(request, timeout=PATIENCE).close()


def leases(agent: Agent, *states: str) -> list[dict[str, Any]]:
    """The leases that are in one of these states; those that are active or wait, unless said."""
    wanted = states or ("active", "queued", "offered")
    return [lease for lease in get(agent, "/v1/leases")["leases"] if lease["state"] in wanted]


def wait_until(agent: Agent, is_so: Callable[[], bool], what: str) -> None:
    """Looks again after each event of the agent."""
    with urllib.request.urlopen(agent.url + "/v1/events", timeout=PATIENCE) as events:
        # The agent says something every few seconds, whatever happens.
        for _ in range(200):
            if is_so():
                return
            if not events.readline():
                break
    raise AssertionError(f"never came true: {what}; leases: {leases(agent)}")


def wait_until_free(agent: Agent) -> None:
    wait_until(agent, lambda: not leases(agent), "everything was given back")


def program(
    source: str, *arguments: str, environment: dict[str, str] | None = None, stdin: bool = False
) -> subprocess.Popen[str]:
    """Python in a process of its own, with its output to be read."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def ran(source: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """What a program says that ends well."""
    process = program(source, *arguments, environment=environment)
    said, complained = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, f"it ended with {process.returncode}: {said}\n{complained}"
    return said


def said(process: subprocess.Popen[str], word: str) -> str:
    """Waits until a program says a line that begins with a word."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.strip()
    raise AssertionError(f"it ended without saying {word!r}: {process.stderr.read()}")
