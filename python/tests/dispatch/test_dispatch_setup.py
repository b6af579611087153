"""Setup failures, and the lifecycle of a dispatcher."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from dispatch_kit import TIMEOUT_SECS, CallbackRecorder, run_dispatcher, run_python, wait_until
from gpu_dispatch import BaseWorker, Dispatcher


class SelectiveSetup(BaseWorker):
    """Setup succeeds only for the GPUs in the keyword `good`."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        if gpu_id not in kwargs.get("good", ()):
            raise RuntimeError(f"GPU {gpu_id} is too hot")

    def process(self, data: Any) -> Any:
        return data


class DiesInSetup(SelectiveSetup):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        if gpu_id == 1:
            os._exit(5)


class NoOpWorker(SelectiveSetup):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass


class SleepingWorker(NoOpWorker):
    def process(self, data: Any) -> Any:
        time.sleep(TIMEOUT_SECS * 2)


def run_until_setup_failure(worker_cls: type[BaseWorker], gpu_ids: list[int], **arguments: Any) -> CallbackRecorder:
    """Run 100 tasks; the second half starts only after a setup failure was reported."""
    recorder, has_failed = CallbackRecorder(), threading.Event()

    def on_setup_fail(gpu_id: int, error: str) -> None:
        recorder.on_setup_fail(gpu_id, error)
        has_failed.set()

    def tasks() -> Iterator[int]:
        yield from range(50)
        assert has_failed.wait(TIMEOUT_SECS), "no setup failure was reported"
        yield from range(50)

    Dispatcher(worker_cls, gpu_ids).run(
        tasks(), recorder.on_success, recorder.on_error, on_setup_fail=on_setup_fail, **arguments
    )
    recorder.check_one_outcome_each(100)
    assert not recorder.errors
    return recorder


def test_a_setup_failure_is_reported_and_the_other_workers_continue() -> None:
    recorder = run_until_setup_failure(SelectiveSetup, [0, 1, 2], good=[0, 2])
    assert set(recorder.worker_ids.values()) <= {0, 2}
    ((gpu_id, error),) = recorder.setup_failures
    assert gpu_id == 1 and error.startswith("Traceback") and "RuntimeError: GPU 1 is too hot" in error


def test_a_death_in_setup_is_reported_and_the_other_workers_continue() -> None:
    ((gpu_id, error),) = run_until_setup_failure(DiesInSetup, [0, 1]).setup_failures
    assert gpu_id == 1 and "code 5" in error


def test_a_run_fails_if_all_setups_fail() -> None:
    recorder = CallbackRecorder()
    with pytest.raises(RuntimeError, match="^All workers failed during setup$"):
        Dispatcher(SelectiveSetup, [0, 1]).run(
            range(10), recorder.on_success, recorder.on_error, on_setup_fail=recorder.on_setup_fail, on_exit=recorder.on_exit
        )
    assert sorted(gpu_id for gpu_id, _ in recorder.setup_failures) == [0, 1]
    assert not recorder.results and recorder.exits == 1


def test_failed_setups_end_a_run_of_an_endless_generator() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    with pytest.raises(RuntimeError, match="^All workers failed during setup$"):
        Dispatcher(SelectiveSetup, [0], queue_size=4).run(endless(), print)


def test_an_exception_in_the_constructor_is_a_setup_failure() -> None:
    class FailingConstructor(NoOpWorker):
        def __init__(self) -> None:
            raise OSError("constructor failed")

    recorder = CallbackRecorder()
    with pytest.raises(RuntimeError, match="All workers failed during setup"):
        Dispatcher(FailingConstructor, [0]).run([1], recorder.on_success, on_setup_fail=recorder.on_setup_fail)
    assert "constructor failed" in recorder.setup_failures[0][1]


def test_unknown_setup_keywords_are_a_setup_failure() -> None:
    class NoKeywords(NoOpWorker):
        def setup(self, gpu_id: int, seed: int) -> None:  # type: ignore[override]
            pass

    assert run_dispatcher(NoKeywords, [1]).results == {0: 1}
    recorder = CallbackRecorder()
    with pytest.raises(RuntimeError, match="All workers failed during setup"):
        Dispatcher(NoKeywords, [0]).run([1], recorder.on_success, on_setup_fail=recorder.on_setup_fail, modle="x")
    assert "modle" in recorder.setup_failures[0][1]


def test_a_second_run_resets_the_statistics() -> None:
    dispatcher = Dispatcher(NoOpWorker, [0, 1])
    assert dispatcher.get_stats()["completed"] == 0
    for count in (30, 20):
        recorder = CallbackRecorder()
        dispatcher.run(range(count), recorder.on_success)
        recorder.check_one_outcome_each(count)
        stats = dispatcher.get_stats()
        assert {name: stats[name] for name in ("pending", "running", "completed", "failed", "timeouts")} == {
            "pending": 0,
            "running": 0,
            "completed": count,
            "failed": 0,
            "timeouts": 0,
        }


