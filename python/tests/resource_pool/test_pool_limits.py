"""Limits are kept, and told at the caller when they are passed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Awaitable, Callable

import pool_work as work
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
from pool_kit import Story, run, wait_for_end

Body = Callable[[Worker], Awaitable[Any]]


async def for_ever(worker: Worker) -> None:
    await asyncio.get_running_loop().create_future()


async def hold(pool: ResourcePool, body: Body) -> Any:
    async with pool.acquire_worker("task") as worker:
        return await body(worker)


def outcomes(pool: ResourcePool) -> list[Any]:
    return [entry.outcome for entry in pool.audit()]


@pytest.mark.parametrize(("secs", "says"), [(1, "Worker exceeded 1s timeout"), (0.5, "Worker exceeded 0.5s timeout")])
def test_a_body_that_waits_for_something_else_is_interrupted(story: Story, secs: float, says: str) -> None:
    async def main() -> None:
        pool = story.pool(1, secs)
        with pytest.raises(WorkerTimeoutError) as raised:
            await hold(pool, for_ever)
        assert str(raised.value) == says
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        assert outcomes(pool) == ["timeout"]
        if sys.version_info >= (3, 11):
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0
        # The task is as good as before.
        await asyncio.sleep(0)

    run(main())


@pytest.mark.parametrize("never", [work.wait_for_ever, work.spin])
def test_work_that_takes_too_long_is_killed_and_the_worker_replaced(story: Story, never: Callable[[], None]) -> None:
    async def main() -> None:
        pool = story.pool(1, 1)
        pids = []

        async def body(worker: Worker) -> None:
            pids.append(worker.pid)
            await worker.run(never)

        with pytest.raises(WorkerTimeoutError, match="^Worker exceeded 1s timeout$"):
            await hold(pool, body)
        assert pool.get_pool_status()["total_workers"] == pool.get_pool_status()["available_workers"] == 1
        async with pool.acquire_worker("next") as worker:
            assert worker.id == 0 and worker.pid not in pids
            assert await worker.run(pow, 3, 2) == 9
        wait_for_end(*pids)

    run(main())


def test_who_catches_the_limit_at_the_work_hears_of_it_once(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, 0.5)

        async def body(worker: Worker) -> str:
            with pytest.raises(WorkerTimeoutError):
                await worker.run(work.wait_for_ever)
            for _ in range(100):
                await asyncio.sleep(0)
            with pytest.raises(WorkerTimeoutError):
                await worker.run(int, "1")
            return "went on"

        assert await hold(pool, body) == "went on"

    run(main())


def test_memory_is_limited_and_told_when_it_is_passed(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(2, memory_mb=512)
        with pytest.raises(WorkerMemoryError) as raised:
            await hold(pool, lambda worker: worker.run(work.take_memory))
        assert str(raised.value) == "Worker exceeded 512MB memory limit"
        assert outcomes(pool) == ["memory"]
        assert pool.get_pool_status()["total_workers"] == 2
        assert await hold(pool, lambda worker: worker.run(pow, 2, 3)) == 8

    run(main())


def test_a_body_elsewhere_hears_of_memory_that_a_hidden_child_takes(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, memory_mb=256)
        hidden = []

        async def body(worker: Worker) -> None:
            hidden.append(await worker.run(work.hide_and, False))
            hidden.append(await worker.run(work.hide_and, True))
            await for_ever(worker)

        with pytest.raises(WorkerMemoryError, match="^Worker exceeded 256MB memory limit$"):
            await hold(pool, body)
        assert len(hidden) == 2
        wait_for_end(*hidden)

    run(main())


def test_children_that_hide_are_killed_with_a_worker_that_is_held_too_long(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, 2)
        hidden = []

        async def body(worker: Worker) -> None:
            hidden.append(await worker.run(work.hide_and, False))
            await for_ever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, body)
        wait_for_end(*hidden)

    run(main())


def test_processor_time_and_processes_are_limited(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, worker_cpu_secs=1)
        with pytest.raises(WorkerLimitError, match="Worker exceeded its limits") as raised:
            await hold(pool, lambda worker: worker.run(work.spin))
        assert not isinstance(raised.value, (WorkerTimeoutError, WorkerMemoryError))
        assert outcomes(pool) == ["excess"]

    run(main())


def test_a_body_that_swallows_the_interruption_is_told_at_its_end(story: Story) -> None:
    async def main() -> None:
        async def body(worker: Worker) -> None:
            try:
                await for_ever(worker)
            except asyncio.CancelledError:
                pass
            await asyncio.sleep(0)

        with pytest.raises(WorkerTimeoutError):
            await hold(story.pool(1, 0.3), body)

    run(main())


def test_a_body_that_blocks_the_loop_is_told_at_its_next_wait(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, 0.3)
        reached = []

        async def body(worker: Worker) -> None:
            wait_for_end(worker.pid)
            await for_ever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, body)

        async def without_a_wait(worker: Worker) -> None:
            wait_for_end(worker.pid)
            reached.append("end")

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, without_a_wait)
        assert reached == ["end"]

    run(main())


def test_a_thread_that_holds_too_long_is_told_at_the_work_or_at_the_end(story: Story) -> None:
    pool = story.pool(1, 0.3)
    with pytest.raises(WorkerTimeoutError):
        with pool.acquire_worker("works") as worker:
            worker.run_sync(work.wait_for_ever)
    with pytest.raises(WorkerTimeoutError):
        with pool.acquire_worker("idles") as worker:
            wait_for_end(worker.pid)


def test_own_exceptions_pass_as_they_are(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, 0.3)
        own = work.OwnError(3)

        async def fails(worker: Worker) -> None:
            raise own

        async def fails_when_interrupted(worker: Worker) -> None:
            try:
                await for_ever(worker)
            finally:
                raise own

        for body in (fails, fails_when_interrupted):
            with pytest.raises(work.OwnError) as raised:
                await hold(pool, body)
            assert raised.value is own
        assert outcomes(pool) == ["released", "timeout"]

    run(main())


def test_cancelling_from_outside_stays_that(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        holds = asyncio.Event()

        async def body(worker: Worker) -> None:
            holds.set()
            await for_ever(worker)

        task = asyncio.ensure_future(hold(pool, body))
        await holds.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert outcomes(pool) == ["released"]

    run(main())


@pytest.mark.parametrize("order", ["the limit first", "outside first"])
def test_cancelling_from_outside_in_the_same_moment_stays_that(story: Story, order: str) -> None:
    async def main() -> None:
        pool = story.pool(1, 0.3)

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
            await for_ever(worker)

        task = asyncio.ensure_future(hold(pool, body))
        await asyncio.wait([task])
        assert task.cancelled(), task
        assert outcomes(pool) == ["timeout"]

    run(main())


def test_a_timeout_around_it_is_its_own(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hold(pool, for_ever), 0.2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hold(pool, lambda worker: worker.run(work.wait_for_ever)), 0.5)
        assert await hold(pool, lambda worker: worker.run(int, "4")) == 4
        assert outcomes(pool)[-1] == "released"

    run(main())


def test_a_limit_within_a_timeout_is_a_limit(story: Story) -> None:
    async def main() -> None:
        with pytest.raises(WorkerTimeoutError):
            await asyncio.wait_for(hold(story.pool(1, 0.3), for_ever), 50)

    run(main())


def test_work_that_other_tasks_wait_for_ends_with_the_hold(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1, 0.5)

        async def gathers(worker: Worker) -> None:
            await asyncio.gather(worker.run(work.wait_for_ever), worker.run(work.spin))

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, gathers)

        async def forgets(worker: Worker) -> None:
            asyncio.ensure_future(worker.run(work.wait_for_ever)).add_done_callback(lambda done: done.exception())
            await for_ever(worker)

        with pytest.raises(WorkerTimeoutError):
            await hold(pool, forgets)

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="task groups came with Python 3.11")
def test_a_task_group_in_the_body_changes_nothing(story: Story) -> None:
    async def main() -> None:
        async def body(worker: Worker) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(work.wait_for_ever))
                group.create_task(worker.run(work.spin))

        with pytest.raises(WorkerTimeoutError):
            await hold(story.pool(1, 0.5), body)

    run(main())


def test_a_limit_that_no_worker_can_keep_is_told(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(2, memory_mb=2)
        with pytest.raises(WorkerError) as raised:
            await hold(pool, for_ever)
        assert isinstance(raised.value, WorkerStartError), raised.value
        assert "no worker can be started" in str(raised.value) and "memory" in str(raised.value)
        status = pool.get_pool_status()
        assert "memory" in status["failure"] and status["available_workers"] == 0

    run(main())
