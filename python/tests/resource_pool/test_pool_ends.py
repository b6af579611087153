"""The end of a pool, and of the program that has it: nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess

import pool_work as work
import pytest
from gpupool.resource_pool import ResourceConfig, ResourcePool
from pool_kit import PATIENCE_SECS, Story, python, run, wait_for_end

HOLDER = """
import asyncio, sys
from gpupool.resource_pool import ResourceConfig, ResourcePool
sys.path.insert(0, sys.argv[2])
import pool_work

async def main(pool):
    async with pool.acquire_worker("task") as worker:
        print(worker.pid, await worker.run(pool_work.hide_and, False), flush=True)
        if sys.argv[1] == "wait":
            await worker.run(pool_work.spin)
        asyncio.ensure_future(worker.run(pool_work.spin))
        await asyncio.sleep(0)
        if sys.argv[1] == "raise":
            raise RuntimeError("own")
        if sys.argv[1] == "exit":
            raise SystemExit(3)

pool = ResourcePool(ResourceConfig(2, 600, 512))
asyncio.run(main(pool))
"""


def holder(how: str) -> "subprocess.Popen[str]":
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.Popen(python(HOLDER, how, here), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_shutting_down_ends_all_workers(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(3)
        await pool.ready()
        assert len(story.workers()) == 3
        await pool.shutdown()
        story.expect_nothing_left()
        assert pool.get_pool_status()["total_workers"] == 0
        await pool.shutdown()

    run(main())


def test_a_block_ends_its_pool(story: Story) -> None:
    async def main() -> None:
        async with ResourcePool(ResourceConfig(2, 60, 512)) as pool:
            await pool.ready()
        story.expect_nothing_left()

    run(main())
    with ResourcePool(ResourceConfig(2, 60, 512)) as pool:
        with pool.acquire_worker("task"):
            pass
    story.expect_nothing_left()


def test_a_pool_that_nobody_has_any_more_ends(story: Story) -> None:
    async def main() -> None:
        pool = ResourcePool(ResourceConfig(2, 60, 512))
        await pool.ready()
        assert len(story.workers()) == 2

    run(main())
    gc.collect()
    story.expect_nothing_left()


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_program_that_ends_leaves_nothing(story: Story, how: str, code: int) -> None:
    ran = holder(how)
    output, errors = ran.communicate(timeout=PATIENCE_SECS)
    assert ran.returncode == code, errors
    wait_for_end(*map(int, output.split()))
    story.expect_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_that_is_ended_by_a_signal_leaves_nothing(story: Story, number: signal.Signals) -> None:
    ran = holder("wait")
    assert ran.stdout is not None
    pids = list(map(int, ran.stdout.readline().split()))
    everybody = story.processes()
    ran.send_signal(number)
    ran.communicate(timeout=PATIENCE_SECS)
    wait_for_end(*pids, *everybody)
    story.expect_nothing_left()


def test_a_forked_child_leaves_the_pool_alone(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        async with pool.acquire_worker("parent's") as worker:
            reads, writes = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    told = _use_in_child(pool)
                except BaseException as error:
                    told = repr(error)
                os.write(writes, told.encode())
                os._exit(0)
            os.close(writes)
            with os.fdopen(reads) as pipe:
                told = pipe.read()
            os.waitpid(child, 0)
            assert told.count("was started in another process") == 3, told
            assert await worker.run(os.getpid) == worker.pid, "the parent's worker is as it was"
            assert pool.get_pool_status()["active_task_ids"] == ["parent's"]

    run(main())


def _use_in_child(pool: ResourcePool) -> str:
    told = []
    for use in (pool.get_pool_status, pool.audit, pool.acquire_worker("child's").__enter__):
        try:
            use()
        except RuntimeError as error:
            told.append(str(error))
    pool._close()
    return "\n".join(told)


def test_workers_finish_what_they_are_at_when_the_pool_is_shut_down(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(1)
        async with pool.acquire_worker("task") as worker:
            await worker.run(work.OwnError, 1)
            last = asyncio.ensure_future(worker.run(pow, 7, 2))
            assert await last == 49
            over = pool.shutdown()
        await over
        story.expect_nothing_left()

    run(main())
