"""Arguments, order and threads of callbacks, and exceptions in callbacks."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from dispatch_kit import CallbackRecorder, marked_processes, run_dispatcher
from gpu_dispatch import BaseWorker, CleanupFailed, Dispatcher, ProgressEvent, TaskError, TaskStarted, TaskSuccess


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.setup_arguments = (gpu_id, seed, kwargs)

    def process(self, data: Any) -> Any:
        if data == "fail":
            raise ValueError("this task is odd")
        if data == "sleep":
            threading.Event().wait()
        return data if data != "setup arguments" else self.setup_arguments


class FailingCleanup(Echo):
    def cleanup(self) -> None:
        raise OSError("cleanup failed")


def test_callbacks_get_task_value_and_worker_in_the_calling_thread() -> None:
    calls: list[Any] = []
    threads = set()

    def record(name: str) -> Any:
        def callback(*arguments: Any) -> None:
            threads.add(threading.get_ident())
            calls.append((name, *arguments))

        return callback

    Dispatcher(Echo, [3]).run(
        iter(["value", "fail", "sleep"]),
        record("success"),
        record("error"),
        record("timeout"),
        record("setup_fail"),
        record("start"),
        record("exit"),
        42,
        0.5,
        3,
    )
    assert threads == {threading.get_ident()}
    assert [call for call in calls if call[0] == "start"] == [("start", 0, 3), ("start", 1, 3), ("start", 2, 3)]
    assert ("success", 0, "value", 3) in calls
    assert ("timeout", 2, 0.5, 3) in calls
    (_, task_id, traceback, worker_id) = next(call for call in calls if call[0] == "error")
    assert (task_id, worker_id) == (1, 3)
    assert traceback.startswith("Traceback (most recent call last)") and "ValueError: this task is odd" in traceback
    assert calls[-1] == ("exit",) and len(calls) == 7
    for name, task_id in (("success", 0), ("error", 1), ("timeout", 2)):
        at = [call[:2] for call in calls]
        assert at.index(("start", task_id)) < at.index((name, task_id))


def test_setup_gets_gpu_id_seed_and_keywords() -> None:
    recorder = run_dispatcher(Echo, ["setup arguments"] * 50, [0, 5], batch=8, names=["a"])
    for task_id, (gpu_id, seed, kwargs) in recorder.results.items():
        assert (gpu_id, seed, kwargs) == (recorder.worker_ids[task_id], 42 + gpu_id, {"batch": 8, "names": ["a"]})
    recorder = run_dispatcher(Echo, ["setup arguments"], [5], base_seed=1000)
    assert recorder.results == {0: (5, 1005, {})}


def test_task_ids_count_from_zero_in_the_order_of_the_generator() -> None:
    recorder = run_dispatcher(Echo, (str(number) for number in range(3000)), [0, 1])
    assert recorder.results == {number: str(number) for number in range(3000)}


def test_on_exit_is_called_after_all_workers_exited() -> None:
    remaining: list[Any] = []
    recorder = CallbackRecorder()
    Dispatcher(Echo, [0, 1]).run(range(10), recorder.on_success, on_exit=lambda: remaining.append(marked_processes()))
    assert remaining == [{}] and len(recorder.results) == 10


def test_on_exit_is_called_when_the_run_fails() -> None:
    recorder = CallbackRecorder()
    with pytest.raises(ZeroDivisionError):
        Dispatcher(Echo, [0]).run((1 // 0 for _ in "x"), recorder.on_success, on_exit=recorder.on_exit)
    assert recorder.exits == 1


@pytest.mark.parametrize("name", ["on_success", "on_error", "on_timeout", "on_task_start", "on_exit"])
def test_a_callback_exception_is_logged_and_the_run_continues(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def raising(*_arguments: Any) -> None:
        raise KeyError("callback is broken")

    with caplog.at_level(logging.ERROR, "gpu_dispatch"):
        arguments: dict[str, Any] = {name: raising}
        recorder = run_dispatcher(Echo, ["a", "fail", "sleep", "b"], task_timeout=0.3, **arguments)
    expected = {"on_success": 2, "on_error": 3, "on_timeout": 3}.get(name, 4)
    assert sum(recorder.outcomes.values()) == expected
    logged = [record for record in caplog.records if record.exc_info and record.exc_info[0] is KeyError]
    assert len(logged) == {"on_success": 2, "on_task_start": 4}.get(name, 1)


def test_an_exception_in_on_setup_fail_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyZero(Echo):
        def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
            if gpu_id:
                raise ValueError("setup failed")

    def raising(*_arguments: Any) -> None:
        raise KeyError("callback is broken")

    recorder = run_dispatcher(OnlyZero, range(100), [0, 1], on_setup_fail=raising)
    recorder.check_one_outcome_each(100)


def test_failures_without_callbacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    Dispatcher(Echo, [0]).run(["fail", "sleep"], lambda *_: None, task_timeout=0.3)
    logged = [record.getMessage() for record in caplog.records]
    assert any("this task is odd" in text for text in logged) and any("longer than 0.3" in text for text in logged)


def test_a_failed_cleanup_is_logged_and_reported_and_loses_no_task(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ProgressEvent] = []
    recorder = run_dispatcher(FailingCleanup, range(20), options={"on_progress": events.append})
    recorder.check_one_outcome_each(20)
    assert not recorder.errors
    (event,) = [event for event in events if event.kind == "cleanup_failed"]
    assert isinstance(event.message, CleanupFailed) and event.message.gpu_id == 0
    assert "cleanup failed" in event.message.error
    assert any("cleanup failed" in record.getMessage() for record in caplog.records)


def test_events_have_kind_task_worker_times_and_statistics() -> None:
    events: list[ProgressEvent] = []
    run_dispatcher(Echo, ["a", "fail"], [4], options={"on_progress": events.append})
    kinds = [event.kind for event in events]
    assert kinds[0] == "ready" and kinds[-1] == "worker_gone"
    assert sorted(kinds[1:-1]) == ["error", "started", "started", "success"]
    success = next(event for event in events if event.kind == "success")
    assert success.message == TaskSuccess(0, "a", 4) and (success.task_id, success.worker_id, success.gpu_id) == (0, 4, 4)
    assert success.started_at is not None and success.finished_at is not None
    assert success.started_at <= success.finished_at
    assert {"pending", "running", "completed", "failed", "timeouts"} <= set(success.stats)
    error = next(event for event in events if event.kind == "error")
    assert isinstance(error.message, TaskError) and error.stats["failed"] == 1
    assert [event.message for event in events if event.kind == "started"] == [TaskStarted(0, 4), TaskStarted(1, 4)]


def test_a_worker_runs_all_its_tasks_in_one_process() -> None:
    class Pid(Echo):
        def process(self, data: Any) -> Any:
            return os.getpid()

    recorder = run_dispatcher(Pid, range(500), [0, 1])
    workers = {(recorder.worker_ids[task_id], pid) for task_id, pid in recorder.results.items()}
    assert len(workers) == len(set(recorder.results.values())) <= 2
    assert os.getpid() not in recorder.results.values()
