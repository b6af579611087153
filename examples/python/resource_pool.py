"""Workers with limits: an exceeded limit raises an error at once, and the pool continues.

    python examples/python/resource_pool.py

The example needs no GPU and no server, and takes a few seconds.
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
    chunks = []
    while True:
        chunks.append(bytes(1 << 24))


async def basic(pool: ResourcePool) -> None:
    async with pool.acquire_worker("primes") as worker:
        primes = await worker.run(count_primes, 10_000)
        print(f"worker {worker.id} on {worker.device} found {primes} primes with {worker.get_memory_usage_mb():.0f} MB")


def links(count: int) -> list[dict[str, Any]]:
    """Return causal links with evidence for and against them."""
    rng = random.Random(7)
    return [
        {
            "id": f"link{number}",
            "source": "training",
            "target": "skills",
            "evidence": [{"kind": rng.choice(["report", "budget"]), "supports": rng.random() < 0.7} for _ in range(12)],
            "required_evidence": ["report", "budget"],
        }
        for number in range(count)
    ]


async def inference(pool: ResourcePool) -> None:
    result = await BayesianInferenceEngine(pool).infer_mechanism(links(1)[0])
    low, high = result["credible_interval"]
    print(f"posterior mean {result['posterior_mean']:.2f} ({low:.2f} to {high:.2f}), {result['necessity_test']}")


def sample_posterior(link: dict[str, Any]) -> dict[str, Any]:
    """Sample the posterior by a Metropolis random walk over the log-odds of the mechanism, with a normal prior."""
    supports = [bool(piece["supports"]) for piece in link["evidence"]]

    def log_density(odds: float) -> float:
        supporting = -math.log1p(math.exp(-odds))
        contradicting = -math.log1p(math.exp(odds))
        return sum(supporting if support else contradicting for support in supports) - odds * odds / 8

    rng = random.Random(link["id"])
    odds, samples, accepted = 0.0, [], 0
    for _ in range(5_000):
        proposal = odds + rng.gauss(0, 1)
        if math.log(rng.random()) < log_density(proposal) - log_density(odds):
            odds, accepted = proposal, accepted + 1
        samples.append(1 / (1 + math.exp(-odds)))
    retained = samples[1_000:]
    return {"posterior_mean": sum(retained) / len(retained), "acceptance": accepted / len(samples)}


async def concurrent(pool: ResourcePool) -> None:
    engine = BayesianInferenceEngine(pool, sampler=sample_posterior)
    results = await asyncio.gather(*(engine.infer_mechanism(link) for link in links(10)))
    workers = sorted({result["worker_id"] for result in results})
    print(f"10 inferences by workers {workers}, means {[round(result['posterior_mean'], 2) for result in results]}")


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
        for example in (basic, inference, concurrent, errors, monitoring):
            print(f"--- {example.__name__}")
            await example(pool)


if __name__ == "__main__":
    asyncio.run(main())
