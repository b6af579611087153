"""A task timeout is reported once, in any state of the task, and does not affect the next task."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import pytest

from dispatch_kit import TIMEOUT_SECS, run_dispatcher
from gpu_dispatch import BaseWorker, dispatcher


class SlowWorker(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        if data == "sleep":
            time.sleep(TIMEOUT_SECS)
        elif data == "loop":
            while True:
                pass
        elif data == "native":
            hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**31 - 1)
        elif data == "catches":
            try:
                time.sleep(TIMEOUT_SECS)
            except TimeoutError:
                return "caught"
        elif data == "catches all":
            while True:
                try:
                    time.sleep(TIMEOUT_SECS)
                except BaseException:
                    pass
        elif data == "finally":
            try:
                time.sleep(TIMEOUT_SECS)
            finally:
                self.tidied = True
        elif data == "tidied":
            return self.tidied
        elif isinstance(data, float):
            time.sleep(data)
        return os.getpid()


def test_an_interruptible_task_is_interrupted_and_its_worker_survives() -> None:
    recorder = run_dispatcher(SlowWorker, ["pid", "sleep", "loop", "catches", "finally", "tidied", "pid"], task_timeout=0.3)
    recorder.check_one_outcome_each(7)
    assert recorder.timeouts == dict.fromkeys([1, 2, 3, 4], 0.3), (recorder.errors, recorder.results)
    assert recorder.results[0] == recorder.results[6]
    assert recorder.results[5] is True, "the interrupt runs the task's finally block"


@pytest.mark.parametrize("stuck", ["native", "catches all"])
def test_an_uninterruptible_task_is_killed_with_its_worker(
    stuck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "GRACE_SECS", 0.3)
    recorder = run_dispatcher(SlowWorker, ["pid", stuck, "pid"], task_timeout=0.4)
    recorder.check_one_outcome_each(3)
    assert recorder.timeouts == {1: 0.4}, (recorder.errors, recorder.results)
    assert recorder.results[0] != recorder.results[2], "another process runs the next task"


def test_a_limit_may_be_a_whole_number() -> None:
    recorder = run_dispatcher(SlowWorker, ["sleep", "pid"], task_timeout=1)
    assert recorder.timeouts == {0: 1} and list(recorder.results) == [1]


def test_other_tasks_continue_during_a_timeout() -> None:
    recorder = run_dispatcher(SlowWorker, ["sleep", *([0.0] * 200)], [0, 1], task_timeout=0.5)
    assert list(recorder.timeouts) == [0] and len(recorder.results) == 200


def test_an_interrupt_never_reaches_the_next_task() -> None:
    """Tasks end at the time of their interrupt: each has one outcome, and none is an error."""
    limit = 0.02
    tasks = [limit if number % 2 else limit * 0.9 + number * 1e-5 for number in range(160)]
    recorder = run_dispatcher(SlowWorker, tasks, [0, 1], task_timeout=limit)
    recorder.check_one_outcome_each(len(tasks))
    assert not recorder.errors, recorder.errors


def test_task_timeout_does_not_apply_to_setup_and_cleanup() -> None:
    class Leisurely(SlowWorker):
        def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
            time.sleep(0.3)

        def cleanup(self) -> None:
            time.sleep(0.3)

    recorder = run_dispatcher(Leisurely, ["pid"], task_timeout=0.1)
    assert list(recorder.results) == [0]


def test_a_task_that_raises_timeout_error_itself_is_a_failure() -> None:
    class Raises(SlowWorker):
        def process(self, data: Any) -> Any:
            raise TimeoutError("the database did not answer")

    recorder = run_dispatcher(Raises, [1], task_timeout=TIMEOUT_SECS)
    assert not recorder.timeouts and "the database did not answer" in recorder.errors[0]
