"""Who is told what, in which thread, and what happens when a callback raises."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from dispatch_kit import Tally, marked_processes, run
from gpu_dispatch import BaseWorker, CleanupFailed, Dispatcher, ProgressEvent, TaskError, TaskStarted, TaskSuccess


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.told = (gpu_id, seed, kwargs)

    def process(self, data: Any) -> Any:
        if data == "fail":
            raise ValueError("this task is odd")
        if data == "sleep":
            threading.Event().wait()
        return data if data != "told" else self.told


class Untidy(Echo):
    def cleanup(self) -> None:
        raise OSError("the broom is gone")


def test_callbacks_are_told_task_value_and_worker_in_the_thread_that_runs() -> None:
    heard: list[Any] = []
    threads = set()

    def hear(name: str) -> Any:
        def callback(*arguments: Any) -> None:
            threads.add(threading.get_ident())
            heard.append((name, *arguments))

        return callback

    Dispatcher(Echo, [3]).run(
        iter(["value", "fail", "sleep"]),
        hear("success"),
        hear("error"),
        hear("timeout"),
        hear("setup_fail"),
        hear("start"),
        hear("exit"),
        42,
        0.5,
        3,
    )
    assert threads == {threading.get_ident()}
    assert [one for one in heard if one[0] == "start"] == [("start", 0, 3), ("start", 1, 3), ("start", 2, 3)]
    assert ("success", 0, "value", 3) in heard
    assert ("timeout", 2, 0.5, 3) in heard
    (_, task_id, traceback, worker_id) = next(one for one in heard if one[0] == "error")
    assert (task_id, worker_id) == (1, 3)
    assert traceback.startswith("Traceback (most recent call last)") and "ValueError: this task is odd" in traceback
    assert heard[-1] == ("exit",) and len(heard) == 7
    for name, task_id in (("success", 0), ("error", 1), ("timeout", 2)):
        at = [one[:2] for one in heard]
        assert at.index(("start", task_id)) < at.index((name, task_id))


def test_setup_gets_its_gpu_the_base_seed_plus_it_and_the_other_keywords() -> None:
    tally = run(Echo, ["told"] * 50, [0, 5], batch=8, names=["a"])
    for task_id, (gpu_id, seed, kwargs) in tally.done.items():
        assert (gpu_id, seed, kwargs) == (tally.by[task_id], 42 + gpu_id, {"batch": 8, "names": ["a"]})
    tally = run(Echo, ["told"], [5], base_seed=1000)
    assert tally.done == {0: (5, 1005, {})}


def test_task_ids_count_from_zero_in_the_order_of_the_generator() -> None:
    tally = run(Echo, (str(number) for number in range(3000)), [0, 1])
    assert tally.done == {number: str(number) for number in range(3000)}


def test_on_exit_comes_last_when_the_workers_are_gone() -> None:
    left: list[Any] = []
    tally = Tally()
    Dispatcher(Echo, [0, 1]).run(range(10), tally.on_success, on_exit=lambda: left.append(marked_processes()))
    assert left == [{}] and len(tally.done) == 10


def test_on_exit_comes_also_when_the_run_fails() -> None:
    tally = Tally()
    with pytest.raises(ZeroDivisionError):
        Dispatcher(Echo, [0]).run((1 // 0 for _ in "x"), tally.on_success, on_exit=tally.on_exit)
    assert tally.exits == 1


@pytest.mark.parametrize("name", ["on_success", "on_error", "on_timeout", "on_task_start", "on_exit"])
def test_a_callback_that_raises_is_logged_and_the_run_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def raising(*_arguments: Any) -> None:
        raise KeyError("callback is broken")

    with caplog.at_level(logging.ERROR, "gpu_dispatch"):
        arguments: dict[str, Any] = {name: raising}
        tally = run(Echo, ["a", "fail", "sleep", "b"], task_timeout=0.3, **arguments)
    told = {"on_success": 2, "on_error": 3, "on_timeout": 3}.get(name, 4)
    assert sum(tally.outcomes.values()) == told
    logged = [record for record in caplog.records if record.exc_info and record.exc_info[0] is KeyError]
    assert len(logged) == {"on_success": 2, "on_task_start": 4}.get(name, 1)


def test_an_on_setup_fail_that_raises_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyZero(Echo):
        def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
            if gpu_id:
                raise ValueError("not this one")

    def raising(*_arguments: Any) -> None:
        raise KeyError("callback is broken")

    tally = run(OnlyZero, range(100), [0, 1], on_setup_fail=raising)
    tally.check_each_once(100)


def test_what_nobody_wants_to_hear_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Dispatcher(Echo, [0]).run(["fail", "sleep"], lambda *_: None, task_timeout=0.3)
    logged = [record.getMessage() for record in caplog.records]
    assert any("this task is odd" in text for text in logged) and any("longer than 0.3" in text for text in logged)


def test_a_cleanup_that_fails_is_logged_and_an_event_and_loses_no_task(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ProgressEvent] = []
    tally = run(Untidy, range(20), options={"on_progress": events.append})
    tally.check_each_once(20)
    assert not tally.errors
    (event,) = [event for event in events if event.kind == "cleanup_failed"]
    assert isinstance(event.message, CleanupFailed) and event.message.gpu_id == 0
    assert "the broom is gone" in event.message.error
    assert any("the broom is gone" in record.getMessage() for record in caplog.records)


def test_events_tell_kind_task_worker_times_and_how_things_stand() -> None:
    events: list[ProgressEvent] = []
    run(Echo, ["a", "fail"], [4], options={"on_progress": events.append})
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


def test_the_process_of_a_worker_stays_for_all_its_tasks() -> None:
    class Pid(Echo):
        def process(self, data: Any) -> Any:
            return os.getpid()

    tally = run(Pid, range(500), [0, 1])
    assert len({(tally.by[task_id], pid) for task_id, pid in tally.done.items()}) == len(set(tally.done.values())) <= 2
    assert os.getpid() not in tally.done.values()
