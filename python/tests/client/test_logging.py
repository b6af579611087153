"""Log records of the client and their fields."""

from __future__ import annotations

import asyncio
import logging

from agents import Agent
from client_kit import TIMEOUT_SECS, list_leases, wait_until

from gpu_worker_pool import GPUWorkerPoolClient


def test_updates_are_logged_with_worker_gpu_and_endpoint(agent: Agent, caplog) -> None:
    caplog.set_level(logging.INFO, "gpu_worker_pool")

    async def scenario() -> tuple[str, str]:
        async with GPUWorkerPoolClient(agent.url) as client:
            loop = asyncio.get_running_loop()
            held = await client.request_gpu(gpus=4)
            waiting = asyncio.ensure_future(client.request_gpu())
            await loop.run_in_executor(None, wait_until, agent, lambda: bool(list_leases(agent, "queued")), "the request waits")
            await client.release_gpu(held)
            second = await waiting
            await client.release_gpu(second)
            return held.worker_id, second.worker_id

    first, second = asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECS))
    records = [record for record in caplog.records if record.name == "gpu_worker_pool"]

    def find_record(word: str, worker: str) -> logging.LogRecord:
        return next(one for one in records if word in one.getMessage() and getattr(one, "worker_id", None) == worker)

    for word in ("assigned", "released"):
        record = find_record(word, first)
        assert record.gpu_ids == [0, 1, 2, 3] and record.gpu_id == 0
        assert record.endpoint_id == "127.0.0.1" and isinstance(record.lease, int)
    for word in ("blocked", "unblocked", "assigned", "released"):
        assert find_record(word, second).levelno == logging.INFO


def test_lost_gpus_and_endpoints_are_logged_while_the_loop_is_busy(start_agent, caplog) -> None:
    agent = start_agent()
    caplog.set_level(logging.INFO, "gpu_worker_pool")

    async def scenario() -> str:
        async with GPUWorkerPoolClient(agent.url, polling_interval=0.05) as client:
            held = await client.request_gpu(ttl=1)
            agent.kill()
            logged = {"lost": False, "unavailable": False}
            # The event loop is blocked meanwhile.
            while not all(logged.values()):
                for record in list(caplog.records):
                    for word in logged:
                        if word in record.getMessage() and record.levelno == logging.WARNING:
                            logged[word] = True
                            assert record.endpoint_id == "127.0.0.1"
                            if word == "lost":
                                assert (record.worker_id, record.gpu_id) == (held.worker_id, held.gpu_id)
            return held.worker_id

    asyncio.run(scenario())


def test_a_disabled_logger_gets_no_records(agent: Agent, caplog) -> None:
    logging.getLogger("gpu_worker_pool").setLevel(logging.ERROR)
    try:

        async def scenario() -> None:
            async with GPUWorkerPoolClient(agent.url) as client:
                await client.release_gpu(await client.request_gpu())

        asyncio.run(scenario())
    finally:
        logging.getLogger("gpu_worker_pool").setLevel(logging.NOTSET)
    assert [record for record in caplog.records if record.name == "gpu_worker_pool"] == []
