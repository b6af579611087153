"""Requests of several loops are cancelled at any time while agents are killed and restarted: no GPU is assigned twice, and at
the end all GPUs are free.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

from agents import Agent
from client_kit import TIMEOUT_SECS, wait_until_free

from gpu_worker_pool import GPUWorkerPoolClient
from gpupool.errors import GpupoolError

#: Seed of the first run; the soak test continues with the next seeds.
SEED = 7300
LOOPS, WORKERS, GRANTS, KILLS = 3, 4, 10, 2
#: Time after which a lease expires that could not be released because its agent was down.
TTL_SECS = 5


def test_in_chaos_no_gpu_is_assigned_twice_and_all_are_free_at_the_end(start_agent: Callable[..., Agent]) -> None:
    until = time.monotonic() + float(os.environ.get("GPUPOOL_CHAOS_SECS", 0))
    agents = [start_agent("2xH100"), start_agent("2xH100")]
    seed, outcomes = SEED, Counter[str]()
    while seed == SEED or time.monotonic() < until:
        outcomes += Run(agents, seed).outcomes
        seed += 1
    print(f"{seed - SEED} runs, {dict(outcomes)}")


class Run:
    """Run of one seed, which determines everything except the timing."""

    def __init__(self, agents: list[Agent], seed: int) -> None:
        self.outcomes, self.held, self.changed = Counter[str](), set[str](), threading.Condition()
        self.client = GPUWorkerPoolClient(service_endpoints=",".join(agent.url for agent in agents))
        asyncio.run(self.client.start())
        rng = random.Random(seed)
        seeds = [[rng.random() for _ in range(WORKERS)] for _ in range(LOOPS)]
        with ThreadPoolExecutor(LOOPS) as threads:
            loops = [threads.submit(asyncio.run, self.loop(of_workers)) for of_workers in seeds]
            for _ in range(KILLS):
                self.restart_agent(rng.choice(agents), self.outcomes["granted"] + rng.randrange(1, 15))
            for loop in loops:
                loop.result(TIMEOUT_SECS)
        asyncio.run(self.client.stop())
        for agent in agents:
            wait_until_free(agent)

    def restart_agent(self, agent: Agent, granted: int) -> None:
        """Kill an agent after this number of grants, and start it again."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.outcomes["granted"] >= granted, TIMEOUT_SECS), self.outcomes
        agent.kill()
        agent.restart()
        asyncio.run(self.client.trigger_endpoint_recovery(f"127.0.0.1_{agent.port}"))

    async def loop(self, seeds: list[float]) -> None:
        await asyncio.wait_for(asyncio.gather(*(self.worker(random.Random(seed)) for seed in seeds)), TIMEOUT_SECS)

    async def worker(self, rng: random.Random) -> None:
        granted = 0
        while granted < GRANTS:
            request = self.client.request_gpu(timeout=rng.choice([0.05, 5.0]), ttl=TTL_SECS)
            try:
                assignment = await asyncio.wait_for(request, rng.choice([0.0005, 0.001, 0.002, 0.01, 5.0]))
            except (GpupoolError, asyncio.TimeoutError) as error:
                self.count(type(error).__name__)
                continue
            granted += 1
            gpu = assignment.global_gpu_id  # type: ignore[attr-defined]
            self.count("granted", assigns=gpu)
            await asyncio.sleep(rng.choice([0.0, 0.002]))
            self.count("released", releases=gpu)
            released = self.client.release_gpu(assignment)
            try:
                await asyncio.wait_for(released, rng.choice([0.0005, 0.001, 5.0]))
            except (GpupoolError, asyncio.TimeoutError) as error:
                # The release continues in the background.
                self.count(f"release: {type(error).__name__}")

    def count(self, outcome: str, assigns: str = "", releases: str = "") -> None:
        with self.changed:
            assert not assigns or assigns not in self.held, f"{assigns} is held already"
            self.held |= {assigns} - {""}
            self.held -= {releases}
            self.outcomes[outcome] += 1
            self.changed.notify_all()
