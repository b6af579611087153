"""GPUs from one or several servers for asyncio programs: the API of the `gpu_worker_pool` package, on gpupool's client."""

from __future__ import annotations

from gpupool._native import __version__

from .client import GPUContextManager, GPUWorkerPoolClient, gpu_worker_pool_client
from .config import ConfigurationManager, EnvironmentConfigurationManager
from .exceptions import (
    CircuitBreakerOpenError,
    ClientStateError,
    ConfigurationError,
    GpupoolError,
    InvalidAssignmentError,
    NoCapacityError,
    NotAllowedError,
    RequestRefusedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from .models import (
    EndpointInfo,
    GlobalGPUAssignment,
    GlobalGPUInfo,
    GPUAssignment,
    GPUInfo,
    GPUStats,
    MultiEndpointPoolStatus,
    PoolStatus,
    WorkerInfo,
)

__all__ = [
    "CircuitBreakerOpenError",
    "ClientStateError",
    "ConfigurationError",
    "ConfigurationManager",
    "EndpointInfo",
    "EnvironmentConfigurationManager",
    "GPUAssignment",
    "GPUContextManager",
    "GPUInfo",
    "GPUStats",
    "GPUWorkerPoolClient",
    "GlobalGPUAssignment",
    "GlobalGPUInfo",
    "GpupoolError",
    "InvalidAssignmentError",
    "MultiEndpointPoolStatus",
    "NoCapacityError",
    "NotAllowedError",
    "PoolStatus",
    "RequestRefusedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerInfo",
    "WorkerTimeoutError",
    "__version__",
    "gpu_worker_pool_client",
]
