"""Workers on GPUs that are agent from an agent."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Iterator

import pytest

from dispatch_kit import MARK_VARIABLE, run_dispatcher
from gpu_dispatch import BaseWorker, Dispatcher
from gpu_dispatch.ui import RichDispatcher


class ReportingWorker(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id = gpu_id

    def process(self, data: Any) -> Any:
        return self.gpu_id, self.device, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def agent(start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start the machine's default agent with two GPUs, outside of the process mark of the test."""
    mark = os.environ.pop(MARK_VARIABLE)
    agent = start_agent("2xH100")
    os.environ[MARK_VARIABLE] = mark
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", agent.url)
    yield agent


def active_leases(agent: Any) -> list[Any]:
    response = json.loads(agent.run_command("lease", "list", "--json"))
    leases = response["leases"] if isinstance(response, dict) else response
    return [lease for lease in leases if lease["state"] == "active"]


def test_workers_see_only_their_leased_gpu_and_release_it(agent: Any) -> None:
    recorder = run_dispatcher(ReportingWorker, range(200), "auto:1")  # type: ignore[arg-type]
    recorder.check_one_outcome_each(200)
    ((gpu_id, device, visible),) = set(recorder.results.values())
    assert gpu_id in (0, 1) and device == "cuda:0" and visible is not None
    assert set(recorder.worker_ids.values()) == {gpu_id}
    assert active_leases(agent) == []


def test_gpus_are_leased_during_the_run_and_released_when_it_fails(agent: Any) -> None:
    held: list[int] = []

    def tasks() -> Iterator[int]:
        yield 1
        raise LookupError("the source is broken")

    with pytest.raises(LookupError):
        Dispatcher(ReportingWorker, "auto:1").run(tasks(), lambda *_: held.append(len(active_leases(agent))))
    assert held == [1]
    assert active_leases(agent) == []


def test_gpu_status_has_the_leased_gpus(agent: Any) -> None:
    result = RichDispatcher(ReportingWorker, "auto", show_ui=False).run(range(20))
    assert result["completed"] == 20
    assert set(result["gpu_status"]) <= {0, 1} and sum(gpu["completed"] for gpu in result["gpu_status"].values()) == 20


@pytest.mark.parametrize("wrong", ["automatic", "auto:0", "auto:x", "0,1", ""])
def test_an_unknown_word_for_gpus_is_rejected(wrong: str) -> None:
    with pytest.raises(ValueError, match="gpu_ids"):
        Dispatcher(ReportingWorker, wrong)
