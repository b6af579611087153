"""Base class of workers, and their start in a worker process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Optional

from gpupool._worker import WorkerFunctions


class BaseWorker(ABC):
    """Worker in its own process: set up once, then called for each task."""

    #: Device of this worker, such as `cuda:0`: its leased GPU with `gpu_ids="auto"`, else the GPU with its number.
    device: Optional[str] = None

    @abstractmethod
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        """Prepare the worker, for example load a model. An exception ends this worker."""

    @abstractmethod
    def process(self, data: Any) -> Any:
        """Process one task and return its result. An exception fails only this task."""

    def cleanup(self) -> None:
        """Release the worker's resources."""


def start_worker(
    hello: dict[str, Any], worker_cls: type[BaseWorker], base_seed: int, masked: bool, kwargs: dict[str, Any]
) -> WorkerFunctions:
    """Create and set up the worker of this process."""
    gpu_id = hello["gpu_ids"][0]
    worker = worker_cls()
    if worker.device is None:
        worker.device = "cuda:0" if masked else f"cuda:{gpu_id}"
    worker.setup(gpu_id, base_seed + gpu_id, **kwargs)
    return WorkerFunctions(worker.process, worker.cleanup)
