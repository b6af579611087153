"""What a client of several agents promises."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import Counter

import pytest
from agents import Agent
from watching import PATIENCE, leases

from gpu_worker_pool import (
    CircuitBreakerOpenError,
    GlobalGPUAssignment,
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    ServiceUnavailableError,
)


def run(story):
    return asyncio.run(asyncio.wait_for(story(), PATIENCE))


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def listed(*agents: Agent) -> str:
    return ",".join(agent.url for agent in agents)


def granted(client: GPUWorkerPoolClient) -> dict[str, int]:
    details = client.get_detailed_metrics()["endpoints"]["details"]
    return {endpoint_id: detail["granted"] for endpoint_id, detail in details.items()}


def test_ids_are_hosts_while_they_are_unique_and_host_and_port_otherwise(start_agent) -> None:
    first, second = start_agent(), start_agent()

    async def story() -> None:
        by_host = f"http://localhost:{first.port}/, ,http://127.0.0.1:{second.port},http://localhost:{first.port}"
        async with GPUWorkerPoolClient(service_endpoints=by_host) as client:
            assert client.is_multi_endpoint_mode()
            infos = client.get_endpoints_info()
            assert infos is not None and [info["endpoint_id"] for info in infos] == ["localhost", "127.0.0.1"]
            for spelling in ("localhost", f"localhost_{first.port}", f"http://localhost:{first.port}"):
                assert await client.trigger_endpoint_recovery(spelling) is True
            assert await client.trigger_endpoint_recovery("somewhere") is False
        async with GPUWorkerPoolClient(service_endpoints=listed(first, second)) as client:
            infos = client.get_endpoints_info()
            assert infos is not None
            ids = [info["endpoint_id"] for info in infos]
            assert ids == [f"127.0.0.1_{first.port}", f"127.0.0.1_{second.port}"]
            assert infos[0]["last_seen"] is not None and infos[0]["response_time_ms"] > 0

    run(story)


def test_an_assignment_of_several_endpoints_has_every_name(start_agent) -> None:
    agents = [start_agent("2xH100"), start_agent("2xH100")]

    async def story() -> None:
        async with GPUWorkerPoolClient(service_endpoints=listed(*agents)) as client:
            held = await client.request_gpu()
            assert isinstance(held, GlobalGPUAssignment) and isinstance(held, GPUAssignment)
            assert held.gpu_id == held.local_gpu_id
            assert held.global_gpu_id == f"{held.endpoint_id}:{held.local_gpu_id}"
            assert dataclasses.replace(held) == held
            assert GlobalGPUAssignment("a:1", "a", 1, "w", held.assigned_at).gpu_id == 1
            status = client.get_pool_status()
            assert isinstance(status, MultiEndpointPoolStatus)
            assert list(status.gpu_assignments) == [held.global_gpu_id]
            assert (status.total_endpoints, status.healthy_endpoints, status.total_gpus) == (2, 2, 4)
            assert {detail["endpoint_id"] for detail in status.endpoint_details} == set(granted(client))
            await client.release_gpu(held)
            await client.release_gpu(held)
            assert not leases(agents[0]) and not leases(agents[1])
            async with GPUContextManager(client) as gpu_id:
                assert isinstance(gpu_id, str) and gpu_id.rpartition(":")[0] in granted(client)

    run(story)


def test_one_address_in_the_list_of_the_environment_is_single_mode(agent: Agent, monkeypatch) -> None:
    monkeypatch.setenv("GPU_STATS_SERVICE_ENDPOINTS", f"{agent.url}/")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", nobody())

    async def story() -> None:
        async with GPUWorkerPoolClient() as client:
            assert not client.is_multi_endpoint_mode()
            assert isinstance((await client.request_gpu()).gpu_id, int)
        async with GPUWorkerPoolClient(service_endpoint=nobody(), service_endpoints=agent.url) as client:
            assert client.is_multi_endpoint_mode()
            assert isinstance(await client.request_gpu(), GlobalGPUAssignment)

    run(story)


def test_round_robin_goes_round(start_agent) -> None:
    agents = [start_agent("8xH100"), start_agent("2xH100")]

    async def story() -> None:
        client = GPUWorkerPoolClient(service_endpoints=listed(*agents), load_balancing_strategy="round_robin")
        async with client:
            turns = [await client.request_gpu() for _ in range(4)]
            assert Counter(turn.endpoint_id for turn in turns) == Counter(dict.fromkeys(granted(client), 2))

    run(story)


def test_weighted_follows_the_number_of_gpus(start_agent) -> None:
    agents = [start_agent("6xH100"), start_agent("2xH100")]

    async def story() -> None:
        client = GPUWorkerPoolClient(service_endpoints=listed(*agents), load_balancing_strategy="weighted")
        async with client:
            for _ in range(40):
                await client.release_gpu(await client.request_gpu())
            counts = granted(client)
            assert [counts[f"127.0.0.1_{agent.port}"] for agent in agents] == [30, 10]

    run(story)


def test_availability_prefers_the_highest_share_of_free_gpus(start_agent) -> None:
    agents = [start_agent("4xH100"), start_agent("2xH100")]

    async def story() -> None:
        async with GPUWorkerPoolClient(agents[0].url) as other:
            await other.request_gpu(gpus=3)
            async with GPUWorkerPoolClient(None, listed(*agents), "availability") as client:
                held = await client.request_gpu()
                assert held.endpoint_id == f"127.0.0.1_{agents[1].port}"
                assert client.get_detailed_metrics()["load_balancer"]["strategy_name"] == "availability"

    run(story)


def test_a_dead_endpoint_slows_neither_start_nor_requests(start_agent) -> None:
    agent = start_agent()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def story() -> None:
            # Were the silent one waited for, this would take an hour.
            client = GPUWorkerPoolClient(service_endpoints=f"{hung},{agent.url},{nobody()}", request_timeout=3600)
            async with client:
                held = await client.request_gpu()
                assert held.endpoint_id == f"127.0.0.1_{agent.port}"
                recovery = client.get_error_recovery_status()
                assert recovery["healthy_endpoints"] == [held.endpoint_id]
                assert len(recovery["degraded_endpoints"]) == 2

        run(story)


def test_what_one_agent_cannot_do_another_does_and_the_breaker_says_so(start_agent, capsys) -> None:
    first, second = start_agent(), start_agent()

    async def story() -> None:
        client = GPUWorkerPoolClient(service_endpoints=listed(first, second), polling_interval=0.05)
        async with client:
            down: asyncio.Queue = asyncio.Queue()
            client.subscribe(lambda update: update["kind"] == "endpoint_down" and down.put_nowait(update))
            first.kill()
            update = await down.get()
            assert update["endpoint_id"] == f"127.0.0.1_{first.port}"
            for _ in range(4):
                assert (await client.request_gpu()).endpoint_id == f"127.0.0.1_{second.port}"
            recovery = client.get_error_recovery_status()
            stats = recovery["circuit_breaker_stats"][update["endpoint_id"]]
            assert stats["state"] in ("open", "half_open") and stats["failure_rate"] > 0
            assert recovery["endpoint_health_summary"]["healthy_count"] == 1
            manager = recovery["degradation_manager"]
            assert not manager["is_fully_degraded"] and manager["degraded_endpoints"] == [update["endpoint_id"]]
            capsys.readouterr()
            client.print_error_recovery_summary()
            lines = capsys.readouterr().out.splitlines()
            assert lines[:2] == ["=== Error Recovery Status ===", "Degradation Status: Partial (1/2 endpoints healthy)"]
            assert any(update["endpoint_id"] in line and stats["state"] in line for line in lines[2:])

    run(story)


def test_where_nobody_answers_requests_fail_and_queued_ones_run_when_somebody_does(start_agent) -> None:
    gone = start_agent()
    gone.kill()

    async def story() -> None:
        several = GPUWorkerPoolClient(service_endpoints=f"{gone.url},{nobody()}", max_retries=0, polling_interval=0.05)
        async with several as client:
            assert client.get_error_recovery_status()["degradation_manager"]["is_fully_degraded"]
            with pytest.raises(ServiceUnavailableError):
                await client.request_gpu(timeout=30)
            queued = asyncio.ensure_future(client.queue_request_for_retry(lambda: client.request_gpu(timeout=30)))
            plain = asyncio.ensure_future(client.queue_request_for_retry(lambda: "done"))
            await asyncio.sleep(0)
            assert not queued.done() and not plain.done()
            back = start_agent("2xH100", port=gone.port)
            # Also where its breaker would leave it alone for longer.
            assert await client.trigger_endpoint_recovery(f"127.0.0.1_{back.port}")
            held = await queued
            assert held.endpoint_id == f"127.0.0.1_{back.port}"
            assert await plain == "done"
            with pytest.raises(ValueError, match="request_func"):
                await client.queue_request_for_retry(3)  # type: ignore[arg-type]

    run(story)


def test_a_single_endpoint_that_failed_too_often_is_said_to_be_left_alone(agent: Agent) -> None:
    async def story() -> None:
        async with GPUWorkerPoolClient(agent.url, polling_interval=0.05, max_retries=0) as client:
            down: asyncio.Queue = asyncio.Queue()
            client.subscribe(lambda update: update["kind"] == "endpoint_down" and down.put_nowait(update))
            agent.kill()
            await down.get()
            with pytest.raises(CircuitBreakerOpenError, match="circuit breaker"):
                await client.request_gpu()

    run(story)
