"""The dispatcher examples produce the expected output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"


def run_example(name: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, f"{name}: {process.stdout}{process.stderr}"
    return process.stdout


def test_the_dispatcher_example_counts_primes_and_reports_failures() -> None:
    output = run_example("dispatcher.py")
    assert "39 tasks done; primes below 10000: 1229, below 390000: 33067" in output
    assert "task 2000000 failed: ValueError" in output and "timed out: [-1]" in output


def test_the_rich_example_estimates_pi_and_lists_the_gpus() -> None:
    pytest.importorskip("rich")
    output = run_example("rich_ui.py", "8")
    assert "pi is about 3.1" in output and "8 tasks" in output and "GPU 0:" in output and "GPU 1:" in output
