"""The client examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"


def run_example(name: str, *arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_basic_client_usage_runs(agent) -> None:
    output = run_example("basic_client_usage.py", GPU_SERVICE_ENDPOINT=agent.url)
    assert "request timed out after 0.5 seconds" in output
    assert sum(line.startswith("worker ") and "on GPU" in line for line in output.splitlines()) == 8


def test_multi_endpoint_usage_runs(start_agent) -> None:
    output = run_example("multi_endpoint_usage.py", f"{start_agent().url},{start_agent('2xH100').url}")
    assert "Degradation Status: None (2/2 endpoints healthy)" in output
    assert "assigned 127.0.0.1_" in output


def test_config_examples_run() -> None:
    output = run_example("config_examples.py")
    assert "http://gpu1:8000" in output and "GPU_MEMORY_THRESHOLD_PERCENT" in output
