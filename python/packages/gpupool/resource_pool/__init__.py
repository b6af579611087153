"""Pools of worker processes; each worker runs one task at a time, under limits of time and memory.

    config = ResourceConfig(max_workers=4, worker_timeout_secs=300, worker_memory_mb=2048)
    async with ResourcePool(config) as pool:
        async with pool.acquire_worker("task-17") as worker:
            result = await worker.run(function, *arguments)
"""

from __future__ import annotations

from .config import ResourceConfig
from .errors import (
    PoolClosedError,
    WorkerError,
    WorkerLimitError,
    WorkerLostError,
    WorkerMemoryError,
    WorkerStartError,
    WorkerTimeoutError,
)
from .inference import BayesianInferenceEngine
from .pool import AuditEntry, ResourcePool
from .worker import Worker

__all__ = [
    "AuditEntry",
    "BayesianInferenceEngine",
    "PoolClosedError",
    "ResourceConfig",
    "ResourcePool",
    "Worker",
    "WorkerError",
    "WorkerLimitError",
    "WorkerLostError",
    "WorkerMemoryError",
    "WorkerStartError",
    "WorkerTimeoutError",
]
