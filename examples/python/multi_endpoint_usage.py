"""Asking several servers as one pool: strategies, what happens when one is gone, and what can be seen of it.

    python examples/python/multi_endpoint_usage.py http://gpu1:8000,http://gpu2:8000
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from gpu_worker_pool import GlobalGPUAssignment, GPUContextManager, GPUWorkerPoolClient

SERVERS = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000,http://127.0.0.1:8001"


async def one_pool() -> None:
    """A GPU of several servers is `endpoint_id:gpu_id`."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        assignment = await client.request_gpu()
        assert isinstance(assignment, GlobalGPUAssignment)
        print(f"{assignment.global_gpu_id}: GPU {assignment.local_gpu_id} of {assignment.endpoint_id}")
        await client.release_gpu(assignment)


async def strategies() -> None:
    """Who is asked first is the strategy's choice."""
    for strategy in ("availability", "round_robin", "weighted"):
        async with GPUWorkerPoolClient(service_endpoints=SERVERS, load_balancing_strategy=strategy) as client:
            turns: Counter[str] = Counter()
            for _ in range(8):
                async with GPUContextManager(client) as gpu_id:
                    turns[str(gpu_id).rpartition(":")[0]] += 1
            print(f"{strategy}: {dict(turns)}")


async def see() -> None:
    """Each server, and the whole."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        for endpoint in client.get_endpoints_info() or []:
            print(f"{endpoint['endpoint_id']}: {endpoint['available_gpus']}/{endpoint['total_gpus']} GPUs free")
        metrics = client.get_detailed_metrics()
        print(f"{metrics['pool_summary']['efficiency_percent']}% of the GPUs are held")
        print(f"{metrics['load_balancer']['success_rate']}% of the requests were granted")
        client.print_error_recovery_summary()


async def recover() -> None:
    """A server that failed is left alone for a while; it can be looked at sooner, and requests can wait for it."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        recovery = client.get_error_recovery_status()
        for endpoint_id in [*recovery["healthy_endpoints"], *recovery["degraded_endpoints"]]:
            print(f"looked at {endpoint_id}: {await client.trigger_endpoint_recovery(endpoint_id)}")
        assignment = await client.queue_request_for_retry(lambda: client.request_gpu(timeout=30))
        print(f"granted when somebody could be asked: GPU {assignment.gpu_id}")


async def follow() -> None:
    """What happens, as it happens."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        happened: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        stop = client.subscribe(happened.put_nowait)
        async with GPUContextManager(client):
            pass
        while (update := await happened.get())["kind"] != "released":
            print(update["kind"], update.get("endpoint_id", ""))
        stop()


async def main() -> None:
    for example in (one_pool, strategies, see, recover, follow):
        print(f"-- {example.__name__}")
        await example()


if __name__ == "__main__":
    asyncio.run(main())
