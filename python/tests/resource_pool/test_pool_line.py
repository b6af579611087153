"""Waiting for a worker, and how the pool stands."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from gpupool.resource_pool import PoolClosedError, ResourceConfig, ResourcePool, Worker
from pool_kit import PATIENCE_SECS, Story, in_time, run


THRESHOLD = gc.get_threshold()


async def until(pool: ResourcePool, key: str, value: int) -> None:
    """Waits until the status says so."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_SECS
    while pool.get_pool_status()[key] != value:
        assert loop.time() < end, f"{key} never was {value}: {pool.get_pool_status()}"
        await asyncio.sleep(0.005)


def test_all_workers_are_available_from_the_start_on(story: Story) -> None:
    status = story.pool(3, 5, 512).get_pool_status()
    assert status["total_workers"] == status["available_workers"] == 3
    assert status["active_tasks"] == 0 and status["active_task_ids"] == []
    assert (status["worker_timeout_secs"], status["worker_memory_mb"]) == (5, 512)


def test_the_status_tells_who_has_a_worker(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(2)
        async with pool.acquire_worker("first"):
            async with pool.acquire_worker("second"):
                status = pool.get_pool_status()
                assert (status["active_tasks"], status["available_workers"], status["total_workers"]) == (2, 0, 2)
                assert status["active_task_ids"] == ["first", "second"]
            assert pool.get_pool_status()["active_task_ids"] == ["first"]
        status = pool.get_pool_status()
        assert (status["active_tasks"], status["available_workers"]) == (0, 2)

    run(main())


def test_workers_get_the_devices_in_turn(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(3, devices=["cpu", "cuda:1"])
        await pool.ready()
        async with pool.acquire_worker("a") as a, pool.acquire_worker("b") as b, pool.acquire_worker("c") as c:
            assert {worker.id: worker.device for worker in (a, b, c)} == {0: "cpu", 1: "cuda:1", 2: "cpu"}

    run(main())


def test_who_came_first_is_served_first(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        served: list[int] = []

        async def wait(number: int) -> None:
            async with pool.acquire_worker(f"task {number}"):
                served.append(number)

        async with pool.acquire_worker("holder"):
            waiting = []
            for number in range(10):
                waiting.append(asyncio.ensure_future(wait(number)))
                await until(pool, "waiting_tasks", number + 1)
        await asyncio.gather(*waiting)
        assert served == list(range(10))

    run(main())


def test_who_waits_for_too_long_is_told(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, acquire_timeout_secs=0.1)
        await pool.ready()
        async with pool.acquire_worker("holder"):
            with pytest.raises(asyncio.TimeoutError, match="no worker was free within 0.1s"):
                async with pool.acquire_worker("late"):
                    raise AssertionError("nobody gives it a worker")
        assert pool.get_pool_status()["waiting_tasks"] == 0

    run(main())


def test_the_wait_is_30_seconds_unless_said(story: Story) -> None:
    assert story.pool().config.acquire_timeout_secs == 30


def test_who_is_cancelled_leaves_the_line(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        async with pool.acquire_worker("holder"):
            waiting = asyncio.ensure_future(hold(pool, "cancelled"))
            await until(pool, "waiting_tasks", 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(pool, "waiting_tasks", 0)
        assert [entry.task_id for entry in pool.audit()] == ["holder"]

    run(main())


def test_a_worker_that_comes_as_its_waiter_is_cancelled_goes_back(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        await pool.ready()
        for number in range(50):
            waiting = asyncio.ensure_future(hold(pool, f"task {number}"))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with pool.acquire_worker("last") as worker:
            assert await worker.run(int, "7") == 7
        await until(pool, "active_tasks", 0)

    run(main())


async def hold(pool: ResourcePool, task_id: str) -> None:
    async with pool.acquire_worker(task_id):
        await asyncio.get_running_loop().create_future()


def test_several_loops_in_several_threads_share_a_pool(story: Story) -> None:
    pool = story.pool(2)
    found: list[Any] = []

    async def work(number: int) -> int:
        async with pool.acquire_worker(f"task {number}") as worker:
            return await worker.run(pow, number, 2)

    async def several(numbers: range) -> list[int]:
        return list(await asyncio.gather(*map(work, numbers)))

    threads = [threading.Thread(target=lambda n=n: found.extend(run(several(range(n, n + 5))))) for n in (0, 5, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECS)
    assert sorted(found) == [number**2 for number in range(15)]
    assert run(work(4)) == 16, "a loop that comes after others ended"


def test_a_loop_that_closes_amid_gives_its_worker_back(story: Story) -> None:
    pool = story.pool(1)
    loop = asyncio.new_event_loop()
    got: "asyncio.Future[Worker]" = loop.create_future()

    async def keep() -> None:
        async with pool.acquire_worker("left alone") as worker:
            got.set_result(worker)
            await loop.create_future()

    task = loop.create_task(keep())
    loop.run_until_complete(in_time(got))
    del got, task
    loop.close()
    gc.collect()

    async def next_one() -> None:
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1

    run(next_one())


def test_a_pool_that_is_forgotten_holds_up_no_other(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(2)
        # Found to be garbage wherever Python runs just then, also in threads that carry futures.
        gc.set_threshold(1)
        try:
            for _ in range(5):
                forgotten = [ResourcePool(ResourceConfig(1, 60, 512))]
                forgotten.append(forgotten)  # type: ignore[arg-type]
                del forgotten
                for number in range(20):
                    async with pool.acquire_worker(f"task {number}") as worker:
                        await worker.run(int, number)
        finally:
            gc.set_threshold(*THRESHOLD)

    run(main())
    gc.collect()


def test_a_holding_is_good_for_one_worker(story: Story) -> None:
    async def main() -> None:
        holding = story.pool().acquire_worker("once")
        async with holding:
            pass
        with pytest.raises(RuntimeError, match="can be used once"):
            async with holding:
                pass

    run(main())


def test_a_thread_without_a_loop_has_workers_as_well(story: Story) -> None:
    pool = story.pool(1)
    with pool.acquire_worker("in order") as worker:
        assert worker.run_sync(pow, 2, 10) == 1024
        assert pool.get_pool_status()["active_task_ids"] == ["in order"]
    assert pool.get_pool_status()["active_tasks"] == 0


def test_a_name_may_be_anything_that_is_not_too_long(story: Story) -> None:
    async def main() -> None:
        pool = story.pool()
        async with pool.acquire_worker(17):  # type: ignore[arg-type]
            assert pool.get_pool_status()["active_task_ids"] == ["17"]
        with pytest.raises(ValueError, match="a task id of 5000 bytes"):
            async with pool.acquire_worker("x" * 5000):
                pass

    run(main())


def test_nobody_gets_a_worker_of_a_pool_that_is_shut_down(story: Story) -> None:
    async def main() -> None:
        pool = story.pool()
        async with pool.acquire_worker("holder"):
            waiting = asyncio.ensure_future(hold(pool, "waits"))
            await until(pool, "waiting_tasks", 1)
            over = pool.shutdown()
            with pytest.raises(PoolClosedError):
                await waiting
        await over
        with pytest.raises(PoolClosedError, match="the resource pool is shut down"):
            await hold(pool, "late")

    run(main())
