"""Additional options: several workers per GPU, retries, masks, output, debug."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatch_kit import CallbackRecorder, run_dispatcher
from gpu_dispatch import BaseWorker, Dispatcher, ProgressEvent


class ReportingWorker(BaseWorker):
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
            raise ValueError("the task fails")
        return self.gpu_id, self.seed, os.getpid()


class FailsAtFirst(ReportingWorker):
    """Fails, then kills its worker, then succeeds; counts the attempts in a file."""

    def process(self, data: Any) -> Any:
        with open(data, "a") as attempts:
            attempts.write("x")
        count = len(Path(data).read_text())
        if count == 1:
            raise ValueError("the first attempt fails")
        if count == 2:
            os._exit(1)
        return count


def test_workers_per_gpu_gives_workers_different_ids_on_the_same_gpu() -> None:
    events: list[ProgressEvent] = []
    options = {"workers_per_gpu": 2, "on_progress": events.append}
    recorder = run_dispatcher(ReportingWorker, ["x"] * 400, [3, 5], options=options)
    recorder.check_one_outcome_each(400)
    for task_id, (gpu_id, seed, _pid) in recorder.results.items():
        assert gpu_id == [3, 3, 5, 5][recorder.worker_ids[task_id]] and seed == 42 + gpu_id
    assert all(event.gpu_id in (3, 5) for event in events)
    assert {event.worker_id for event in events if event.kind == "worker_gone"} == {0, 1, 2, 3}


def test_a_failed_task_is_retried(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    recorder = run_dispatcher(FailsAtFirst, [str(tmp_path / "a")], options={"retries": 2, "on_progress": events.append})
    assert recorder.results == {0: 3} and not recorder.errors
    assert [event.kind for event in events].count("retried") == 2


def test_a_task_that_fails_every_retry_fails_once(tmp_path: Path) -> None:
    recorder = run_dispatcher(FailsAtFirst, [str(tmp_path / "a")], options={"retries": 1})
    recorder.check_one_outcome_each(1)
    assert list(recorder.errors) == [0]
    assert (tmp_path / "a").read_text() == "xx"


def test_workers_see_all_gpus_unless_they_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert run_dispatcher(ReportingWorker, ["environment"], [2]).results == {0: ("4,5,6,7", "cuda:2", 2)}
    assert run_dispatcher(ReportingWorker, ["environment"], [2], options={"mask": True}).results == {0: ("2", "cuda:0", 2)}


@pytest.mark.parametrize("suppressed", [False, True])
def test_output_of_workers_is_shown_unless_it_is_suppressed(suppressed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    run_dispatcher(ReportingWorker, ["write"], options={"suppress_worker_output": suppressed})
    out, err = capfd.readouterr()
    shown = ["written by a descriptor" in out + err, "printed\n" in out + err, "printed to stderr" in out + err]
    assert shown == [not suppressed] * 3, (out, err)


def test_debug_shows_output_and_ends_at_the_first_failure(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = CallbackRecorder()
    with pytest.raises(Exception, match="the task fails"):
        Dispatcher(ReportingWorker, [0], suppress_worker_output=True, debug=True).run(
            ["write", "fail", *["x"] * 1000], recorder.on_success, recorder.on_error
        )
    out, err = capfd.readouterr()
    assert "printed\n" in out + err
    assert len(recorder.results) < 1001


def test_debug_raises_what_a_callback_raises() -> None:
    def broken(*_arguments: Any) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        Dispatcher(ReportingWorker, [0], debug=True).run(["x"], broken)


def test_completed_tasks_in_the_job_log_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = run_dispatcher(ReportingWorker, ["x", "fail", "x"], options={"joblog": str(log)})
    assert len(first.results) == 2 and list(first.errors) == [1]
    second = run_dispatcher(ReportingWorker, ["x", "x", "x", "x"], options={"joblog": str(log)})
    assert sorted(second.results) == [1, 3], "the failed task and the new one"
