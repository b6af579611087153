"""What the client gives back: plain data classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Dict, List, Optional, Union


@dataclass
class GPUInfo:
    """A GPU as it was last seen."""

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
    """All GPUs of a server, as it last told."""

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
    """Who holds a GPU, since when, and under which number of a lease."""

    worker_id: str
    assigned_at: Optional[datetime] = None
    lease: Optional[int] = None

    def __post_init__(self) -> None:
        _check_text("worker_id", self.worker_id)


@dataclass
class GPUAssignment:
    """A GPU that a worker holds."""

    gpu_id: int
    worker_id: str
    assigned_at: datetime

    def __post_init__(self) -> None:
        _check_count("gpu_id", self.gpu_id)
        _check_text("worker_id", self.worker_id)


@dataclass(init=False)
class GlobalGPUAssignment(GPUAssignment):
    """A GPU of one of several servers; `gpu_id` is `local_gpu_id`, so it can stand wherever a `GPUAssignment` can."""

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
    """How the pool stands. `gpu_assignments` says which workers of this client hold what, by the id of the GPU."""

    total_gpus: int
    available_gpus: int
    active_workers: int
    blocked_workers: int
    gpu_assignments: Dict[Any, List[WorkerInfo]]
    #: Who decides: `agent`, `client` (the server only has statistics), `mixed` or `unknown`.
    authority: str = field(default="unknown", init=False)
    #: Seconds since what this is made from was seen; `None` where nothing was.
    age_secs: Optional[float] = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        _check_part("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        _check_count("active_workers", self.active_workers)
        _check_count("blocked_workers", self.blocked_workers)


@dataclass
class MultiEndpointPoolStatus(PoolStatus):
    """How the pool of several servers stands."""

    total_endpoints: int
    healthy_endpoints: int
    endpoint_details: List[Dict[str, Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_part("healthy_endpoints", self.healthy_endpoints, "total_endpoints", self.total_endpoints)


@dataclass
class EndpointInfo:
    """A server."""

    endpoint_id: str
    url: str
    is_healthy: bool
    last_seen: Optional[datetime]
    total_gpus: int
    available_gpus: int
    response_time_ms: float

    def __post_init__(self) -> None:
        _check_text("endpoint_id", self.endpoint_id)
        _check_text("url", self.url)
        _check_part("available_gpus", self.available_gpus, "total_gpus", self.total_gpus)
        if not _is_number(self.response_time_ms) or not self.response_time_ms >= 0:
            raise ValueError(f"response_time_ms must be a number that is not negative, got {self.response_time_ms!r}")


@dataclass
class GlobalGPUInfo:
    """A GPU among those of all servers."""

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


#: What `request_gpu` gives back.
Assignment = Union[GPUAssignment, GlobalGPUAssignment]


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number that is not negative, got {value!r}")


def _check_part(name: str, value: Any, name_of_all: str, of_all: Any) -> None:
    _check_count(name_of_all, of_all)
    _check_count(name, value)
    if value > of_all:
        raise ValueError(f"{name} must not be more than {name_of_all} ({of_all}), got {value!r}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, got {value!r}")


def _check_global_id(global_gpu_id: Any, endpoint_id: Any, local_gpu_id: Any) -> None:
    _check_text("endpoint_id", endpoint_id)
    _check_count("local_gpu_id", local_gpu_id)
    expected = f"{endpoint_id}:{local_gpu_id}"
    if global_gpu_id != expected:
        raise ValueError(f"global_gpu_id must be endpoint_id:local_gpu_id, so {expected!r}, got {global_gpu_id!r}")


def _check_percent(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 100:
        raise ValueError(f"{name} must be a number from 0 to 100, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
