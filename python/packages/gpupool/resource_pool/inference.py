"""Inference of causal mechanisms in the workers of a pool."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from . import posterior
from .pool import ResourcePool

#: Function that runs in a worker with a link, and returns the posterior mean or a dict that contains `posterior_mean`.
Sampler = Callable[[Any], Any]


class BayesianInferenceEngine:
    """Estimates the probability of the mechanism behind a causal link from the link's evidence.

    Each inference runs in a worker of the pool, under its limits. `sampler` replaces the built-in model.
    """

    def __init__(self, pool: ResourcePool, sampler: Optional[Sampler] = None) -> None:
        if sampler is not None and not callable(sampler):
            raise TypeError(f"sampler must be callable, got {sampler!r}")
        self.pool = pool
        self.sampler = sampler

    async def infer_mechanism(self, link: Any) -> Dict[str, Any]:
        """Infer the mechanism of a link: a dict, or an object with the same names as attributes.

        The result has `type`, `posterior_mean`, `necessity_test` (`passed`, `missing`), `device`, `worker_id` and the
        further keys of the sampler's result.
        """
        async with self.pool.acquire_worker(f"infer_{posterior.link_id(link)}") as worker:
            result = await worker.run(posterior.infer, link, self.sampler)
            return {**result, "device": worker.device, "worker_id": worker.id}