def test_statistics_are_readable_in_callbacks_and_other_threads() -> None:
    dispatcher = Dispatcher(NoOpWorker, [0, 1], queue_size=64)
    totals: list[int] = []
    is_over = threading.Event()

    def read_stats() -> None:
        while not is_over.is_set():
            stats = dispatcher.get_stats()
            totals.append(stats["completed"] + stats["pending"] + stats["running"])

    reader = threading.Thread(target=read_stats)
    reader.start()
    completed: list[int] = []
    dispatcher.run(range(2000), lambda *_: completed.append(dispatcher.get_stats()["completed"]))
    is_over.set()
    reader.join()
    assert completed == sorted(completed) and 0 < completed[0] and completed[-1] <= 2000 and max(totals) <= 2000


def test_a_running_dispatcher_rejects_a_second_run() -> None:
    dispatcher = Dispatcher(NoOpWorker, [0])
    raised: list[Exception] = []
    stats: list[dict[str, Any]] = []

    def again(*_arguments: Any) -> None:
        try:
            dispatcher.run([1], print, on_exit=lambda: raised.append(AssertionError("the first run still has workers")))
        except RuntimeError as error:
            raised.append(error)
        # The first run continues until its shutdown.
        stats.append(dispatcher.get_stats())
        dispatcher.shutdown()

    dispatcher.run(itertools.count(), again)
    assert "is already running" in str(raised[0])
    assert [worker["state"] for worker in stats[0]["workers"]] != [], stats


@pytest.mark.parametrize("caller", ["callback", "thread"])
def test_shutdown_ends_a_run_and_its_workers(caller: str) -> None:
    recorder = CallbackRecorder()
    dispatcher = Dispatcher(SleepingWorker, [0, 1])
    started = threading.Event()

    def on_task_start(task_id: int, worker_id: int) -> None:
        started.set()
        if caller == "callback":
            dispatcher.shutdown()

    def shut_down() -> None:
        started.wait(TIMEOUT_SECS)
        dispatcher.shutdown()

    shutdown_thread = threading.Thread(target=shut_down)
    if caller == "thread":
        shutdown_thread.start()
    dispatcher.run(range(50), recorder.on_success, recorder.on_error, on_task_start=on_task_start, on_exit=recorder.on_exit)
    if caller == "thread":
        shutdown_thread.join()
    assert recorder.exits == 1 and not recorder.results


class SlowCleanupWorker(NoOpWorker):
    """Cleans up slowly, and records its progress in a file."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.file = kwargs["directory"] / str(gpu_id)
        self.file.write_text("set up")
        if gpu_id == 1:
            # Setup lasts until the run is shut down.
            wait_until(lambda: (kwargs["directory"] / "shut down").exists(), "the run is shut down")

    def process(self, data: Any) -> Any:
        if data == "sleeps":
            self.file.write_text("at work")
            time.sleep(TIMEOUT_SECS * 2)
        return data

    def cleanup(self) -> None:
        time.sleep(0.7)
        self.file.write_text("cleaned up")


@pytest.mark.parametrize("task", ["sleeps", "echo"])
def test_shutdown_interrupts_tasks_and_nothing_else(task: str, tmp_path: Path) -> None:
    recorder, kinds = CallbackRecorder(), list[str]()
    dispatcher = Dispatcher(SlowCleanupWorker, [0, 1], queue_size=4, on_progress=lambda event: kinds.append(event.kind))

    def started(gpu_id: str) -> str:
        file = tmp_path / gpu_id
        return file.read_text() if file.exists() else ""

    def shut_down() -> None:
        is_busy = lambda: started("0") == "at work" if task == "sleeps" else recorder.results  # noqa: E731
        wait_until(lambda: started("1") and is_busy(), "both workers have started")
        dispatcher.shutdown()
        (tmp_path / "shut down").touch()

    shutdown_thread = threading.Thread(target=shut_down)
    shutdown_thread.start()
    dispatcher.run(
        itertools.repeat(task),
        recorder.on_success,
        recorder.on_error,
        on_setup_fail=recorder.on_setup_fail,
        directory=tmp_path,
    )
    shutdown_thread.join()
    assert [(tmp_path / name).read_text() for name in "01"] == ["cleaned up", "cleaned up"]
    assert not recorder.errors and not recorder.setup_failures
    assert not {"cleanup_failed", "setup_failed", "error"} & set(kinds)


def test_a_program_can_exit_while_its_generator_waits(tmp_path: Path) -> None:
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
        assert run_python([str(program)]) == "over\n"


def test_shutdown_without_a_run_does_nothing() -> None:
    dispatcher = Dispatcher(NoOpWorker, [0])
    dispatcher.shutdown()
    recorder = CallbackRecorder()
    dispatcher.run(range(5), recorder.on_success)
    dispatcher.shutdown()
    assert len(recorder.results) == 5


def test_runs_in_several_threads_work() -> None:
    recorders = [CallbackRecorder(), CallbackRecorder()]
    threads = [
        threading.Thread(target=lambda recorder=recorder: Dispatcher(NoOpWorker, [0]).run(range(500), recorder.on_success))
        for recorder in recorders
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(recorder.results) == 500 for recorder in recorders)
    assert len(recorders[0].threads | recorders[1].threads) == 2


def test_a_run_inside_a_callback_works() -> None:
    inner = CallbackRecorder()

    def start(*_arguments: Any) -> None:
        Dispatcher(NoOpWorker, [7]).run(range(3), inner.on_success)

    Dispatcher(NoOpWorker, [0]).run([1], start)
    wait_until(lambda: len(inner.results) == 3, "the inner run is over")
