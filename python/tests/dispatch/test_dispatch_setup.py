"""Workers that cannot be set up, and the life of a dispatcher."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from dispatch_kit import PATIENCE_SECS, Tally, run, said_by, until
from gpu_dispatch import BaseWorker, Dispatcher


class Picky(BaseWorker):
    """Works only on the GPUs it is told."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        if gpu_id not in kwargs.get("good", ()):
            raise RuntimeError(f"GPU {gpu_id} is too hot")

    def process(self, data: Any) -> Any:
        return data


class DiesInSetup(Picky):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        if gpu_id == 1:
            os._exit(5)


class Plain(Picky):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass


class Sleeps(Plain):
    def process(self, data: Any) -> Any:
        time.sleep(PATIENCE_SECS * 2)


def run_until_told(worker_cls: type[BaseWorker], gpu_ids: list[int], **arguments: Any) -> Tally:
    """A run of a hundred tasks, half of which come only when a worker was said not to be set up."""
    tally, told = Tally(), threading.Event()

    def on_setup_fail(gpu_id: int, error: str) -> None:
        tally.on_setup_fail(gpu_id, error)
        told.set()

    def tasks() -> Iterator[int]:
        yield from range(50)
        assert told.wait(PATIENCE_SECS), "nobody said that a worker could not be set up"
        yield from range(50)

    Dispatcher(worker_cls, gpu_ids).run(
        tasks(), tally.on_success, tally.on_error, on_setup_fail=on_setup_fail, **arguments
    )
    tally.check_each_once(100)
    assert not tally.errors
    return tally


def test_a_worker_that_cannot_be_set_up_is_told_and_the_others_do_the_work() -> None:
    tally = run_until_told(Picky, [0, 1, 2], good=[0, 2])
    assert set(tally.by.values()) <= {0, 2}
    ((gpu_id, error),) = tally.not_set_up
    assert gpu_id == 1 and error.startswith("Traceback") and "RuntimeError: GPU 1 is too hot" in error


def test_a_worker_that_dies_in_setup_is_told_and_the_others_do_the_work() -> None:
    ((gpu_id, error),) = run_until_told(DiesInSetup, [0, 1]).not_set_up
    assert gpu_id == 1 and "code 5" in error


def test_a_run_of_which_no_worker_can_be_set_up_says_so() -> None:
    tally = Tally()
    with pytest.raises(RuntimeError, match="^All workers failed during setup$"):
        Dispatcher(Picky, [0, 1]).run(
            range(10), tally.on_success, tally.on_error, on_setup_fail=tally.on_setup_fail, on_exit=tally.on_exit
        )
    assert sorted(gpu_id for gpu_id, _ in tally.not_set_up) == [0, 1]
    assert not tally.done and tally.exits == 1


def test_a_generator_without_an_end_does_not_keep_such_a_run() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    with pytest.raises(RuntimeError, match="^All workers failed during setup$"):
        Dispatcher(Picky, [0], queue_size=4).run(endless(), print)


def test_a_constructor_that_raises_is_a_setup_that_fails() -> None:
    class NoWorker(Plain):
        def __init__(self) -> None:
            raise OSError("no hands")

    tally = Tally()
    with pytest.raises(RuntimeError, match="All workers failed during setup"):
        Dispatcher(NoWorker, [0]).run([1], tally.on_success, on_setup_fail=tally.on_setup_fail)
    assert "no hands" in tally.not_set_up[0][1]


def test_keywords_that_setup_does_not_take_are_a_setup_that_fails() -> None:
    class NoKeywords(Plain):
        def setup(self, gpu_id: int, seed: int) -> None:  # type: ignore[override]
            pass

    assert run(NoKeywords, [1]).done == {0: 1}
    tally = Tally()
    with pytest.raises(RuntimeError, match="All workers failed during setup"):
        Dispatcher(NoKeywords, [0]).run([1], tally.on_success, on_setup_fail=tally.on_setup_fail, modle="x")
    assert "modle" in tally.not_set_up[0][1]


def test_a_dispatcher_runs_again_and_counts_anew() -> None:
    dispatcher = Dispatcher(Plain, [0, 1])
    assert dispatcher.get_stats()["completed"] == 0
    for count in (30, 20):
        tally = Tally()
        dispatcher.run(range(count), tally.on_success)
        tally.check_each_once(count)
        stats = dispatcher.get_stats()
        assert {name: stats[name] for name in ("pending", "running", "completed", "failed", "timeouts")} == {
            "pending": 0,
            "running": 0,
            "completed": count,
            "failed": 0,
            "timeouts": 0,
        }


def test_statistics_can_be_asked_for_by_callbacks_and_other_threads() -> None:
    dispatcher = Dispatcher(Plain, [0, 1], queue_size=64)
    asked: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            stats = dispatcher.get_stats()
            asked.append(stats["completed"] + stats["pending"] + stats["running"])

    asking = threading.Thread(target=ask)
    asking.start()
    seen: list[int] = []
    dispatcher.run(range(2000), lambda *_: seen.append(dispatcher.get_stats()["completed"]))
    is_over.set()
    asking.join()
    assert seen == sorted(seen) and 0 < seen[0] and seen[-1] <= 2000 and max(asked) <= 2000


