"""The worker's side: what a program implements, and what calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Optional


class BaseWorker(ABC):
    """A worker process: made once, set up once, given many tasks."""

    #: What this worker computes on, such as `cuda:0`: its leased GPU with `gpu_ids="auto"`, else that of its number.
    device: Optional[str] = None

    @abstractmethod
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        """Loads what takes long. An error ends this worker."""

    @abstractmethod
    def process(self, data: Any) -> Any:
        """Does one task. An error is that task's only."""

    def cleanup(self) -> None:
        """Gives back what was loaded."""


class Serving:
    """A worker in its process, for `gpupool._worker`."""

    def __init__(self, worker: BaseWorker) -> None:
        self.process = worker.process
        self.clean_up = worker.cleanup


def start(
    hello: dict[str, Any], worker_cls: type[BaseWorker], base_seed: int, masked: bool, kwargs: dict[str, Any]
) -> Serving:
    """Makes and sets up the worker this process is."""
    gpu_id = hello["gpu_ids"][0]
    worker = worker_cls()
    if worker.device is None:
        worker.device = "cuda:0" if masked else f"cuda:{gpu_id}"
    worker.setup(gpu_id, base_seed + gpu_id, **kwargs)
    return Serving(worker)
