"""What is ours: several workers for a GPU, retries, masks, output, debug."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatch_kit import Tally, run
from gpu_dispatch import BaseWorker, Dispatcher, ProgressEvent


class Tells(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id, self.seed = gpu_id, seed

    def process(self, data: Any) -> Any:
        if data == "environment":
            return os.environ.get("CUDA_VISIBLE_DEVICES"), self.device, self.gpu_id
        if data == "write":
            os.write(1, b"written by a descriptor\n")
            print("printed")
            print("printed to stderr", file=sys.stderr)
        if data == "fail":
            raise ValueError("it fails")
        return self.gpu_id, self.seed, os.getpid()


class FailsAtFirst(Tells):
    """Fails, kills its worker, then works: each time it is tried it says so in a file."""

    def process(self, data: Any) -> Any:
        with open(data, "a") as tried:
            tried.write("x")
        count = len(Path(data).read_text())
        if count == 1:
            raise ValueError("the first time")
        if count == 2:
            os._exit(1)
        return count


def test_several_workers_of_a_gpu_have_ids_of_their_own_and_the_gpu_in_common() -> None:
    events: list[ProgressEvent] = []
    options = {"workers_per_gpu": 2, "on_progress": events.append}
    tally = run(Tells, ["x"] * 400, [3, 5], options=options)
    tally.check_each_once(400)
    for task_id, (gpu_id, seed, _pid) in tally.done.items():
        assert gpu_id == [3, 3, 5, 5][tally.by[task_id]] and seed == 42 + gpu_id
    assert all(event.gpu_id in (3, 5) for event in events)
    assert {event.worker_id for event in events if event.kind == "worker_gone"} == {0, 1, 2, 3}


def test_a_task_that_fails_is_tried_again(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    tally = run(FailsAtFirst, [str(tmp_path / "a")], options={"retries": 2, "on_progress": events.append})
    assert tally.done == {0: 3} and not tally.errors
    assert [event.kind for event in events].count("retried") == 2


def test_a_task_that_fails_too_often_has_failed_once(tmp_path: Path) -> None:
    tally = run(FailsAtFirst, [str(tmp_path / "a")], options={"retries": 1})
    tally.check_each_once(1)
    assert list(tally.errors) == [0]
    assert (tmp_path / "a").read_text() == "xx"


def test_workers_see_all_gpus_unless_they_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert run(Tells, ["environment"], [2]).done == {0: ("4,5,6,7", "cuda:2", 2)}
    assert run(Tells, ["environment"], [2], options={"mask": True}).done == {0: ("2", "cuda:0", 2)}


@pytest.mark.parametrize("suppressed", [False, True])
def test_output_of_workers_is_shown_unless_it_is_suppressed(suppressed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    run(Tells, ["write"], options={"suppress_worker_output": suppressed})
    out, err = capfd.readouterr()
    shown = ["written by a descriptor" in out + err, "printed\n" in out + err, "printed to stderr" in out + err]
    assert shown == [not suppressed] * 3, (out, err)


def test_debug_shows_output_and_fails_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    with pytest.raises(Exception, match="it fails"):
        Dispatcher(Tells, [0], suppress_worker_output=True, debug=True).run(
            ["write", "fail", *["x"] * 1000], tally.on_success, tally.on_error
        )
    out, err = capfd.readouterr()
    assert "printed\n" in out + err
    assert len(tally.done) < 1001


def test_debug_raises_what_a_callback_raises() -> None:
    def broken(*_arguments: Any) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        Dispatcher(Tells, [0], debug=True).run(["x"], broken)


def test_what_is_in_a_job_log_is_not_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = run(Tells, ["x", "fail", "x"], options={"joblog": str(log)})
    assert len(first.done) == 2 and list(first.errors) == [1]
    second = run(Tells, ["x", "x", "x", "x"], options={"joblog": str(log)})
    assert sorted(second.done) == [1, 3], "what failed and what is new"
