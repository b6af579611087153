"""Workers on GPUs that are leased from a real agent."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Iterator

import pytest

from dispatch_kit import MARK, run
from gpu_dispatch import BaseWorker, Dispatcher
from gpu_dispatch.ui import RichDispatcher


class Tells(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id = gpu_id

    def process(self, data: Any) -> Any:
        return self.gpu_id, self.device, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def leased(start_agent: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An agent with two GPUs, which is the one of this machine and lives longer than the test's workers."""
    mark = os.environ.pop(MARK)
    agent = start_agent("2xH100")
    os.environ[MARK] = mark
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", agent.url)
    yield agent


def active(agent: Any) -> list[Any]:
    told = json.loads(agent.call("lease", "list", "--json"))
    leases = told["leases"] if isinstance(told, dict) else told
    return [lease for lease in leases if lease["state"] == "active"]


def test_workers_see_only_the_gpu_they_were_leased_and_give_it_back(leased: Any) -> None:
    tally = run(Tells, range(200), "auto:1")  # type: ignore[arg-type]
    tally.check_each_once(200)
    ((gpu_id, device, visible),) = set(tally.done.values())
    assert gpu_id in (0, 1) and device == "cuda:0" and visible is not None
    assert set(tally.by.values()) == {gpu_id}
    assert active(leased) == []


def test_gpus_are_held_while_the_run_goes_on_and_given_back_when_it_fails(leased: Any) -> None:
    held: list[int] = []

    def tasks() -> Iterator[int]:
        yield 1
        raise LookupError("the source is broken")

    with pytest.raises(LookupError):
        Dispatcher(Tells, "auto:1").run(tasks(), lambda *_: held.append(len(active(leased))))
    assert held == [1]
    assert active(leased) == []


def test_the_picture_tells_of_the_gpus_that_were_leased(leased: Any) -> None:
    result = RichDispatcher(Tells, "auto", show_ui=False).run(range(20))
    assert result["completed"] == 20
    assert set(result["gpu_status"]) <= {0, 1} and sum(gpu["completed"] for gpu in result["gpu_status"].values()) == 20


@pytest.mark.parametrize("wrong", ["automatic", "auto:0", "auto:x", "0,1", ""])
def test_another_word_for_gpus_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="gpu_ids"):
        Dispatcher(Tells, wrong)
