"""Programs in the style of programs for the published package, with the same calls, names and structures.

Each is a whole program or a fragment; `make_program` turns a fragment into a program.
"""

from __future__ import annotations

import ast
import textwrap

PROGRAMS = {
    "one request of a client": """
        import asyncio
        from gpu_worker_pool.client import GPUWorkerPoolClient

        async def work():
            async with GPUWorkerPoolClient() as client:
                mine = await client.request_gpu()
                print("got", mine.gpu_id, mine.worker_id, mine.assigned_at.year)
                await client.release_gpu(mine)

        asyncio.run(work())
    """,
    "settings from a dict, over https": """
        import asyncio
        from gpu_worker_pool.client import GPUContextManager, gpu_worker_pool_client

        settings = dict(
            memory_threshold=72.5, utilization_threshold=88.0, worker_timeout=500.0,
            service_endpoint="https://gpu-service.company.com",
        )

        async def work():
            async with gpu_worker_pool_client(**settings) as client:
                async with GPUContextManager(client) as gpu:
                    print("holding", gpu)

        asyncio.run(work())
    """,
    "three servers as one pool": """
        import asyncio
        from gpu_worker_pool.client import GPUWorkerPoolClient

        async def work():
            hosts = ",".join(f"http://gpu-server-{number}:8000" for number in (1, 2, 3))
            client = GPUWorkerPoolClient(service_endpoints=hosts, load_balancing_strategy="availability")
            async with client:
                mine = await client.request_gpu()
                assert mine.global_gpu_id == f"{mine.endpoint_id}:{mine.local_gpu_id}", mine
                assert mine.endpoint_id.startswith("gpu-server-"), mine
                await client.release_gpu(mine)

        asyncio.run(work())
    """,
    "every strategy": """
        for name in ("availability", "round_robin", "weighted"):
            async with GPUWorkerPoolClient(
                service_endpoints="http://server1:8000,http://server2:8000", load_balancing_strategy=name
            ) as pool:
                mine = await pool.request_gpu()
                assert mine.endpoint_id in ("server1", "server2")
                assert pool.get_detailed_metrics()["load_balancer"]["strategy_name"] == name
    """,
    "the status of all servers": """
        async with GPUWorkerPoolClient(service_endpoints="...") as pool:
            now = pool.get_pool_status()
            print(now.total_endpoints, now.healthy_endpoints, now.total_gpus, now.available_gpus)
            for one in now.endpoint_details:
                print(one["endpoint_id"], one["available_gpus"], one["total_gpus"])
    """,
    "manual recovery, and a request for later": """
        async with GPUWorkerPoolClient(service_endpoints="...") as pool:
            state = pool.get_error_recovery_status()
            print(len(state["healthy_endpoints"]), len(state["degraded_endpoints"]))
            assert await pool.trigger_endpoint_recovery("server1") is True
            assert await pool.trigger_endpoint_recovery("server9") is False
            mine = await pool.queue_request_for_retry(lambda: pool.request_gpu(timeout=60.0))
            await pool.release_gpu(mine)
    """,
    "all metrics": """
        async with GPUWorkerPoolClient(service_endpoints="...") as pool:
            numbers = pool.get_detailed_metrics()
            print(numbers["pool_summary"]["efficiency_percent"])
            for name, one in numbers["endpoints"]["details"].items():
                print(name, one["available_gpus"], one["total_gpus"], one["avg_response_time_ms"], one["is_healthy"])
            balancer = numbers["load_balancer"]
            print(balancer["strategy_name"], balancer["total_requests"], balancer["success_rate"])
    """,
    "the recovery report": """
        async with GPUWorkerPoolClient(service_endpoints="...") as pool:
            pool.print_error_recovery_summary()
            state = pool.get_error_recovery_status()
            assert state["degradation_manager"]["is_fully_degraded"] is False
            assert state["endpoint_health_summary"]["healthy_count"] == 2
            for name, breaker in state["circuit_breaker_stats"].items():
                print(name, breaker["state"], breaker["failure_rate"])
    """,
    "a change from one server to several": """
        client = GPUWorkerPoolClient(service_endpoint="http://gpu-server:8000")
        client = GPUWorkerPoolClient(service_endpoints="http://gpu-server-1:8000,http://gpu-server-2:8000")
        async with client:
            mine = await client.request_gpu()
            await client.release_gpu(mine)
    """,
    "all settings": """
        one = GPUWorkerPoolClient(
            service_endpoint="http://localhost:8080", memory_threshold=70.0, utilization_threshold=80.0,
            worker_timeout=300.0, request_timeout=10.0, polling_interval=3,
        )
        several = GPUWorkerPoolClient(
            service_endpoints="http://gpu-1:8000,http://gpu-2:8000,http://gpu-3:8000",
            load_balancing_strategy="availability", memory_threshold=70.0, utilization_threshold=80.0,
            worker_timeout=300.0, request_timeout=10.0, polling_interval=3,
        )
        assert not one.is_multi_endpoint_mode() and several.is_multi_endpoint_mode()
        assert several.get_endpoints_info() is None
    """,
    "the servers in detail": """
        for one in client.get_endpoints_info():
            print(one["endpoint_id"], one["url"], one["is_healthy"], one["available_gpus"], one["total_gpus"])
    """,
    "the pool in numbers": """
        async with GPUWorkerPoolClient() as pool:
            numbers = pool.get_detailed_metrics()
            print(numbers["total_gpus"], numbers["available_gpus"], numbers["active_workers"], numbers["thresholds"])
    """,
    "a request that times out": """
        blocker = await client.request_gpu(gpus=2)
        other = await client.request_gpu(gpus=2)
        try:
            await client.request_gpu(timeout=0.2)
            raise SystemExit("it was granted")
        except WorkerTimeoutError as error:
            print(error)
    """,
    "the load of the pool": """
        now = client.get_pool_status()
        if now.available_gpus == 0 and now.blocked_workers > 0:
            print("busy")
        print((now.total_gpus - now.available_gpus) / now.total_gpus)
    """,
}

#: Imports that fragments assume.
PRELUDE = """
import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import *
from gpu_worker_pool import *
from gpu_worker_pool.client import *
"""
#: Replaces a list of servers that a fragment omits.
SERVERS = "http://server1:8000,http://server2:8000"


def make_program(fragment: str) -> str:
    """Return a program that runs a fragment: in an async function, and with a client if the fragment uses one."""
    text = textwrap.dedent(fragment).replace('service_endpoints="..."', f'service_endpoints="{SERVERS}"')
    tree = compile(text, "fragment", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "client"]
    stored = [node.lineno for node in names if isinstance(node.ctx, ast.Store)]
    loaded = [node.lineno for node in names if isinstance(node.ctx, ast.Load)]
    lines = text.splitlines()
    if names and not stored and "async with client" not in text:
        lines = [f'async with GPUWorkerPoolClient(service_endpoints="{SERVERS}") as client:', *_indented(lines)]
    elif loaded and (not stored or min(loaded) < min(stored)):
        lines = [f'client = GPUWorkerPoolClient(service_endpoints="{SERVERS}")', *lines]
    elif "config = {" in text and "asyncio.run" not in text:
        lines += ["async with GPUWorkerPoolClient(**config) as client:", "    print(await client.request_gpu())"]
    return "\n".join([PRELUDE, "async def fragment():", *_indented(lines), "    pass", "asyncio.run(fragment())"])


def is_program(text: str) -> bool:
    return "asyncio.run(" in text


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
