"""A worker that dies takes one task with it, and is replaced."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from dispatch_kit import run
from gpu_dispatch import BaseWorker

COUNT = 1000


class Fragile(BaseWorker):
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
def test_the_task_a_worker_dies_of_fails_once_and_all_others_are_done(end: str) -> None:
    at = {333, 334, 700}
    tally = run(Fragile, [end if number in at else number for number in range(COUNT)], [0, 1])
    tally.check_each_once(COUNT)
    assert set(tally.errors) == at and not tally.late
    assert all(tally.done[number][0] == number for number in range(COUNT) if number not in at)
    said = {"exit": "code 3", "kill": "signal 9", "crash": "signal 11"}[end]
    assert all(said in text for text in tally.errors.values()), tally.errors


def test_a_worker_that_died_is_replaced_by_one_that_is_set_up() -> None:
    tally = run(Fragile, [1, "exit", 2])
    assert tally.done[0][1] != tally.done[2][1]
    assert list(tally.errors) == [1]


def test_an_error_of_a_task_is_that_tasks_only() -> None:
    odd = {
        "memory": "MemoryError",
        "recursion": "RecursionError",
        "sys.exit": "SystemExit: 4",
        "interrupt": "KeyboardInterrupt",
        "base": "not even an Exception",
    }
    tally = run(Fragile, ["fine", *odd, *["fine"] * 50])
    tally.check_each_once(56)
    assert sorted(tally.errors) == [1, 2, 3, 4, 5]
    for task_id, said in enumerate(odd.values(), 1):
        assert said in tally.errors[task_id]
    assert len({pid for _, pid in tally.done.values()}) == 1, "the worker lives on"


def test_a_worker_that_really_runs_out_of_memory_fails_its_task_only() -> None:
    class Hungry(Fragile):
        def process(self, data: Any) -> Any:
            return bytearray(1 << 62) if data == 5 else data

    tally = run(Hungry, range(10))
    assert list(tally.errors) == [5] and "MemoryError" in tally.errors[5] and len(tally.done) == 9


def test_every_task_is_told_of_when_every_task_kills_its_worker() -> None:
    tally = run(Fragile, ["exit"] * 6, [0, 1])
    tally.check_each_once(6)
    assert len(tally.errors) == 6


def test_a_process_that_a_worker_forked_changes_nothing() -> None:
    class Forks(Fragile):
        def process(self, data: Any) -> Any:
            child = os.fork()
            if child == 0:
                os._exit(7)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    tally = run(Forks, range(20))
    assert set(tally.done.values()) == {7} and len(tally.done) == 20


def test_a_process_that_a_worker_leaves_behind_ends_with_it() -> None:
    class Leaves(Fragile):
        def process(self, data: Any) -> Any:
            child = os.fork()
            if child == 0:
                signal.pause()
            return child

    tally = run(Leaves, range(2))
    # The mark of the test says that nobody is left.
    assert len(tally.done) == 2


def test_a_pool_of_processes_works_within_a_worker() -> None:
    class Pools(Fragile):
        def process(self, data: Any) -> Any:
            import multiprocessing

            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, [-1, -data])

    assert run(Pools, [2]).done == {0: [1, 2]}
