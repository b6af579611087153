"""Many tasks of which some raise, kill their worker or never end: each has exactly one outcome, the right one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

from dispatch_kit import PATIENCE_SECS, run
from gpu_dispatch import BaseWorker

COUNT = 20_000
#: Of the first run; the soak does more of them, with the seeds that follow.
SEED = 20260


class Chaotic(BaseWorker):
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


def test_every_task_has_exactly_one_outcome_whatever_happens() -> None:
    until = time.monotonic() + float(os.environ.get("GPUPOOL_CHAOS_SECS", 0))
    seed, outcomes = SEED, Counter[str]()
    while seed == SEED or time.monotonic() < until:
        # Each run has its time anew, where there are many.
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECS)
        outcomes += one_run(seed)
        seed += 1
    print(f"{seed - SEED} runs, {dict(outcomes)}")


def one_run(seed: int) -> Counter[str]:
    chance = random.Random(seed)
    kinds = [chance.choices(["fine", "raise", "exit", "kill", "sleep"], [980, 19, 0.6, 0.4, 0.1])[0] for _ in range(COUNT)]
    # A quick task has no reason to take as long as this.
    tally = run(Chaotic, ((kind, number) for number, kind in enumerate(kinds)), [0, 1, 2, 3], task_timeout=2.0)
    tally.check_each_once(COUNT)
    outcomes = ["done" if number in tally.done else "error" if number in tally.errors else "late" for number in range(COUNT)]
    for number, (kind, outcome) in enumerate(zip(kinds, outcomes)):
        wanted = {"fine": "done", "sleep": "late"}.get(kind, "error")
        assert outcome == wanted, f"seed {seed}, task {number} ({kind}): {tally.errors.get(number, outcome)}"
    assert all(data == -number for number, data in tally.done.items())
    assert all(f"ValueError: {number}" in tally.errors[number] for number, kind in enumerate(kinds) if kind == "raise")
    return Counter(outcomes)
