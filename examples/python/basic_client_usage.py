"""Asking one server for GPUs: the basics of `gpu_worker_pool`.

    gpupool serve --simulate 4xH100        # in another terminal, where there is no GPU
    python examples/python/basic_client_usage.py
"""

from __future__ import annotations

import asyncio

from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient, WorkerTimeoutError


async def hold_one() -> None:
    """Ask, use, give back. Leaving the block of the client gives back whatever was forgotten."""
    async with GPUWorkerPoolClient() as client:
        assignment = await client.request_gpu()
        print(f"{assignment.worker_id} holds GPU {assignment.gpu_id} since {assignment.assigned_at:%H:%M:%S}")
        await client.release_gpu(assignment)


async def hold_one_for_a_block() -> None:
    """The same, and given back also where the block fails."""
    async with GPUWorkerPoolClient() as client:
        async with GPUContextManager(client) as gpu_id:
            print(f"this block has GPU {gpu_id} to itself")


async def share_one() -> None:
    """Two who need half a GPU each are happy with one."""
    async with GPUWorkerPoolClient() as client:
        first = await client.request_gpu(fraction=0.5)
        second = await client.request_gpu(fraction=0.5)
        print(f"two halves, of GPU {first.gpu_id} and GPU {second.gpu_id}")
        # What a process must be started with to see just its part.
        print({name: value for name, value in client.assignment_env(first).items() if name.startswith("CUDA")})


async def wait_in_line() -> None:
    """More workers than GPUs: each waits its turn, and nobody is served before somebody who came earlier."""
    async with GPUWorkerPoolClient(worker_timeout=60) as client:

        async def work(number: int) -> None:
            async with GPUContextManager(client) as gpu_id:
                print(f"worker {number} on GPU {gpu_id}")
                await asyncio.sleep(0.01)

        await asyncio.gather(*(work(number) for number in range(2 * client.get_pool_status().total_gpus)))


async def give_up() -> None:
    """A limit for the wait; what was asked for is taken back."""
    async with GPUWorkerPoolClient() as client:
        status = client.get_pool_status()
        everything = await client.request_gpu(gpus=status.total_gpus)
        try:
            await client.request_gpu(timeout=0.5)
        except WorkerTimeoutError as error:
            print(error)
        await client.release_gpu(everything)


async def look() -> None:
    """How the pool stands, from what is known: no waiting."""
    async with GPUWorkerPoolClient() as client:
        async with GPUContextManager(client):
            status = client.get_pool_status()
            print(f"{status.available_gpus} of {status.total_gpus} GPUs are free, {status.active_workers} worker here")
            for gpu_id, workers in status.gpu_assignments.items():
                print(f"GPU {gpu_id}: {', '.join(worker.worker_id for worker in workers)}")


async def main() -> None:
    for example in (hold_one, hold_one_for_a_block, share_one, wait_in_line, give_up, look):
        print(f"-- {example.__name__}")
        await example()


if __name__ == "__main__":
    asyncio.run(main())
