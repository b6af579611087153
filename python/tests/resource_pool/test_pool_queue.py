"""The queue of waiting tasks, and the status of the pool."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from gpupool.resource_pool import PoolClosedError, ResourceConfig, ResourcePool, Worker
from pool_kit import TIMEOUT_SECS, PoolTracker, run_async, with_deadline


THRESHOLD = gc.get_threshold()


async def wait_for_status(pool: ResourcePool, key: str, value: int) -> None:
    """Wait until a field of the status has this value."""
    loop = asyncio.get_running_loop()
    end = loop.time() + TIMEOUT_SECS
    while pool.get_pool_status()[key] != value:
        assert loop.time() < end, f"{key} never became {value}: {pool.get_pool_status()}"
        await asyncio.sleep(0.005)


def test_all_workers_are_available_at_the_start(pools: PoolTracker) -> None:
    status = pools.create(3, 5, 512).get_pool_status()
    assert status["total_workers"] == status["available_workers"] == 3
    assert status["active_tasks"] == 0 and status["active_task_ids"] == []
    assert (status["worker_timeout_secs"], status["worker_memory_mb"]) == (5, 512)


def test_the_status_lists_the_active_tasks(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(2)
        async with pool.acquire_worker("first"):
            async with pool.acquire_worker("second"):
                status = pool.get_pool_status()
                assert (status["active_tasks"], status["available_workers"], status["total_workers"]) == (2, 0, 2)
                assert status["active_task_ids"] == ["first", "second"]
            assert pool.get_pool_status()["active_task_ids"] == ["first"]
        status = pool.get_pool_status()
        assert (status["active_tasks"], status["available_workers"]) == (0, 2)

    run_async(main())


def test_workers_get_the_devices_in_turn(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(3, devices=["cpu", "cuda:1"])
        await pool.ready()
        async with pool.acquire_worker("a") as a, pool.acquire_worker("b") as b, pool.acquire_worker("c") as c:
            assert {worker.id: worker.device for worker in (a, b, c)} == {0: "cpu", 1: "cuda:1", 2: "cpu"}

    run_async(main())


def test_workers_are_acquired_in_the_order_of_arrival(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        served: list[int] = []

        async def wait(number: int) -> None:
            async with pool.acquire_worker(f"task {number}"):
                served.append(number)

        async with pool.acquire_worker("holder"):
            waiting = []
            for number in range(10):
                waiting.append(asyncio.ensure_future(wait(number)))
                await wait_for_status(pool, "waiting_tasks", number + 1)
        await asyncio.gather(*waiting)
        assert served == list(range(10))

    run_async(main())


def test_a_long_wait_for_a_worker_times_out(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, acquire_timeout_secs=0.1)
        await pool.ready()
        async with pool.acquire_worker("holder"):
            with pytest.raises(asyncio.TimeoutError, match="no worker was free within 0.1s"):
                async with pool.acquire_worker("late"):
                    raise AssertionError("the task must not get a worker")
        assert pool.get_pool_status()["waiting_tasks"] == 0

    run_async(main())


def test_the_default_acquire_timeout_is_30_seconds(pools: PoolTracker) -> None:
    assert pools.create().config.acquire_timeout_secs == 30


def test_a_cancelled_task_leaves_the_queue(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        async with pool.acquire_worker("holder"):
            waiting = asyncio.ensure_future(hold(pool, "cancelled"))
            await wait_for_status(pool, "waiting_tasks", 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await wait_for_status(pool, "waiting_tasks", 0)
        assert [entry.task_id for entry in pool.audit()] == ["holder"]

    run_async(main())


def test_a_worker_granted_during_a_cancellation_is_released(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        await pool.ready()
        for number in range(50):
            waiting = asyncio.ensure_future(hold(pool, f"task {number}"))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with pool.acquire_worker("last") as worker:
            assert await worker.run(int, "7") == 7
        await wait_for_status(pool, "active_tasks", 0)

    run_async(main())


async def hold(pool: ResourcePool, task_id: str) -> None:
    async with pool.acquire_worker(task_id):
        await asyncio.get_running_loop().create_future()


def test_several_loops_in_several_threads_share_a_pool(pools: PoolTracker) -> None:
    pool = pools.create(2)
    found: list[Any] = []

    async def work(number: int) -> int:
        async with pool.acquire_worker(f"task {number}") as worker:
            return await worker.run(pow, number, 2)

    async def several(numbers: range) -> list[int]:
        return list(await asyncio.gather(*map(work, numbers)))

    threads = [threading.Thread(target=lambda n=n: found.extend(run_async(several(range(n, n + 5))))) for n in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECS)
    assert sorted(found) == [number**2 for number in range(15)]
    assert run_async(work(4)) == 16, "a new loop works after others ended"


def test_a_closed_loop_releases_its_worker(pools: PoolTracker) -> None:
    pool = pools.create(1)
    loop = asyncio.new_event_loop()
    acquired: "asyncio.Future[Worker]" = loop.create_future()

    async def hold_worker() -> None:
        async with pool.acquire_worker("abandoned") as worker:
            acquired.set_result(worker)
            await loop.create_future()

    task = loop.create_task(hold_worker())
    loop.run_until_complete(with_deadline(acquired))
    del acquired, task
    loop.close()
    gc.collect()

    async def use_worker() -> None:
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1

    run_async(use_worker())


def test_a_garbage_collected_pool_does_not_block_another(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(2)
        # The collector then runs in any thread, also in threads that complete futures.
        gc.set_threshold(1)
        try:
            for _ in range(5):
                garbage = [ResourcePool(ResourceConfig(1, 60, 512))]
                garbage.append(garbage)  # type: ignore[arg-type]
                del garbage
                for number in range(20):
                    async with pool.acquire_worker(f"task {number}") as worker:
                        await worker.run(int, number)
        finally:
            gc.set_threshold(*THRESHOLD)

    run_async(main())
    gc.collect()


def test_an_acquisition_can_be_used_once(pools: PoolTracker) -> None:
    async def main() -> None:
        acquisition = pools.create().acquire_worker("once")
        async with acquisition:
            pass
        with pytest.raises(RuntimeError, match="can be used once"):
            async with acquisition:
                pass

    run_async(main())


def test_a_thread_without_a_loop_can_use_workers(pools: PoolTracker) -> None:
    pool = pools.create(1)
    with pool.acquire_worker("in order") as worker:
        assert worker.run_sync(pow, 2, 10) == 1024
        assert pool.get_pool_status()["active_task_ids"] == ["in order"]
    assert pool.get_pool_status()["active_tasks"] == 0


def test_a_task_id_can_be_any_short_value(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker(17):  # type: ignore[arg-type]
            assert pool.get_pool_status()["active_task_ids"] == ["17"]
        with pytest.raises(ValueError, match="a task id of 5000 bytes"):
            async with pool.acquire_worker("x" * 5000):
                pass

    run_async(main())


def test_a_pool_in_shutdown_rejects_requests(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker("holder"):
            waiting = asyncio.ensure_future(hold(pool, "waits"))
            await wait_for_status(pool, "waiting_tasks", 1)
            shutdown = pool.shutdown()
            with pytest.raises(PoolClosedError):
                await waiting
        await shutdown
        with pytest.raises(PoolClosedError, match="the resource pool is shut down"):
            await hold(pool, "late")

    run_async(main())
