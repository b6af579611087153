"""Count primes in worker processes, one for each "GPU" (simulated by a CPU here), with tasks that fail or time out.

    python examples/python/dispatcher.py
"""

from __future__ import annotations

import sys
import time
from typing import Any

from gpu_dispatch import BaseWorker, Dispatcher


class PrimeCounter(BaseWorker):
    """Counts the primes below a number. `setup` runs once in each process: load a model there."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.largest = kwargs["largest"]
        # A program for GPUs would load a model: self.model = load().to(f"cuda:{gpu_id}")

    def process(self, data: int) -> int:
        if data < 0:
            time.sleep(3600)
        if data > self.largest:
            raise ValueError(f"{data} is more than {self.largest}")
        sieve = bytearray([1]) * (data + 1)
        sieve[:2] = b"\0\0"[: data + 1]
        for number in range(2, int(data**0.5) + 1):
            if sieve[number]:
                sieve[number * number :: number] = bytes(len(range(number * number, data + 1, number)))
        return sum(sieve)

    def cleanup(self) -> None:
        pass


def main() -> int:
    limits = [10_000 * n for n in range(1, 40)] + [2_000_000, -1]
    primes: dict[int, int] = {}
    failed: dict[int, str] = {}
    timed_out: list[int] = []

    def store_result(task_id: int, data: int, worker_id: int) -> None:
        primes[limits[task_id]] = data

    def store_error(task_id: int, traceback: str, worker_id: int | None) -> None:
        failed[limits[task_id]] = traceback.strip().splitlines()[-1]

    dispatcher = Dispatcher(PrimeCounter, gpu_ids=[0, 1])
    dispatcher.run(
        iter(limits),
        on_success=store_result,
        on_error=store_error,
        on_timeout=lambda task_id, timeout, worker_id: timed_out.append(limits[task_id]),
        task_timeout=3.0,
        largest=1_000_000,
    )
    print(f"{len(primes)} tasks done; primes below 10000: {primes[10_000]}, below 390000: {primes[390_000]}")
    for limit, error in failed.items():
        print(f"task {limit} failed: {error}")
    print(f"timed out: {timed_out}")
    return 0 if primes[10_000] == 1229 else 1


if __name__ == "__main__":
    sys.exit(main())
