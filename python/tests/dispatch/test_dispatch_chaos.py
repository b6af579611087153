"""Many tasks, some of which raise, kill their worker or never end: each has exactly one outcome, the expected one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

from dispatch_kit import TIMEOUT_SECS, run_dispatcher
from gpu_dispatch import BaseWorker

COUNT = 20_000
#: Seed of the first run; the soak test continues with the next seeds.
SEED = 20260


class ChaosWorker(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        kind, number = data
        if kind == "exit":
            os._exit(1)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ValueError(number)
        if kind == "sleep":
            time.sleep(1000)
        return -number


def test_every_task_has_exactly_one_outcome_in_chaos() -> None:
    until = time.monotonic() + float(os.environ.get("GPUPOOL_CHAOS_SECS", 0))
    seed, outcomes = SEED, Counter[str]()
    while seed == SEED or time.monotonic() < until:
        # Restart the test's deadline for each run.
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SECS)
        outcomes += run_chaos(seed)
        seed += 1
    print(f"{seed - SEED} runs, {dict(outcomes)}")


def run_chaos(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    kinds = [rng.choices(["fine", "raise", "exit", "kill", "sleep"], [980, 19, 0.6, 0.4, 0.1])[0] for _ in range(COUNT)]
    # Far longer than a quick task takes.
    recorder = run_dispatcher(ChaosWorker, ((kind, number) for number, kind in enumerate(kinds)), [0, 1, 2, 3], task_timeout=2.0)
    recorder.check_one_outcome_each(COUNT)
    results, errors = recorder.results, recorder.errors
    outcomes = ["done" if task in results else "error" if task in errors else "timeout" for task in range(COUNT)]
    for number, (kind, outcome) in enumerate(zip(kinds, outcomes)):
        expected = {"fine": "done", "sleep": "timeout"}.get(kind, "error")
        assert outcome == expected, f"seed {seed}, task {number} ({kind}): {recorder.errors.get(number, outcome)}"
    assert all(data == -number for number, data in recorder.results.items())
    assert all(f"ValueError: {number}" in recorder.errors[number] for number, kind in enumerate(kinds) if kind == "raise")
    return Counter(outcomes)
