"""Shutdown of pools and exit of programs: no process is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess

import pool_tasks
import pytest
from gpupool.resource_pool import ResourceConfig, ResourcePool
from pool_kit import TIMEOUT_SECS, PoolTracker, python_command, run_async, wait_for_exit

PROGRAM = """
import asyncio, sys
from gpupool.resource_pool import ResourceConfig, ResourcePool
sys.path.insert(0, sys.argv[2])
import pool_tasks

async def main(pool):
    async with pool.acquire_worker("task") as worker:
        print(worker.pid, await worker.run(pool_tasks.start_hidden_process, False), flush=True)
        if sys.argv[1] == "wait":
            await worker.run(pool_tasks.spin)
        asyncio.ensure_future(worker.run(pool_tasks.spin))
        await asyncio.sleep(0)
        if sys.argv[1] == "raise":
            raise RuntimeError("own")
        if sys.argv[1] == "exit":
            raise SystemExit(3)

pool = ResourcePool(ResourceConfig(2, 600, 512))
asyncio.run(main(pool))
"""


def start_program(ending: str) -> "subprocess.Popen[str]":
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.Popen(python_command(PROGRAM, ending, here), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_shutting_down_ends_all_workers(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(3)
        await pool.ready()
        assert len(pools.workers()) == 3
        await pool.shutdown()
        pools.check_no_process_is_left()
        assert pool.get_pool_status()["total_workers"] == 0
        await pool.shutdown()

    run_async(main())


def test_a_pool_ends_with_its_block(pools: PoolTracker) -> None:
    async def main() -> None:
        async with ResourcePool(ResourceConfig(2, 60, 512)) as pool:
            await pool.ready()
        pools.check_no_process_is_left()

    run_async(main())
    with ResourcePool(ResourceConfig(2, 60, 512)) as pool:
        with pool.acquire_worker("task"):
            pass
    pools.check_no_process_is_left()


def test_a_pool_ends_when_it_is_garbage_collected(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = ResourcePool(ResourceConfig(2, 60, 512))
        await pool.ready()
        assert len(pools.workers()) == 2

    run_async(main())
    gc.collect()
    pools.check_no_process_is_left()


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_program_leaves_no_process_at_its_exit(pools: PoolTracker, ending: str, code: int) -> None:
    process = start_program(ending)
    output, errors = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == code, errors
    wait_for_exit(*map(int, output.split()))
    pools.check_no_process_is_left()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_leaves_no_process_when_a_signal_ends_it(pools: PoolTracker, signal_number: signal.Signals) -> None:
    process = start_program("wait")
    assert process.stdout is not None
    pids = list(map(int, process.stdout.readline().split()))
    processes = pools.processes()
    process.send_signal(signal_number)
    process.communicate(timeout=TIMEOUT_SECS)
    wait_for_exit(*pids, *processes)
    pools.check_no_process_is_left()


def test_a_forked_child_cannot_use_the_pool(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        async with pool.acquire_worker("parent's") as worker:
            reads, writes = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    message = _use_in_child(pool)
                except BaseException as error:
                    message = repr(error)
                os.write(writes, message.encode())
                os._exit(0)
            os.close(writes)
            with os.fdopen(reads) as pipe:
                message = pipe.read()
            os.waitpid(child, 0)
            assert message.count("was started in another process") == 3, message
            assert await worker.run(os.getpid) == worker.pid, "the parent's worker still works"
            assert pool.get_pool_status()["active_task_ids"] == ["parent's"]

    run_async(main())


def _use_in_child(pool: ResourcePool) -> str:
    messages = []
    for use in (pool.get_pool_status, pool.audit, pool.acquire_worker("child's").__enter__):
        try:
            use()
        except RuntimeError as error:
            messages.append(str(error))
    pool._close()
    return "\n".join(messages)


def test_workers_finish_their_current_work_at_shutdown(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(1)
        async with pool.acquire_worker("task") as worker:
            await worker.run(pool_tasks.CustomError, 1)
            last = asyncio.ensure_future(worker.run(pow, 7, 2))
            assert await last == 49
            shutdown = pool.shutdown()
        await shutdown
        pools.check_no_process_is_left()

    run_async(main())
