"""The example runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pool_kit import PATIENCE_SECS, Story

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "resource_pool.py"


def test_the_example_shows_what_it_promises(story: Story) -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=PATIENCE_SECS)
    assert ran.returncode == 0, ran.stderr
    for line in (
        "found 1229 primes",
        "10 inferences by workers [",
        "never_ends: Worker exceeded 2s timeout",
        "takes_all_memory: Worker exceeded 256MB memory limit",
        "2 of 2 workers are available",
        "never_ends on worker",
    ):
        assert line in ran.stdout, ran.stdout
