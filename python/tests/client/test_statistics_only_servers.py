"""Statistics-only servers: the client itself assigns the GPUs, and its status reports this."""

from __future__ import annotations

import asyncio

import pytest
from published_server import PublishedServer
from client_kit import TIMEOUT_SECS

from gpu_worker_pool import GPUWorkerPoolClient, WorkerTimeoutError


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECS))


def test_the_client_never_assigns_a_gpu_twice() -> None:
    async def scenario(url: str) -> None:
        async with GPUWorkerPoolClient(url, polling_interval=0.05) as client:
            first, second = await client.request_gpu(), await client.request_gpu()
            # The least used GPU is first; a GPU at a threshold is never assigned.
            assert (first.gpu_id, second.gpu_id) == (1, 0)
            status = client.get_pool_status()
            assert status.authority == "client" and status.available_gpus == 0 and status.total_gpus == 4
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.2)
            waiting = asyncio.ensure_future(client.request_gpu())
            await client.release_gpu(first)
            assert (await waiting).gpu_id == first.gpu_id
            with pytest.raises(ValueError):
                await client.release_gpu(type(first)(2, "unknown", first.assigned_at))

    with PublishedServer((20.0, 20), (10.0, 10), (80.0, 0), (0.0, 90)) as server:
        run(lambda: scenario(server.url))


def test_utilization_can_be_fractional() -> None:
    async def scenario(url: str) -> None:
        async with GPUWorkerPoolClient(url, polling_interval=0.05) as client:
            assert (await client.request_gpu()).gpu_id == 1
            assert client.get_pool_status().available_gpus == 0

    with PublishedServer((0.0, 90.4), (0.0, 89.6)) as server:
        run(lambda: scenario(server.url))


def test_waiting_requests_are_served_in_order() -> None:
    async def scenario(url: str) -> None:
        async with GPUWorkerPoolClient(url, polling_interval=0.05) as client:
            held = await client.request_gpu()
            order: list[int] = []

            async def wait(number: int) -> None:
                mine = await client.request_gpu()
                order.append(number)
                await client.release_gpu(mine)

            waiting = []
            for number in range(5):
                waiting.append(asyncio.ensure_future(wait(number)))
                await asyncio.sleep(0)
            await client.release_gpu(held)
            await asyncio.gather(*waiting)
            assert order == [0, 1, 2, 3, 4]

    with PublishedServer((0.0, 0)) as server:
        run(lambda: scenario(server.url))


def test_agents_and_statistics_only_servers_form_one_pool(start_agent) -> None:
    async def scenario(urls: str) -> None:
        async with GPUWorkerPoolClient(service_endpoints=urls, load_balancing_strategy="round_robin") as client:
            held = [await client.request_gpu() for _ in range(4)]
            assert len({assignment.global_gpu_id for assignment in held}) == 4
            assert client.get_pool_status().authority == "mixed"

    agent = start_agent("2xH100")
    with PublishedServer((0.0, 0), (0.0, 0)) as server:
        run(lambda: scenario(f"{server.url},{agent.url}"))
