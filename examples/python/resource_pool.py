"""Workers with limits: who passes them is told at once, and the pool goes on.

    python examples/python/resource_pool.py

Needs no GPU, no server, and a few seconds.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from gpupool.resource_pool import (
    BayesianInferenceEngine,
    ResourceConfig,
    ResourcePool,
    WorkerMemoryError,
    WorkerTimeoutError,
)


def count_primes(below: int) -> int:
    return sum(all(number % divisor for divisor in range(2, math.isqrt(number) + 1)) for number in range(2, below))


def never_ends() -> None:
    while True:
        pass


def takes_all_memory() -> None:
    taken = []
    while True:
        taken.append(bytes(1 << 24))


async def basic(pool: ResourcePool) -> None:
    async with pool.acquire_worker("primes") as worker:
        primes = await worker.run(count_primes, 10_000)
        print(f"worker {worker.id} on {worker.device} found {primes} primes with {worker.get_memory_usage_mb():.0f} MB")


def links(count: int) -> list[dict[str, Any]]:
    """Causal links, with witnesses for and against them."""
    chance = random.Random(7)
    return [
        {
            "id": f"link{number}",
            "source": "training",
            "target": "skills",
            "evidence": [{"kind": chance.choice(["report", "budget"]), "supports": chance.random() < 0.7} for _ in range(12)],
            "required_evidence": ["report", "budget"],
        }
        for number in range(count)
    ]


async def inference(pool: ResourcePool) -> None:
    found = await BayesianInferenceEngine(pool).infer_mechanism(links(1)[0])
    low, high = found["credible_interval"]
    print(f"posterior mean {found['posterior_mean']:.2f} ({low:.2f} to {high:.2f}), {found['necessity_test']}")


def walk(link: dict[str, Any]) -> dict[str, Any]:
    """A sampler of one's own: a random walk over the log-odds of the mechanism (Metropolis), with a normal prior."""
    supports = [bool(piece["supports"]) for piece in link["evidence"]]

    def log_density(odds: float) -> float:
        for_it = -math.log1p(math.exp(-odds))
        against = -math.log1p(math.exp(odds))
        return sum(for_it if support else against for support in supports) - odds * odds / 8

    chance = random.Random(link["id"])
    odds, drawn, accepted = 0.0, [], 0
    for _ in range(5_000):
        other = odds + chance.gauss(0, 1)
        if math.log(chance.random()) < log_density(other) - log_density(odds):
            odds, accepted = other, accepted + 1
        drawn.append(1 / (1 + math.exp(-odds)))
    kept = drawn[1_000:]
    return {"posterior_mean": sum(kept) / len(kept), "acceptance": accepted / len(drawn)}


async def concurrent(pool: ResourcePool) -> None:
    engine = BayesianInferenceEngine(pool, sampler=walk)
    found = await asyncio.gather(*(engine.infer_mechanism(link) for link in links(10)))
    workers = sorted({one["worker_id"] for one in found})
    print(f"10 inferences by workers {workers}, means {[round(one['posterior_mean'], 2) for one in found]}")


async def errors(pool: ResourcePool) -> None:
    for work in (never_ends, takes_all_memory):
        try:
            async with pool.acquire_worker(work.__name__) as worker:
                await worker.run(work)
        except (WorkerTimeoutError, WorkerMemoryError) as error:
            print(f"{work.__name__}: {error}")


async def monitoring(pool: ResourcePool) -> None:
    status = pool.get_pool_status()
    print(f"{status['available_workers']} of {status['total_workers']} workers are available")
    for entry in pool.audit():
        if entry.outcome != "released":
            print(f"{entry.task_id} on worker {entry.worker_id} ended by {entry.outcome}")


async def main() -> None:
    config = ResourceConfig(max_workers=2, worker_timeout_secs=2, worker_memory_mb=256, devices=["cpu"])
    async with ResourcePool(config) as pool:
        for part in (basic, inference, concurrent, errors, monitoring):
            print(f"--- {part.__name__}")
            await part(pool)


if __name__ == "__main__":
    asyncio.run(main())
