"""Estimate pi in worker processes, one for each "GPU" (simulated by a CPU here), with a progress display.

    python examples/python/rich_ui.py [TASKS]

In a terminal, the display shows the task and the rate of each GPU; otherwise only the result is printed.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from gpu_dispatch import BaseWorker
from gpu_dispatch.ui import RichDispatcher


class PiEstimator(BaseWorker):
    """Counts the random points of a square that lie in its circle. Each worker has its own seed."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.random = random.Random(seed)

    def process(self, data: int) -> int:
        coordinate = self.random.random
        return sum(coordinate() ** 2 + coordinate() ** 2 <= 1.0 for _ in range(data))


def main(tasks: int) -> None:
    points = 200_000
    hits: list[int] = []
    dispatcher = RichDispatcher(PiEstimator, gpu_ids=[0, 1], refresh_rate=4.0)
    result = dispatcher.run(
        (points for _ in range(tasks)),
        on_success=lambda task_id, data, worker_id: hits.append(data),
        total_tasks=tasks,
    )
    took = result["end_time"] - result["start_time"]
    print(f"pi is about {4 * sum(hits) / (points * tasks):.3f}: {result['completed']} tasks in {took:.1f} s")
    for gpu_id, gpu in result["gpu_status"].items():
        print(f"GPU {gpu_id}: {gpu['completed']} tasks, the last in {gpu['last_duration'] or 0:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
