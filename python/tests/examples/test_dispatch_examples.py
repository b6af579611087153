"""The examples of the dispatcher do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"


def said_by(name: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, f"{name}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def test_the_dispatcher_example_counts_primes_and_tells_of_odd_tasks() -> None:
    said = said_by("dispatcher.py")
    assert "39 tasks done; primes below 10000: 1229, below 390000: 33067" in said
    assert "task 2000000 failed: ValueError" in said and "took too long: [-1]" in said


def test_the_rich_example_finds_pi_and_says_who_did_what() -> None:
    pytest.importorskip("rich")
    said = said_by("rich_ui.py", "8")
    assert "pi is about 3.1" in said and "8 tasks" in said and "GPU 0:" in said and "GPU 1:" in said
