"""The example of the resource pool runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pool_kit import TIMEOUT_SECS, PoolTracker

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "resource_pool.py"


def test_the_example_prints_the_expected_output(pools: PoolTracker) -> None:
    process = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=TIMEOUT_SECS)
    assert process.returncode == 0, process.stderr
    for line in (
        "found 1229 primes",
        "10 inferences by workers [",
        "never_ends: Worker exceeded 2s timeout",
        "takes_all_memory: Worker exceeded 256MB memory limit",
        "2 of 2 workers are available",
        "never_ends on worker",
    ):
        assert line in process.stdout, process.stdout
