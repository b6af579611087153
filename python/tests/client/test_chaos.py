"""Requests of several loops, given up at any moment, while agents are killed and started again: no GPU is held twice, and in
the end all of them are free.
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
from watching import PATIENCE, wait_until_free

from gpu_worker_pool import GPUWorkerPoolClient
from gpupool.errors import GpupoolError

#: Of the first run; the soak does more of them, with the seeds that follow.
SEED = 7300
LOOPS, WORKERS, GRANTS, KILLS = 3, 4, 10, 2
#: What could not be given back because its agent was away when the client stopped is free after so long.
TTL_SECS = 5


def test_no_gpu_is_held_twice_in_chaos_and_in_the_end_all_are_free(start_agent: Callable[..., Agent]) -> None:
    until = time.monotonic() + float(os.environ.get("GPUPOOL_CHAOS_SECS", 0))
    agents = [start_agent("2xH100"), start_agent("2xH100")]
    seed, outcomes = SEED, Counter[str]()
    while seed == SEED or time.monotonic() < until:
        outcomes += Run(agents, seed).outcomes
        seed += 1
    print(f"{seed - SEED} runs, {dict(outcomes)}")


class Run:
    """Everything of one seed, except what the clock decides."""

    def __init__(self, agents: list[Agent], seed: int) -> None:
        self.outcomes, self.held, self.news = Counter[str](), set[str](), threading.Condition()
        self.client = GPUWorkerPoolClient(service_endpoints=",".join(agent.url for agent in agents))
        asyncio.run(self.client.start())
        chance = random.Random(seed)
        seeds = [[chance.random() for _ in range(WORKERS)] for _ in range(LOOPS)]
        with ThreadPoolExecutor(LOOPS) as threads:
            loops = [threads.submit(asyncio.run, self.loop(of_workers)) for of_workers in seeds]
            for _ in range(KILLS):
                self.disturb(chance.choice(agents), self.outcomes["granted"] + chance.randrange(1, 15))
            for loop in loops:
                loop.result(PATIENCE)
        asyncio.run(self.client.stop())
        for agent in agents:
            wait_until_free(agent)

    def disturb(self, agent: Agent, granted: int) -> None:
        """Kills an agent after so many grants, and starts it again."""
        with self.news:
            assert self.news.wait_for(lambda: self.outcomes["granted"] >= granted, PATIENCE), self.outcomes
        agent.kill()
        agent.start_again()
        asyncio.run(self.client.trigger_endpoint_recovery(f"127.0.0.1_{agent.port}"))

    async def loop(self, seeds: list[float]) -> None:
        await asyncio.wait_for(asyncio.gather(*(self.worker(random.Random(seed)) for seed in seeds)), PATIENCE)

    async def worker(self, chance: random.Random) -> None:
        granted = 0
        while granted < GRANTS:
            asked = self.client.request_gpu(timeout=chance.choice([0.05, 5.0]), ttl=TTL_SECS)
            try:
                assignment = await asyncio.wait_for(asked, chance.choice([0.0005, 0.001, 0.002, 0.01, 5.0]))
            except (GpupoolError, asyncio.TimeoutError) as error:
                self.count(type(error).__name__)
                continue
            granted += 1
            gpu = assignment.global_gpu_id  # type: ignore[attr-defined]
            self.count("granted", takes=gpu)
            await asyncio.sleep(chance.choice([0.0, 0.002]))
            self.count("released", gives=gpu)
            released = self.client.release_gpu(assignment)
            try:
                await asyncio.wait_for(released, chance.choice([0.0005, 0.001, 5.0]))
            except (GpupoolError, asyncio.TimeoutError) as error:
                # It goes on in the background.
                self.count(f"release: {type(error).__name__}")

    def count(self, outcome: str, takes: str = "", gives: str = "") -> None:
        with self.news:
            assert not takes or takes not in self.held, f"{takes} is held already"
            self.held |= {takes} - {""}
            self.held -= {gives}
            self.outcomes[outcome] += 1
            self.news.notify_all()
