"""Workers on GPUs that are leased from an agent."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any, Callable

import pool_tasks
import pytest
from gpupool.resource_pool import WorkerLostError
from pool_kit import PoolTracker, run_async


@pytest.fixture
def leased(start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start the machine's default agent with two GPUs."""
    agent = start_agent("2xH100")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", agent.url)
    return agent


def active_leases(agent: Any) -> list[int]:
    response = json.loads(agent.run_command("lease", "list", "--json"))
    return [lease["id"] for lease in response if lease["state"] == "active"]


def revoke(agent: Any, lease: int) -> None:
    url = f"{agent.url}/v1/leases/{lease}/revoke"
    body = json.dumps({"grace_secs": 0}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60).close()


def test_each_worker_sees_only_its_own_gpu(pools: PoolTracker, leased: Any) -> None:
    async def main() -> None:
        pool = pools.create(2, devices="auto")
        async with pool.acquire_worker("a") as a, pool.acquire_worker("b") as b:
            assert (a.device, b.device) == ("cuda:0", "cuda:0")
            assert sorted(a.gpu_ids + b.gpu_ids) == [0, 1]
            visible = {await worker.run(os.getenv, "CUDA_VISIBLE_DEVICES") for worker in (a, b)}
            assert len(visible) == 2 and None not in visible, visible
            assert len(active_leases(leased)) == 2
            assert pool.get_pool_status()["total_workers"] == 2
        await pool.shutdown()
        assert active_leases(leased) == [], "the shutdown releases the leases"

    run_async(main())


def test_a_worker_with_a_revoked_gpu_is_reported_and_replaced(pools: PoolTracker, leased: Any) -> None:
    async def main() -> None:
        pool = pools.create(1, devices="auto")
        async with pool.acquire_worker("revoked") as worker:
            (lease,) = active_leases(leased)
            revoke(leased, lease)
            with pytest.raises(WorkerLostError, match="its GPU was withdrawn"):
                await worker.run(pool_tasks.wait_forever)
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1
            assert active_leases(leased) != [lease]

    run_async(main())


def test_a_missing_agent_is_reported(pools: PoolTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RuntimeError, match='devices="auto": '):
        pools.create(1, devices="auto")
