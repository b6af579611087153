"""Limits are enforced, and the caller gets an error when a limit is exceeded."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Awaitable, Callable

import pool_tasks
import pytest
from gpupool.resource_pool import (
    ResourcePool,
    Worker,
    WorkerError,
    WorkerLimitError,
    WorkerMemoryError,
    WorkerStartError,
    WorkerTimeoutError,
)
from pool_kit import PoolTracker, run_async, wait_for_exit

Body = Callable[[Worker], Awaitable[Any]]


async def wait_forever(worker: Worker) -> None:
    await asyncio.get_running_loop().create_future()


async def hold(pool: ResourcePool, body: Body) -> Any:
    async with pool.acquire_worker("task") as worker:
        return await body(worker)


def outcomes(pool: ResourcePool) -> list[Any]:
    return [entry.outcome for entry in pool.audit()]


@pytest.mark.parametrize(("secs", "message"), [(1, "Worker exceeded 1s timeout"), (0.5, "Worker exceeded 0.5s timeout")])
def test_a_timeout_interrupts_a_body_outside_of_run(pools: PoolTracker, secs: float, message: str) -> None:
    async def main() -> None:
        pool = pools.create(1, secs)
        with pytest.raises(WorkerTimeoutError) as raised:
            await hold(pool, wait_forever)
        assert str(raised.value) == message
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        assert outcomes(pool) == ["timeout"]
        if sys.version_info >= (3, 11):
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0
        # The task works normally afterwards.
        await asyncio.sleep(0)

    run_async(main())


@pytest.mark.parametrize("function", [pool_tasks.wait_forever, pool_tasks.spin])
def test_work_beyond_the_timeout_is_killed_and_the_worker_replaced(pools: PoolTracker, function: Callable[[], None]) -> None:
    async def main() -> None:
        pool = pools.create(1, 1)
        pids = []

        async def body(worker: Worker) -> None:
            pids.append(worker.pid)
            await worker.run(function)

        with pytest.raises(WorkerTimeoutError, match="^Worker exceeded 1s timeout$"):
            await hold(pool, body)
        assert pool.get_pool_status()["total_workers"] == pool.get_pool_status()["available_workers"] == 1
        async with pool.acquire_worker("next") as worker:
            assert worker.id == 0 and worker.pid not in pids
            assert await worker.run(pow, 3, 2) == 9
        wait_for_exit(*pids)

    run_async(main())


def test_a_limit_error_caught_in_the_body_is_not_raised_again(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.5)

        async def body(worker: Worker) -> str:
            with pytest.raises(WorkerTimeoutError):
                await worker.run(pool_tasks.wait_forever)
            for _ in range(100):
                await asyncio.sleep(0)
            with pytest.raises(WorkerTimeoutError):
                await worker.run(int, "1")
            return "continued"

        assert await hold(pool, body) == "continued"

    run_async(main())


def test_exceeding_the_memory_limit_raises(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(2, memory_mb=512)
        with pytest.raises(WorkerMemoryError) as raised:
            await hold(pool, lambda worker: worker.run(pool_tasks.take_memory))
        assert str(raised.value) == "Worker exceeded 512MB memory limit"
        assert outcomes(pool) == ["memory"]
        assert pool.get_pool_status()["total_workers"] == 2
        assert await hold(pool, lambda worker: worker.run(pow, 2, 3)) == 8

    run_async(main())


def test_memory_of_a_hidden_child_interrupts_the_body(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, memory_mb=256)
        hidden = []

        async def body(worker: Worker) -> None:
            hidden.append(await worker.run(pool_tasks.start_hidden_process, False))
            hidden.append(await worker.run(pool_tasks.start_hidden_process, True))
            await wait_forever(worker)

        with pytest.raises(WorkerMemoryError, match="^Worker exceeded 256MB memory limit$"):
            await hold(pool, body)
        assert len(hidden) == 2
        wait_for_exit(*hidden)

    run_async(main())


def test_hidden_children_are_killed_with_a_worker_after_its_timeout(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, 2)
        hidden = []

        async def body(worker: Worker) -> None:
            hidden.append(await worker.run(pool_tasks.start_hidden_process, False))
            await wait_forever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, body)
        wait_for_exit(*hidden)

    run_async(main())


def test_cpu_time_is_limited(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, worker_cpu_secs=1)
        with pytest.raises(WorkerLimitError, match="Worker exceeded its limits") as raised:
            await hold(pool, lambda worker: worker.run(pool_tasks.spin))
        assert not isinstance(raised.value, (WorkerTimeoutError, WorkerMemoryError))
        assert outcomes(pool) == ["excess"]

    run_async(main())


def test_a_swallowed_interruption_is_raised_at_the_end_of_the_body(pools: PoolTracker) -> None:
    async def main() -> None:
        async def body(worker: Worker) -> None:
            try:
                await wait_forever(worker)
            except asyncio.CancelledError:
                pass
            await asyncio.sleep(0)

        with pytest.raises(WorkerTimeoutError):
            await hold(pools.create(1, 0.3), body)

    run_async(main())


def test_a_body_that_blocks_the_loop_is_interrupted_at_its_next_await(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.3)
        reached = []

        async def body(worker: Worker) -> None:
            wait_for_exit(worker.pid)
            await wait_forever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, body)

        async def without_a_wait(worker: Worker) -> None:
            wait_for_exit(worker.pid)
            reached.append("end")

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, without_a_wait)
        assert reached == ["end"]

    run_async(main())


def test_a_thread_gets_the_timeout_in_run_sync_or_at_the_end_of_the_block(pools: PoolTracker) -> None:
    pool = pools.create(1, 0.3)
    with pytest.raises(WorkerTimeoutError):
        with pool.acquire_worker("works") as worker:
            worker.run_sync(pool_tasks.wait_forever)
    with pytest.raises(WorkerTimeoutError):
        with pool.acquire_worker("idles") as worker:
            wait_for_exit(worker.pid)


def test_exceptions_of_the_body_are_raised_unchanged(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.3)
        error = pool_tasks.CustomError(3)

        async def fails(worker: Worker) -> None:
            raise error

        async def fails_when_interrupted(worker: Worker) -> None:
            try:
                await wait_forever(worker)
            finally:
                raise error

        for body in (fails, fails_when_interrupted):
            with pytest.raises(pool_tasks.CustomError) as raised:
                await hold(pool, body)
            assert raised.value is error
        assert outcomes(pool) == ["released", "timeout"]

    run_async(main())


def test_a_cancellation_from_outside_stays_a_cancellation(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        has_worker = asyncio.Event()

        async def body(worker: Worker) -> None:
            has_worker.set()
            await wait_forever(worker)

        task = asyncio.ensure_future(hold(pool, body))
        await has_worker.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert outcomes(pool) == ["released"]

    run_async(main())


@pytest.mark.parametrize("order", ["the limit first", "outside first"])
def test_a_cancellation_at_the_same_time_as_a_limit_stays_a_cancellation(pools: PoolTracker, order: str) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.3)

        async def body(worker: Worker) -> None:
            limit, task = worker._limit_watcher, asyncio.current_task()
            assert limit is not None and task is not None
            on_limit = limit._on_limit

            def both(error: WorkerLimitError) -> None:
                if order == "outside first":
                    task.cancel()
                on_limit(error)
                if order == "the limit first":
                    task.cancel()

            limit._on_limit = both  # type: ignore[method-assign]
            await wait_forever(worker)

        task = asyncio.ensure_future(hold(pool, body))
        await asyncio.wait([task])
        assert task.cancelled(), task
        assert outcomes(pool) == ["timeout"]

    run_async(main())


def test_an_outer_timeout_stays_a_timeout(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hold(pool, wait_forever), 0.2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hold(pool, lambda worker: worker.run(pool_tasks.wait_forever)), 0.5)
        assert await hold(pool, lambda worker: worker.run(int, "4")) == 4
        assert outcomes(pool)[-1] == "released"

    run_async(main())


def test_a_worker_limit_inside_a_timeout_raises_the_limit_error(pools: PoolTracker) -> None:
    async def main() -> None:
        with pytest.raises(WorkerTimeoutError):
            await asyncio.wait_for(hold(pools.create(1, 0.3), wait_forever), 50)

    run_async(main())


def test_work_of_other_tasks_ends_with_the_block(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.5)

        async def gathers(worker: Worker) -> None:
            await asyncio.gather(worker.run(pool_tasks.wait_forever), worker.run(pool_tasks.spin))

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, gathers)

        async def forgets(worker: Worker) -> None:
            asyncio.ensure_future(worker.run(pool_tasks.wait_forever)).add_done_callback(lambda done: done.exception())
            await wait_forever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, forgets)

    run_async(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="task groups came with Python 3.11")
def test_a_limit_is_raised_through_a_task_group(pools: PoolTracker) -> None:
    async def main() -> None:
        async def body(worker: Worker) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(pool_tasks.wait_forever))
                group.create_task(worker.run(pool_tasks.spin))

        with pytest.raises(WorkerTimeoutError):
            await hold(pools.create(1, 0.5), body)

    run_async(main())


def test_a_limit_too_low_for_any_worker_is_reported(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(2, memory_mb=2)
        with pytest.raises(WorkerError) as raised:
            await hold(pool, wait_forever)
        assert isinstance(raised.value, WorkerStartError), raised.value
        assert "no worker can be started" in str(raised.value) and "memory" in str(raised.value)
        status = pool.get_pool_status()
        assert "memory" in status["failure"] and status["available_workers"] == 0

    run_async(main())
