"""Data classes that the client returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Dict, List, Optional, Union


@dataclass
class GPUInfo:
    """Last known values of a GPU."""

    gpu_id: int
    name: str
    memory_usage_percent: float
    utilization_percent: float

    def __post_init__(self) -> None:
        _check_count("gpu_id", self.gpu_id)
        _check_percent("memory_usage_percent", self.memory_usage_percent)
        _check_percent("utilization_percent", self.utilization_percent)


@dataclass
class GPUStats:
    """Last known values of all GPUs of a server."""

    gpu_count: int
    total_memory_mb: int
    total_used_memory_mb: int
    average_utilization_percent: float
    gpus_summary: List[GPUInfo]
    total_memory_usage_percent: float
    timestamp: str

    def __post_init__(self) -> None:
        if self.gpu_count < 0:
            raise ValueError(f"gpu_count must not be negative, got {self.gpu_count!r}")
        if self.gpu_count != len(self.gpus_summary):
            raise ValueError(f"gpu_count is {self.gpu_count}, but gpus_summary has {len(self.gpus_summary)} GPUs")


@dataclass
class WorkerInfo:
    """Worker with a GPU, the time of its assignment and the number of its lease."""

    worker_id: str
    assigned_at: Optional[datetime] = None
    lease: Optional[int] = None

    def __post_init__(self) -> None:
        _check_nonempty_string("worker_id", self.worker_id)


@dataclass
class GPUAssignment:
    """GPU that is assigned to a worker."""

    gpu_id: int
    worker_id: str
    assigned_at: datetime

    def __post_init__(self) -> None:
        _check_count("gpu_id", self.gpu_id)
        _check_nonempty_string("worker_id", self.worker_id)


@dataclass(init=False)
class GlobalGPUAssignment(GPUAssignment):
    """Assigned GPU of one of several servers. `gpu_id` equals `local_gpu_id`, as code for a `GPUAssignment` expects."""

    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int

    def __init__(
        self,
        global_gpu_id: str,
        endpoint_id: str,
        local_gpu_id: int,
        worker_id: str,
        assigned_at: datetime,
        gpu_id: Optional[int] = None,
    ) -> None:
        self.global_gpu_id = global_gpu_id
        self.endpoint_id = endpoint_id
        self.local_gpu_id = local_gpu_id
        self.gpu_id = local_gpu_id
        self.worker_id = worker_id
        self.assigned_at = assigned_at
        _check_global_id(global_gpu_id, endpoint_id, local_gpu_id)
        self.__post_init__()


@dataclass
class PoolStatus:
    """Status of the pool. `gpu_assignments` lists the workers of this client for each GPU id."""

    total_gpus: int
    available_gpus: int
    active_workers: int
    blocked_workers: int
    gpu_assignments: Dict[Any, List[WorkerInfo]]
    #: Component that assigns GPUs: `agent`, `client` (for statistics-only servers), `mixed` or `unknown`.
    authority: str = field(default="unknown", init=False)
    #: Age of the underlying data in seconds; `None` without data.
    age_secs: Optional[float] = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        _check_subset_count("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        _check_count("active_workers", self.active_workers)
        _check_count("blocked_workers", self.blocked_workers)


@dataclass
class MultiEndpointPoolStatus(PoolStatus):
    """Status of a pool of several servers."""

    total_endpoints: int
    healthy_endpoints: int
    endpoint_details: List[Dict[str, Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_subset_count("healthy_endpoints", self.healthy_endpoints, "total_endpoints", self.total_endpoints)


@dataclass
class EndpointInfo:
    """Status of a server."""

    endpoint_id: str
    url: str
    is_healthy: bool
    last_seen: Optional[datetime]
    total_gpus: int
    available_gpus: int
    response_time_ms: float

    def __post_init__(self) -> None:
        _check_nonempty_string("endpoint_id", self.endpoint_id)
        _check_nonempty_string("url", self.url)
        _check_subset_count("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        if not _is_number(self.response_time_ms) or not self.response_time_ms >= 0:
            raise ValueError(f"response_time_ms must be a number, 0 or more, got {self.response_time_ms!r}")


@dataclass
class GlobalGPUInfo:
    """GPU of one of several servers."""

    global_gpu_id: str
    endpoint_id: str
    local_gpu_id: int
    name: str
    memory_usage_percent: float
    utilization_percent: float
    is_available: bool

    def __post_init__(self) -> None:
        _check_global_id(self.global_gpu_id, self.endpoint_id, self.local_gpu_id)
        _check_percent("memory_usage_percent", self.memory_usage_percent)
        _check_percent("utilization_percent", self.utilization_percent)


#: Result of `request_gpu`.
Assignment = Union[GPUAssignment, GlobalGPUAssignment]


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, 0 or more, got {value!r}")


def _check_subset_count(name: str, value: Any, total_name: str, total: Any) -> None:
    _check_count(total_name, total)
    _check_count(name, value)
    if value > total:
        raise ValueError(f"{name} must be at most {total_name} ({total}), got {value!r}")


def _check_nonempty_string(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string that is not empty, got {value!r}")


def _check_global_id(global_gpu_id: Any, endpoint_id: Any, local_gpu_id: Any) -> None:
    _check_nonempty_string("endpoint_id", endpoint_id)
    _check_count("local_gpu_id", local_gpu_id)
    expected = f"{endpoint_id}:{local_gpu_id}"
    if global_gpu_id != expected:
        raise ValueError(f"global_gpu_id must be endpoint_id:local_gpu_id ({expected!r}), got {global_gpu_id!r}")


def _check_percent(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 100:
        raise ValueError(f"{name} must be a number from 0 to 100, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
