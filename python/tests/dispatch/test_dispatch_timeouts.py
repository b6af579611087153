"""A task that takes too long is told once, whatever it is stuck in, and the next one is not hit."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import pytest

from dispatch_kit import PATIENCE_SECS, run
from gpu_dispatch import BaseWorker, dispatcher


class Slow(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        if data == "sleep":
            time.sleep(PATIENCE_SECS)
        elif data == "loop":
            while True:
                pass
        elif data == "native":
            hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**31 - 1)
        elif data == "catches":
            try:
                time.sleep(PATIENCE_SECS)
            except TimeoutError:
                return "caught"
        elif data == "catches all":
            while True:
                try:
                    time.sleep(PATIENCE_SECS)
                except BaseException:
                    pass
        elif data == "finally":
            try:
                time.sleep(PATIENCE_SECS)
            finally:
                self.tidied = True
        elif data == "tidied":
            return self.tidied
        elif isinstance(data, float):
            time.sleep(data)
        return os.getpid()


def test_a_task_that_can_be_interrupted_is_and_its_worker_lives_on() -> None:
    tally = run(Slow, ["pid", "sleep", "loop", "catches", "finally", "tidied", "pid"], task_timeout=0.3)
    tally.check_each_once(7)
    assert tally.late == dict.fromkeys([1, 2, 3, 4], 0.3), (tally.errors, tally.done)
    assert tally.done[0] == tally.done[6]
    assert tally.done[5] is True, "what a task does at its end is done when it is interrupted"


@pytest.mark.parametrize("stuck", ["native", "catches all"])
def test_a_task_that_cannot_be_interrupted_is_killed_with_its_worker(
    stuck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "GRACE_SECS", 0.3)
    tally = run(Slow, ["pid", stuck, "pid"], task_timeout=0.4)
    tally.check_each_once(3)
    assert tally.late == {1: 0.4}, (tally.errors, tally.done)
    assert tally.done[0] != tally.done[2], "another process does the next one"


def test_a_limit_may_be_a_whole_number() -> None:
    tally = run(Slow, ["sleep", "pid"], task_timeout=1)
    assert tally.late == {0: 1} and list(tally.done) == [1]


def test_others_go_on_while_one_waits_for_its_end() -> None:
    tally = run(Slow, ["sleep", *([0.0] * 200)], [0, 1], task_timeout=0.5)
    assert list(tally.late) == [0] and len(tally.done) == 200


def test_an_interrupt_never_hits_the_next_task() -> None:
    """Tasks that end just when they are interrupted: each has one outcome, and none is an error."""
    limit = 0.02
    tasks = [limit if number % 2 else limit * 0.9 + number * 1e-5 for number in range(160)]
    tally = run(Slow, tasks, [0, 1], task_timeout=limit)
    tally.check_each_once(len(tasks))
    assert not tally.errors, tally.errors


def test_setup_and_cleanup_are_not_held_to_the_limit_of_tasks() -> None:
    class Leisurely(Slow):
        def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
            time.sleep(0.3)

        def cleanup(self) -> None:
            time.sleep(0.3)

    tally = run(Leisurely, ["pid"], task_timeout=0.1)
    assert list(tally.done) == [0]


def test_a_task_that_raises_timeout_error_by_itself_has_failed() -> None:
    class Raises(Slow):
        def process(self, data: Any) -> Any:
            raise TimeoutError("the database did not answer")

    tally = run(Raises, [1], task_timeout=PATIENCE_SECS)
    assert not tally.late and "the database did not answer" in tally.errors[0]
