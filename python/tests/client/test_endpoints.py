"""A client with several agents."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import Counter

import pytest
from agents import Agent
from client_kit import TIMEOUT_SECS, list_leases

from gpu_worker_pool import (
    CircuitBreakerOpenError,
    GlobalGPUAssignment,
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    MultiEndpointPoolStatus,
    ServiceUnavailableError,
)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECS))


def unused_address() -> str:
    """Return a URL at which no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def join_urls(*agents: Agent) -> str:
    return ",".join(agent.url for agent in agents)


def granted_by_endpoint(client: GPUWorkerPoolClient) -> dict[str, int]:
    details = client.get_detailed_metrics()["endpoints"]["details"]
    return {endpoint_id: detail["granted"] for endpoint_id, detail in details.items()}


def test_ids_are_hosts_while_they_are_unique_and_host_and_port_otherwise(start_agent) -> None:
    first, second = start_agent(), start_agent()

    async def scenario() -> None:
        by_host = f"http://localhost:{first.port}/, ,http://127.0.0.1:{second.port},http://localhost:{first.port}"
        async with GPUWorkerPoolClient(service_endpoints=by_host) as client:
            assert client.is_multi_endpoint_mode()
            infos = client.get_endpoints_info()
            assert infos is not None and [info["endpoint_id"] for info in infos] == ["localhost", "127.0.0.1"]
            for spelling in ("localhost", f"localhost_{first.port}", f"http://localhost:{first.port}"):
                assert await client.trigger_endpoint_recovery(spelling) is True
            assert await client.trigger_endpoint_recovery("somewhere") is False
        async with GPUWorkerPoolClient(service_endpoints=join_urls(first, second)) as client:
            infos = client.get_endpoints_info()
            assert infos is not None
            ids = [info["endpoint_id"] for info in infos]
            assert ids == [f"127.0.0.1_{first.port}", f"127.0.0.1_{second.port}"]
            assert infos[0]["last_seen"] is not None and infos[0]["response_time_ms"] > 0

    run(scenario)


def test_an_assignment_of_several_endpoints_has_all_ids(start_agent) -> None:
    agents = [start_agent("2xH100"), start_agent("2xH100")]

    async def scenario() -> None:
        async with GPUWorkerPoolClient(service_endpoints=join_urls(*agents)) as client:
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
            assert {detail["endpoint_id"] for detail in status.endpoint_details} == set(granted_by_endpoint(client))
            await client.release_gpu(held)
            await client.release_gpu(held)
            assert not list_leases(agents[0]) and not list_leases(agents[1])
            async with GPUContextManager(client) as gpu_id:
                assert isinstance(gpu_id, str) and gpu_id.rpartition(":")[0] in granted_by_endpoint(client)

    run(scenario)


def test_one_url_in_the_environment_list_is_single_endpoint_mode(agent: Agent, monkeypatch) -> None:
    monkeypatch.setenv("GPU_STATS_SERVICE_ENDPOINTS", f"{agent.url}/")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", unused_address())

    async def scenario() -> None:
        async with GPUWorkerPoolClient() as client:
            assert not client.is_multi_endpoint_mode()
            assert isinstance((await client.request_gpu()).gpu_id, int)
        async with GPUWorkerPoolClient(service_endpoint=unused_address(), service_endpoints=agent.url) as client:
            assert client.is_multi_endpoint_mode()
            assert isinstance(await client.request_gpu(), GlobalGPUAssignment)

    run(scenario)


def test_round_robin_distributes_evenly(start_agent) -> None:
    agents = [start_agent("8xH100"), start_agent("2xH100")]

    async def scenario() -> None:
        client = GPUWorkerPoolClient(service_endpoints=join_urls(*agents), load_balancing_strategy="round_robin")
        async with client:
            turns = [await client.request_gpu() for _ in range(4)]
            assert Counter(turn.endpoint_id for turn in turns) == Counter(dict.fromkeys(granted_by_endpoint(client), 2))

    run(scenario)


