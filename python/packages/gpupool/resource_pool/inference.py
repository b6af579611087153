"""Inference of mechanisms by the workers of a pool."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from . import posterior
from .pool import ResourcePool

#: Gets a link, runs in the worker, and gives its posterior mean, or a dict with `posterior_mean` and whatever else is known.
Sampler = Callable[[Any], Any]


class BayesianInferenceEngine:
    """Tells how likely the mechanism behind a causal link is, given its evidence.

    Each inference runs in a worker of the pool, under its limits. `sampler` replaces the model that is built in.
    """

    def __init__(self, pool: ResourcePool, sampler: Optional[Sampler] = None) -> None:
        if sampler is not None and not callable(sampler):
            raise TypeError(f"sampler must be callable, got {sampler!r}")
        self.pool = pool
        self.sampler = sampler

    async def infer_mechanism(self, link: Any) -> Dict[str, Any]:
        """Infers one link: a dict, or an object with the same names as attributes.

        The answer has `type`, `posterior_mean`, `necessity_test` (`passed`, `missing`), `device` and `worker_id`, and whatever
        the sampler adds.
        """
        async with self.pool.acquire_worker(f"infer_{posterior.identity(link)}") as worker:
            found = await worker.run(posterior.infer, link, self.sampler)
            return {**found, "device": worker.device, "worker_id": worker.id}
