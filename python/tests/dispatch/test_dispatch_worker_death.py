"""A worker that dies fails one task and is replaced."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from dispatch_kit import run_dispatcher
from gpu_dispatch import BaseWorker

COUNT = 1000


class DyingWorker(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        if data == "exit":
            os._exit(3)
        if data == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if data == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == "memory":
            raise MemoryError
        if data == "recursion":
            return self.process(data)
        if data == "sys.exit":
            sys.exit(4)
        if data == "interrupt":
            raise KeyboardInterrupt
        if data == "base":
            raise BaseException("not even an Exception")
        return data, os.getpid()


@pytest.mark.parametrize("end", ["exit", "kill", "crash"])
def test_a_task_that_kills_its_worker_fails_once_and_all_others_succeed(end: str) -> None:
    at = {333, 334, 700}
    recorder = run_dispatcher(DyingWorker, [end if number in at else number for number in range(COUNT)], [0, 1])
    recorder.check_one_outcome_each(COUNT)
    assert set(recorder.errors) == at and not recorder.timeouts
    assert all(recorder.results[number][0] == number for number in range(COUNT) if number not in at)
    expected = {"exit": "code 3", "kill": "signal 9", "crash": "signal 11"}[end]
    assert all(expected in text for text in recorder.errors.values()), recorder.errors


def test_a_dead_worker_is_replaced() -> None:
    recorder = run_dispatcher(DyingWorker, [1, "exit", 2])
    assert recorder.results[0][1] != recorder.results[2][1]
    assert list(recorder.errors) == [1]


def test_an_exception_fails_only_its_task() -> None:
    failing = {
        "memory": "MemoryError",
        "recursion": "RecursionError",
        "sys.exit": "SystemExit: 4",
        "interrupt": "KeyboardInterrupt",
        "base": "not even an Exception",
    }
    recorder = run_dispatcher(DyingWorker, ["fine", *failing, *["fine"] * 50])
    recorder.check_one_outcome_each(56)
    assert sorted(recorder.errors) == [1, 2, 3, 4, 5]
    for task_id, expected in enumerate(failing.values(), 1):
        assert expected in recorder.errors[task_id]
    assert len({pid for _, pid in recorder.results.values()}) == 1, "the worker survives"


def test_a_memory_error_fails_only_its_task() -> None:
    class Hungry(DyingWorker):
        def process(self, data: Any) -> Any:
            return bytearray(1 << 62) if data == 5 else data

    recorder = run_dispatcher(Hungry, range(10))
    assert list(recorder.errors) == [5] and "MemoryError" in recorder.errors[5] and len(recorder.results) == 9


def test_every_task_is_reported_when_every_task_kills_its_worker() -> None:
    recorder = run_dispatcher(DyingWorker, ["exit"] * 6, [0, 1])
    recorder.check_one_outcome_each(6)
    assert len(recorder.errors) == 6


def test_a_forked_child_of_a_worker_does_no_harm() -> None:
    class Forks(DyingWorker):
        def process(self, data: Any) -> Any:
            child = os.fork()
            if child == 0:
                os._exit(7)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    recorder = run_dispatcher(Forks, range(20))
    assert set(recorder.results.values()) == {7} and len(recorder.results) == 20


def test_child_processes_of_a_worker_end_with_it() -> None:
    class Leaves(DyingWorker):
        def process(self, data: Any) -> Any:
            child = os.fork()
            if child == 0:
                signal.pause()
            return child

    recorder = run_dispatcher(Leaves, range(2))
    # The fixture `mark` checks that no process is left.
    assert len(recorder.results) == 2


def test_a_multiprocessing_pool_works_in_a_worker() -> None:
    class Pools(DyingWorker):
        def process(self, data: Any) -> Any:
            import multiprocessing

            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, [-1, -data])

    assert run_dispatcher(Pools, [2]).results == {0: [1, 2]}
