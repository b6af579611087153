"""Inference of causal mechanisms."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pool_tasks
import pytest
from gpupool.resource_pool import BayesianInferenceEngine, WorkerTimeoutError
from pool_kit import PoolTracker, run_async

LINK = {"id": 7, "source": "training", "target": "skills", "evidence": {"supporting": 8, "contradicting": 2}}


@dataclass
class Link:
    """Link as an object instead of a dict."""

    id: str
    source: str
    target: str
    evidence: Any


def infer(pools: PoolTracker, *links: Any, sampler: Any = None) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        engine = BayesianInferenceEngine(pools.create(2), sampler)
        return list(await asyncio.gather(*map(engine.infer_mechanism, links)))

    return run_async(main())


def test_an_inference_has_the_documented_result(pools: PoolTracker) -> None:
    (result,) = infer(pools, {**LINK, "type": "administrative"})
    assert {"type", "posterior_mean", "necessity_test", "device", "worker_id"} <= result.keys()
    assert result["type"] == "administrative" and result["device"] == "cpu" and result["worker_id"] in (0, 1)
    assert result["necessity_test"] == {"passed": True, "missing": []}


def test_the_posterior_follows_from_the_evidence(pools: PoolTracker) -> None:
    results = infer(
        pools,
        LINK,
        {**LINK, "evidence": {"successes": 8, "trials": 10}},
        {**LINK, "evidence": [1] * 8 + [0] * 2},
        Link("own", "a", "b", [{"kind": "report", "supports": True, "weight": 8}, {"supports": False, "weight": 2}]),
        {**LINK, "prior": (3, 1)},
        {**LINK, "evidence": [0.5]},
        {"id": 1},
    )
    assert [result["posterior_mean"] for result in results] == pytest.approx([9 / 12] * 4 + [11 / 14, 1.5 / 3, 0.5])
    for result in results:
        low, high = result["credible_interval"]
        assert 0 <= low < result["posterior_mean"] < high <= 1, result
    strong, weak = results[0]["posterior_std"], results[-1]["posterior_std"]
    assert strong < weak == pytest.approx((1 / 12) ** 0.5)


def test_the_same_link_gives_the_same_result(pools: PoolTracker) -> None:
    first, second = infer(pools, LINK, LINK)
    assert first["credible_interval"] == second["credible_interval"]


def test_missing_required_evidence_is_named(pools: PoolTracker) -> None:
    results = infer(
        pools,
        {"id": 1, "source": "a"},
        {
            **LINK,
            "required_evidence": ["budget", "report"],
            "evidence": [{"kind": "report"}, {"kind": "budget", "supports": 0}],
        },
    )
    assert results[0]["necessity_test"] == {"passed": False, "missing": ["target", "evidence"]}
    assert results[1]["necessity_test"] == {"passed": False, "missing": ["budget"]}


def test_invalid_evidence_is_rejected(pools: PoolTracker) -> None:
    with pytest.raises(ValueError, match="evidence must have a support from 0 to 1"):
        infer(pools, {**LINK, "evidence": [7]})
    with pytest.raises(ValueError, match="prior must be a mean between 0 and 1"):
        infer(pools, {**LINK, "prior": 2})


def test_many_inferences_share_the_workers_with_their_own_task_ids(pools: PoolTracker) -> None:
    async def main() -> None:
        pool = pools.create(4)
        engine = BayesianInferenceEngine(pool)
        results = await asyncio.gather(*(engine.infer_mechanism({**LINK, "id": number}) for number in range(10)))
        assert len(results) == 10 and {result["worker_id"] for result in results} <= set(range(4))
        assert sorted(entry.task_id for entry in pool.audit()) == sorted(f"infer_{number}" for number in range(10))
        status = pool.get_pool_status()
        assert status["available_workers"] == 4 and status["active_tasks"] == 0

    run_async(main())


def test_a_custom_sampler_runs_in_the_worker(pools: PoolTracker) -> None:
    (number,) = infer(pools, LINK, sampler=lambda link: link["id"] / 10)
    assert number["posterior_mean"] == 0.7
    (more,) = infer(pools, LINK, sampler=lambda link: {"posterior_mean": 0.2, "chains": 4, "type": "own"})
    assert (more["posterior_mean"], more["chains"], more["type"]) == (0.2, 4, "own")
    assert more["necessity_test"]["passed"]
    with pytest.raises(ValueError, match="the sampler must return a posterior_mean"):
        infer(pools, LINK, sampler=lambda link: {})
    with pytest.raises(TypeError, match="sampler must be callable, got 3"):
        infer(pools, LINK, sampler=3)


def test_an_inference_obeys_the_limits(pools: PoolTracker) -> None:
    async def main() -> None:
        engine = BayesianInferenceEngine(pools.create(1, 0.5), lambda link: pool_tasks.spin())
        with pytest.raises(WorkerTimeoutError):
            await engine.infer_mechanism(LINK)

    run_async(main())