def test_weighted_follows_the_number_of_gpus(start_agent) -> None:
    agents = [start_agent("6xH100"), start_agent("2xH100")]

    async def scenario() -> None:
        client = GPUWorkerPoolClient(service_endpoints=join_urls(*agents), load_balancing_strategy="weighted")
        async with client:
            for _ in range(40):
                await client.release_gpu(await client.request_gpu())
            counts = granted_by_endpoint(client)
            assert [counts[f"127.0.0.1_{agent.port}"] for agent in agents] == [30, 10]

    run(scenario)


def test_availability_prefers_the_highest_share_of_free_gpus(start_agent) -> None:
    agents = [start_agent("4xH100"), start_agent("2xH100")]

    async def scenario() -> None:
        async with GPUWorkerPoolClient(agents[0].url) as other:
            await other.request_gpu(gpus=3)
            async with GPUWorkerPoolClient(None, join_urls(*agents), "availability") as client:
                held = await client.request_gpu()
                assert held.endpoint_id == f"127.0.0.1_{agents[1].port}"
                assert client.get_detailed_metrics()["load_balancer"]["strategy_name"] == "availability"

    run(scenario)


def test_a_dead_endpoint_slows_neither_start_nor_requests(start_agent) -> None:
    agent = start_agent()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def scenario() -> None:
            # Waiting for the silent server would take an hour.
            client = GPUWorkerPoolClient(service_endpoints=f"{hung},{agent.url},{unused_address()}", request_timeout=3600)
            async with client:
                held = await client.request_gpu()
                assert held.endpoint_id == f"127.0.0.1_{agent.port}"
                recovery = client.get_error_recovery_status()
                assert recovery["healthy_endpoints"] == [held.endpoint_id]
                assert len(recovery["degraded_endpoints"]) == 2

        run(scenario)


def test_requests_move_to_another_agent_when_the_circuit_breaker_opens(start_agent, capsys) -> None:
    first, second = start_agent(), start_agent()

    async def scenario() -> None:
        client = GPUWorkerPoolClient(service_endpoints=join_urls(first, second), polling_interval=0.05)
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

    run(scenario)


def test_requests_fail_without_a_live_server_and_queued_ones_run_later(start_agent) -> None:
    gone = start_agent()
    gone.kill()

    async def scenario() -> None:
        several = GPUWorkerPoolClient(service_endpoints=f"{gone.url},{unused_address()}", max_retries=0, polling_interval=0.05)
        async with several as client:
            assert client.get_error_recovery_status()["degradation_manager"]["is_fully_degraded"]
            with pytest.raises(ServiceUnavailableError):
                await client.request_gpu(timeout=30)
            queued = asyncio.ensure_future(client.queue_request_for_retry(lambda: client.request_gpu(timeout=30)))
            plain = asyncio.ensure_future(client.queue_request_for_retry(lambda: "done"))
            await asyncio.sleep(0)
            assert not queued.done() and not plain.done()
            back = start_agent("2xH100", port=gone.port)
            # This works even while the circuit breaker is open.
            assert await client.trigger_endpoint_recovery(f"127.0.0.1_{back.port}")
            held = await queued
            assert held.endpoint_id == f"127.0.0.1_{back.port}"
            assert await plain == "done"
            with pytest.raises(ValueError, match="request_func"):
                await client.queue_request_for_retry(3)  # type: ignore[arg-type]

    run(scenario)


def test_an_open_circuit_breaker_rejects_requests(agent: Agent) -> None:
    async def scenario() -> None:
        async with GPUWorkerPoolClient(agent.url, polling_interval=0.05, max_retries=0) as client:
            down: asyncio.Queue = asyncio.Queue()
            client.subscribe(lambda update: update["kind"] == "endpoint_down" and down.put_nowait(update))
            agent.kill()
            await down.get()
            with pytest.raises(CircuitBreakerOpenError, match="circuit breaker"):
                await client.request_gpu()

    run(scenario)
