"""Inference of mechanisms."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pool_work as work
import pytest
from gpupool.resource_pool import BayesianInferenceEngine, WorkerTimeoutError
from pool_kit import Story, run

LINK = {"id": 7, "source": "training", "target": "skills", "evidence": {"supporting": 8, "contradicting": 2}}


@dataclass
class Link:
    """A link that is an object."""

    id: str
    source: str
    target: str
    evidence: Any


def infer(story: Story, *links: Any, sampler: Any = None) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        engine = BayesianInferenceEngine(story.pool(2), sampler)
        return list(await asyncio.gather(*map(engine.infer_mechanism, links)))

    return run(main())


def test_an_inference_tells_what_programs_expect(story: Story) -> None:
    (found,) = infer(story, {**LINK, "type": "administrative"})
    assert {"type", "posterior_mean", "necessity_test", "device", "worker_id"} <= found.keys()
    assert found["type"] == "administrative" and found["device"] == "cpu" and found["worker_id"] in (0, 1)
    assert found["necessity_test"] == {"passed": True, "missing": []}


def test_the_posterior_is_that_of_the_evidence(story: Story) -> None:
    found = infer(
        story,
        LINK,
        {**LINK, "evidence": {"successes": 8, "trials": 10}},
        {**LINK, "evidence": [1] * 8 + [0] * 2},
        Link("own", "a", "b", [{"kind": "report", "supports": True, "weight": 8}, {"supports": False, "weight": 2}]),
        {**LINK, "prior": (3, 1)},
        {**LINK, "evidence": [0.5]},
        {"id": 1},
    )
    assert [one["posterior_mean"] for one in found] == pytest.approx([9 / 12] * 4 + [11 / 14, 1.5 / 3, 0.5])
    for one in found:
        low, high = one["credible_interval"]
        assert 0 <= low < one["posterior_mean"] < high <= 1, one
    strong, weak = found[0]["posterior_std"], found[-1]["posterior_std"]
    assert strong < weak == pytest.approx((1 / 12) ** 0.5)


def test_the_same_link_gives_the_same_answer(story: Story) -> None:
    first, second = infer(story, LINK, LINK)
    assert first["credible_interval"] == second["credible_interval"]


def test_what_is_necessary_and_missing_is_named(story: Story) -> None:
    found = infer(
        story,
        {"id": 1, "source": "a"},
        {
            **LINK,
            "required_evidence": ["budget", "report"],
            "evidence": [{"kind": "report"}, {"kind": "budget", "supports": 0}],
        },
    )
    assert found[0]["necessity_test"] == {"passed": False, "missing": ["target", "evidence"]}
    assert found[1]["necessity_test"] == {"passed": False, "missing": ["budget"]}


def test_evidence_that_makes_no_sense_is_refused(story: Story) -> None:
    with pytest.raises(ValueError, match="evidence must have a support from 0 to 1"):
        infer(story, {**LINK, "evidence": [7]})
    with pytest.raises(ValueError, match="prior must be a mean between 0 and 1"):
        infer(story, {**LINK, "prior": 2})


def test_many_inferences_share_the_workers_under_their_own_names(story: Story) -> None:
    async def main() -> None:
        pool = story.pool(4)
        engine = BayesianInferenceEngine(pool)
        found = await asyncio.gather(*(engine.infer_mechanism({**LINK, "id": number}) for number in range(10)))
        assert len(found) == 10 and {one["worker_id"] for one in found} <= set(range(4))
        assert sorted(entry.task_id for entry in pool.audit()) == sorted(f"infer_{number}" for number in range(10))
        status = pool.get_pool_status()
        assert status["available_workers"] == 4 and status["active_tasks"] == 0

    run(main())


def test_a_sampler_of_ones_own_runs_in_the_worker(story: Story) -> None:
    (number,) = infer(story, LINK, sampler=lambda link: link["id"] / 10)
    assert number["posterior_mean"] == 0.7
    (more,) = infer(story, LINK, sampler=lambda link: {"posterior_mean": 0.2, "chains": 4, "type": "own"})
    assert (more["posterior_mean"], more["chains"], more["type"]) == (0.2, 4, "own")
    assert more["necessity_test"]["passed"]
    with pytest.raises(ValueError, match="the sampler must return a posterior_mean"):
        infer(story, LINK, sampler=lambda link: {})
    with pytest.raises(TypeError, match="sampler must be callable, got 3"):
        infer(story, LINK, sampler=3)


def test_an_inference_is_held_to_the_limits(story: Story) -> None:
    async def main() -> None:
        engine = BayesianInferenceEngine(story.pool(1, 0.5), lambda link: work.spin())
        with pytest.raises(WorkerTimeoutError):
            await engine.infer_mechanism(LINK)

    run(main())
