"""Workers and the work that they run."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import subprocess
import threading
from pathlib import Path

import pool_tasks
import pytest
from gpupool.resource_pool import WorkerError, WorkerLostError
from pool_kit import TIMEOUT_SECS, PoolTracker, python_command, run_async, wait_for_exit


def test_work_runs_in_the_process_of_the_worker(pools: PoolTracker) -> None:
    async def main() -> None:
        async with pools.create().acquire_worker("task") as worker:
            assert await worker.run(os.getpid) == worker.pid != os.getpid()
            assert worker.pid in pools.workers()
            assert worker.id == 0 and worker.device == "cpu" and worker.task_id == "task"

    run_async(main())


def test_any_callable_can_run(pools: PoolTracker) -> None:
    async def main() -> None:
        async with pools.create().acquire_worker("task") as worker:
            factor = 3
            assert await worker.run(lambda number: number * factor, 14) == 42
            assert await worker.run(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]

            def local(*numbers: int, start: int = 0) -> int:
                return sum(numbers, start)

            assert await worker.run(local, 1, 2, start=10) == 13
            assert await worker.run("{}-{}".format, "a", "b") == "a-b"

    run_async(main())


def test_functions_of_a_script_run_in_a_worker(tmp_path: Path, pools: PoolTracker) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from gpupool.resource_pool import ResourceConfig, ResourcePool\n"
        "class Answer:\n"
        "    def __init__(self, value):\n"
        "        self.value = value\n"
        "def double(answer):\n"
        "    return Answer(answer.value * 2)\n"
        "async def main():\n"
        "    async with ResourcePool(ResourceConfig(1, 30, 512)) as pool:\n"
        "        async with pool.acquire_worker('task') as worker:\n"
        "            answer = await worker.run(double, Answer(21))\n"
        "            assert isinstance(answer, Answer)\n"
        "            print(answer.value)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    process = subprocess.run([*python_command("")[:1], str(script)], capture_output=True, text=True, timeout=TIMEOUT_SECS)
    assert (process.stdout, process.returncode) == ("42\n", 0), process.stderr


def test_an_exception_in_work_is_raised_and_the_worker_survives(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker("task") as worker:
            with pytest.raises(pool_tasks.CustomError) as raised:
                await worker.run(pool_tasks.fail, 7)
            assert raised.value.code == 7
            assert "in fail" in str(raised.value.__cause__), "the cause has the worker's traceback"
            assert await worker.run(os.getpid) == worker.pid
        assert [entry.outcome for entry in pool.audit()] == ["released"]

    run_async(main())


def test_a_worker_process_is_reused(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        pids = set()
        for number in range(3):
            async with pool.acquire_worker(f"task {number}") as worker:
                pids.add(await worker.run(os.getpid))
        assert len(pids) == 1

    run_async(main())


def test_several_calls_run_in_order(pools: PoolTracker) -> None:
    async def main() -> None:
        async with pools.create().acquire_worker("task") as worker:
            assert await asyncio.gather(*(worker.run(pow, number, 2) for number in range(20))) == [n * n for n in range(20)]

    run_async(main())


def test_a_dead_worker_is_reported_and_replaced(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker("task") as worker:
            with pytest.raises(WorkerLostError, match="the worker was lost"):
                await worker.run(os._exit, 3)
            assert worker.get_memory_usage_mb() == 0
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1
        assert [entry.outcome for entry in pool.audit()] == ["lost", "released"]
        assert "3" in (pool.audit()[0].detail or "")

    run_async(main())


def test_a_worker_can_be_killed(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker("task") as worker:
            hidden = await worker.run(pool_tasks.start_hidden_process, False)
            working = asyncio.ensure_future(worker.run(pool_tasks.spin))
            worker.kill()
            with pytest.raises(WorkerLostError, match="killed"):
                await working
            wait_for_exit(worker.pid, hidden)
        assert [entry.outcome for entry in pool.audit()] == ["killed"]
        assert pool.get_pool_status()["total_workers"] == 1
        async with pool.acquire_worker("next") as worker:
            assert await worker.run(int, "1") == 1

    run_async(main())


def test_a_worker_released_at_work_is_replaced(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        async with pool.acquire_worker("task") as worker:
            abandoned = asyncio.ensure_future(worker.run(pool_tasks.spin))
            await asyncio.sleep(0)
            first = worker.pid
        with pytest.raises(WorkerLostError, match="given back before it was done"):
            await abandoned
        async with pool.acquire_worker("next") as worker:
            assert worker.pid != first
        assert [entry.outcome for entry in pool.audit()] == ["abandoned", "released"]
        with pytest.raises(RuntimeError, match="worker 0 was released"):
            await worker.run(int, "1")

    run_async(main())


def test_memory_usage_includes_child_processes(pools: PoolTracker) -> None:
    async def main() -> None:
        async with pools.create().acquire_worker("task") as worker:
            before = worker.get_memory_usage_mb()
            assert isinstance(before, float) and before > 1
            await worker.run(exec, "global kept; kept = b'x' * (100 << 20)")
            assert worker.get_memory_usage_mb() > before + 90

    run_async(main())


def test_acquisitions_and_limits_are_logged_with_task_and_worker(pools: PoolTracker, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        pool = pools.create(1, 0.3)
        async with pool.acquire_worker("short"):
            pass
        with pytest.raises(Exception, match="timeout"):
            async with pool.acquire_worker("long"):
                await asyncio.get_running_loop().create_future()

    with caplog.at_level(logging.INFO, "gpupool.resource_pool"):
        run_async(main())
    fields = operator.attrgetter("levelname", "task_id", "worker_id", "device")
    records = [fields(record) for record in caplog.records]
    assert records == [
        ("INFO", "short", 0, "cpu"),
        ("INFO", "short", 0, "cpu"),
        ("INFO", "long", 0, "cpu"),
        ("CRITICAL", "long", 0, "cpu"),
    ]
    assert "Worker exceeded 0.3s timeout" in caplog.records[-1].getMessage()


def test_the_audit_trail_records_worker_times_and_outcome(pools: PoolTracker, tmp_path: Path) -> None:
    async def main() -> None:
        pool = pools.create(1, devices=["cuda:0"], audit_file=tmp_path / "audit.jsonl")
        async with pool.acquire_worker("first") as worker:
            (held,) = pool.audit()
            assert (held.task_id, held.worker_id, held.device, held.pid) == ("first", 0, "cuda:0", worker.pid)
            assert held.ended_at is None and held.outcome is None
        (entry,) = pool.audit()
        assert entry.outcome == "released" and entry.ended_at is not None and entry.ended_at >= entry.acquired_at
        await pool.shutdown()
        lines = (tmp_path / "audit.jsonl").read_text().splitlines()
        assert len(lines) == 2 and '"first"' in lines[0] and '"released"' in lines[1]

    run_async(main())


def test_large_values_are_unchanged_after_a_worker_died(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create()
        large = os.urandom(3 << 20)
        for _ in range(3):
            async with pool.acquire_worker("task") as worker:
                assert await worker.run(bytes.__add__, large, b"!") == large + b"!"
                with pytest.raises(WorkerLostError):
                    await worker.run(pool_tasks.exit_process, large)

    run_async(main())


def test_unpicklable_values_are_reported(pools: PoolTracker) -> None:
    async def main() -> None:
        async with pools.create().acquire_worker("task") as worker:
            with pytest.raises(Exception, match="pickle"):
                await worker.run(print, threading.Lock())
            with pytest.raises(WorkerError, match="pickle"):
                await worker.run(threading.Lock)
            assert await worker.run(int, "1") == 1

    run_async(main())
