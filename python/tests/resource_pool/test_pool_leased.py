"""Workers on GPUs that are leased from a real agent."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any, Callable

import pool_work as work
import pytest
from gpupool.resource_pool import WorkerLostError
from pool_kit import Story, run


@pytest.fixture
def leased(start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent with two GPUs, which is the one of this machine."""
    agent = start_agent("2xH100")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", agent.url)
    return agent


def active(agent: Any) -> list[int]:
    told = json.loads(agent.call("lease", "list", "--json"))
    return [lease["id"] for lease in told if lease["state"] == "active"]


def revoke(agent: Any, lease: int) -> None:
    url = f"{agent.url}/v1/leases/{lease}/revoke"
    body = json.dumps({"grace_secs": 0}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60).close()


def test_each_worker_sees_a_gpu_of_its_own(story: Story, leased: Any) -> None:
    async def main() -> None:
        pool = story.pool(2, devices="auto")
        async with pool.acquire_worker("a") as a, pool.acquire_worker("b") as b:
            assert (a.device, b.device) == ("cuda:0", "cuda:0")
            assert sorted(a.gpu_ids + b.gpu_ids) == [0, 1]
            seen = {await worker.run(os.getenv, "CUDA_VISIBLE_DEVICES") for worker in (a, b)}
            assert len(seen) == 2 and None not in seen, seen
            assert len(active(leased)) == 2
            assert pool.get_pool_status()["total_workers"] == 2
        await pool.shutdown()
        assert active(leased) == [], "given back when the shutdown is over"

    run(main())


def test_a_worker_whose_gpu_is_taken_is_told_and_replaced(story: Story, leased: Any) -> None:
    async def main() -> None:
        pool = story.pool(1, devices="auto")
        async with pool.acquire_worker("unlucky") as worker:
            (lease,) = active(leased)
            revoke(leased, lease)
            with pytest.raises(WorkerLostError, match="its GPU was taken away"):
                await worker.run(work.wait_for_ever)
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1
            assert active(leased) != [lease]

    run(main())


def test_a_machine_without_an_agent_is_told(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match='devices="auto": '):
        story.pool(1, devices="auto")