def test_a_dispatcher_that_runs_cannot_be_run_by_another_thread() -> None:
    dispatcher = Dispatcher(Plain, [0])
    raised: list[Exception] = []
    stats: list[dict[str, Any]] = []

    def again(*_arguments: Any) -> None:
        try:
            dispatcher.run([1], print, on_exit=lambda: raised.append(AssertionError("the first run still has workers")))
        except RuntimeError as error:
            raised.append(error)
        # The first run goes on, and shuts down when it is told to.
        stats.append(dispatcher.get_stats())
        dispatcher.shutdown()

    dispatcher.run(itertools.count(), again)
    assert "is already running" in str(raised[0])
    assert [worker["state"] for worker in stats[0]["workers"]] != [], stats


@pytest.mark.parametrize("who", ["callback", "thread"])
def test_shutdown_ends_a_run_and_its_workers(who: str) -> None:
    tally = Tally()
    dispatcher = Dispatcher(Sleeps, [0, 1])
    begun = threading.Event()

    def on_task_start(task_id: int, worker_id: int) -> None:
        begun.set()
        if who == "callback":
            dispatcher.shutdown()

    def end() -> None:
        begun.wait(PATIENCE_SECS)
        dispatcher.shutdown()

    ending = threading.Thread(target=end)
    if who == "thread":
        ending.start()
    dispatcher.run(range(50), tally.on_success, tally.on_error, on_task_start=on_task_start, on_exit=tally.on_exit)
    if who == "thread":
        ending.join()
    assert tally.exits == 1 and not tally.done


class CleansUp(Plain):
    """Takes its time to clean up, and says when it has."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.file = kwargs["folder"] / str(gpu_id)
        self.file.write_text("set up")
        if gpu_id == 1:
            # Still at it when the run is shut down.
            until(lambda: (kwargs["folder"] / "shut down").exists(), "the run is shut down")

    def process(self, data: Any) -> Any:
        if data == "sleeps":
            self.file.write_text("at work")
            time.sleep(PATIENCE_SECS * 2)
        return data

    def cleanup(self) -> None:
        time.sleep(0.7)
        self.file.write_text("cleaned up")


@pytest.mark.parametrize("task", ["sleeps", "echo"])
def test_shutdown_interrupts_tasks_and_nothing_else(task: str, tmp_path: Path) -> None:
    tally, kinds = Tally(), list[str]()
    dispatcher = Dispatcher(CleansUp, [0, 1], queue_size=4, on_progress=lambda event: kinds.append(event.kind))

    def begun(gpu_id: str) -> str:
        file = tmp_path / gpu_id
        return file.read_text() if file.exists() else ""

    def shut_down() -> None:
        until(lambda: begun("1") and (begun("0") == "at work" if task == "sleeps" else tally.done), "both have begun")
        dispatcher.shutdown()
        (tmp_path / "shut down").touch()

    ending = threading.Thread(target=shut_down)
    ending.start()
    dispatcher.run(
        itertools.repeat(task),
        tally.on_success,
        tally.on_error,
        on_setup_fail=tally.on_setup_fail,
        folder=tmp_path,
    )
    ending.join()
    assert [(tmp_path / name).read_text() for name in "01"] == ["cleaned up", "cleaned up"]
    assert not tally.errors and not tally.not_set_up
    assert not {"cleanup_failed", "setup_failed", "error"} & set(kinds)


def test_a_program_may_end_while_its_generator_waits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import threading\n"
        "from gpu_dispatch import BaseWorker, Dispatcher\n"
        "class Echo(BaseWorker):\n"
        "    def setup(self, gpu_id, seed, **kwargs): pass\n"
        "    def process(self, data): return data\n"
        "    def cleanup(self): pass\n"
        "more = threading.Event()\n"
        "def tasks():\n"
        "    yield 1\n"
        "    more.wait()\n"
        "if __name__ == '__main__':\n"
        "    dispatcher = Dispatcher(Echo, [0])\n"
        "    dispatcher.run(tasks(), lambda *_: dispatcher.shutdown())\n"
        "    print('over')\n"
        "    more.set()\n"
    )
    for _ in range(5):
        assert said_by([str(program)]) == "over\n"


def test_shutdown_of_what_does_not_run_does_nothing() -> None:
    dispatcher = Dispatcher(Plain, [0])
    dispatcher.shutdown()
    tally = Tally()
    dispatcher.run(range(5), tally.on_success)
    dispatcher.shutdown()
    assert len(tally.done) == 5


def test_runs_go_on_beside_each_other_in_threads() -> None:
    tallies = [Tally(), Tally()]
    threads = [
        threading.Thread(target=lambda tally=tally: Dispatcher(Plain, [0]).run(range(500), tally.on_success))
        for tally in tallies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(tally.done) == 500 for tally in tallies)
    assert len(tallies[0].threads | tallies[1].threads) == 2


def test_a_run_within_a_callback_of_another_works() -> None:
    inner = Tally()

    def start(*_arguments: Any) -> None:
        Dispatcher(Plain, [7]).run(range(3), inner.on_success)

    Dispatcher(Plain, [0]).run([1], start)
    until(lambda: len(inner.done) == 3, "the inner run is over")
