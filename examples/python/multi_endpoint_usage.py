"""Use several servers as one pool: load balancing, recovery of failed servers, and status.

    python examples/python/multi_endpoint_usage.py http://gpu1:8000,http://gpu2:8000
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

from gpu_worker_pool import GlobalGPUAssignment, GPUContextManager, GPUWorkerPoolClient

SERVERS = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000,http://127.0.0.1:8001"


async def request_gpu() -> None:
    """Request a GPU of any server; its id is `endpoint_id:gpu_id`."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        assignment = await client.request_gpu()
        assert isinstance(assignment, GlobalGPUAssignment)
        print(f"{assignment.global_gpu_id}: GPU {assignment.local_gpu_id} of {assignment.endpoint_id}")
        await client.release_gpu(assignment)


async def compare_strategies() -> None:
    """Compare the distribution of requests by the load-balancing strategies."""
    for strategy in ("availability", "round_robin", "weighted"):
        async with GPUWorkerPoolClient(service_endpoints=SERVERS, load_balancing_strategy=strategy) as client:
            assignments: Counter[str] = Counter()
            for _ in range(8):
                async with GPUContextManager(client) as gpu_id:
                    assignments[str(gpu_id).rpartition(":")[0]] += 1
            print(f"{strategy}: {dict(assignments)}")


async def show_status() -> None:
    """Show the servers and the metrics of the pool."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        for endpoint in client.get_endpoints_info() or []:
            print(f"{endpoint['endpoint_id']}: {endpoint['available_gpus']}/{endpoint['total_gpus']} GPUs free")
        metrics = client.get_detailed_metrics()
        print(f"{metrics['pool_summary']['efficiency_percent']}% of the GPUs are assigned")
        print(f"{metrics['load_balancer']['success_rate']}% of the requests were granted")
        client.print_error_recovery_summary()


async def recover() -> None:
    """Check failed servers now instead of after the delay of their circuit breaker, and wait for a healthy server."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        recovery = client.get_error_recovery_status()
        for endpoint_id in [*recovery["healthy_endpoints"], *recovery["degraded_endpoints"]]:
            print(f"checked {endpoint_id}: {await client.trigger_endpoint_recovery(endpoint_id)}")
        assignment = await client.queue_request_for_retry(lambda: client.request_gpu(timeout=30))
        print(f"granted by a healthy server: GPU {assignment.gpu_id}")


async def subscribe() -> None:
    """Print updates as they happen."""
    async with GPUWorkerPoolClient(service_endpoints=SERVERS) as client:
        updates: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        unsubscribe = client.subscribe(updates.put_nowait)
        async with GPUContextManager(client):
            pass
        while (update := await updates.get())["kind"] != "released":
            print(update["kind"], update.get("endpoint_id", ""))
        unsubscribe()


async def main() -> None:
    for example in (request_gpu, compare_strategies, show_status, recover, subscribe):
        print(f"-- {example.__name__}")
        await example()


if __name__ == "__main__":
    asyncio.run(main())
