"""Request GPUs from one server with `gpu_worker_pool`.

    gpupool serve --simulate 4xH100        # in another terminal, on a machine without a GPU
    python examples/python/basic_client_usage.py
"""

from __future__ import annotations

import asyncio

from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient, WorkerTimeoutError


async def request_and_release() -> None:
    """Request, use and release a GPU. The end of the client's block releases all remaining assignments."""
    async with GPUWorkerPoolClient() as client:
        assignment = await client.request_gpu()
        print(f"{assignment.worker_id} has GPU {assignment.gpu_id} since {assignment.assigned_at:%H:%M:%S}")
        await client.release_gpu(assignment)


async def use_context_manager() -> None:
    """Release the GPU at the end of a block, even if the block fails."""
    async with GPUWorkerPoolClient() as client:
        async with GPUContextManager(client) as gpu_id:
            print(f"this block has GPU {gpu_id} exclusively")


async def share_one_gpu() -> None:
    """Place two halves on one GPU."""
    async with GPUWorkerPoolClient() as client:
        first = await client.request_gpu(fraction=0.5)
        second = await client.request_gpu(fraction=0.5)
        print(f"two halves: GPU {first.gpu_id} and GPU {second.gpu_id}")
        # The environment for a process that uses this part of the GPU.
        print({name: value for name, value in client.assignment_env(first).items() if name.startswith("CUDA")})


async def wait_in_queue() -> None:
    """Run more workers than GPUs: requests are granted in order of arrival."""
    async with GPUWorkerPoolClient(worker_timeout=60) as client:

        async def work(number: int) -> None:
            async with GPUContextManager(client) as gpu_id:
                print(f"worker {number} on GPU {gpu_id}")
                await asyncio.sleep(0.01)

        await asyncio.gather(*(work(number) for number in range(2 * client.get_pool_status().total_gpus)))


async def time_out() -> None:
    """Limit the wait: a timed-out request leaves the queue."""
    async with GPUWorkerPoolClient() as client:
        status = client.get_pool_status()
        all_gpus = await client.request_gpu(gpus=status.total_gpus)
        try:
            await client.request_gpu(timeout=0.5)
        except WorkerTimeoutError as error:
            print(error)
        await client.release_gpu(all_gpus)


async def show_status() -> None:
    """Show the last known status of the pool, without a request to the server."""
    async with GPUWorkerPoolClient() as client:
        async with GPUContextManager(client):
            status = client.get_pool_status()
            print(f"{status.available_gpus} of {status.total_gpus} GPUs are free, {status.active_workers} worker here")
            for gpu_id, workers in status.gpu_assignments.items():
                print(f"GPU {gpu_id}: {', '.join(worker.worker_id for worker in workers)}")


async def main() -> None:
    for example in (request_and_release, use_context_manager, share_one_gpu, wait_in_queue, time_out, show_status):
        print(f"-- {example.__name__}")
        await example()


if __name__ == "__main__":
    asyncio.run(main())
