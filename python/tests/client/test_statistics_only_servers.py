"""A server that only has statistics: the client keeps the books, and says so."""

from __future__ import annotations

import asyncio

import pytest
from published_server import PublishedServer
from watching import PATIENCE

from gpu_worker_pool import GPUWorkerPoolClient, WorkerTimeoutError


def run(story):
    return asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_the_client_keeps_the_books_and_two_requests_never_share() -> None:
    async def story(url: str) -> None:
        async with GPUWorkerPoolClient(url, polling_interval=0.05) as client:
            first, second = await client.request_gpu(), await client.request_gpu()
            # The least used comes first; what is at a threshold never comes.
            assert (first.gpu_id, second.gpu_id) == (1, 0)
            status = client.get_pool_status()
            assert status.authority == "client" and status.available_gpus == 0 and status.total_gpus == 4
            with pytest.raises(WorkerTimeoutError):
                await client.request_gpu(timeout=0.2)
            waiting = asyncio.ensure_future(client.request_gpu())
            await client.release_gpu(first)
            assert (await waiting).gpu_id == first.gpu_id
            with pytest.raises(ValueError):
                await client.release_gpu(type(first)(2, "nobody", first.assigned_at))

    with PublishedServer((20.0, 20), (10.0, 10), (80.0, 0), (0.0, 90)) as server:
        run(lambda: story(server.url))


def test_utilization_may_have_a_fraction() -> None:
    async def story(url: str) -> None:
        async with GPUWorkerPoolClient(url, polling_interval=0.05) as client:
            assert (await client.request_gpu()).gpu_id == 1
            assert client.get_pool_status().available_gpus == 0

    with PublishedServer((0.0, 90.4), (0.0, 89.6)) as server:
        run(lambda: story(server.url))


def test_the_first_of_those_who_wait_gets_what_comes_free() -> None:
    async def story(url: str) -> None:
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
        run(lambda: story(server.url))


def test_servers_of_both_kinds_make_one_pool(start_agent) -> None:
    async def story(urls: str) -> None:
        async with GPUWorkerPoolClient(service_endpoints=urls, load_balancing_strategy="round_robin") as client:
            held = [await client.request_gpu() for _ in range(4)]
            assert len({one.global_gpu_id for one in held}) == 4
            assert client.get_pool_status().authority == "mixed"

    agent = start_agent("2xH100")
    with PublishedServer((0.0, 0), (0.0, 0)) as server:
        run(lambda: story(f"{server.url},{agent.url}"))
