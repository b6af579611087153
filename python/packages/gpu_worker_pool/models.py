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
        _check_gpu_id("gpu_id", self.gpu_id)
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


@dataclass
class GPUAssignment:
    """A GPU that a worker holds."""

    gpu_id: int
    worker_id: str
    assigned_at: datetime

    def __post_init__(self) -> None:
        _check_gpu_id("gpu_id", self.gpu_id)
        if not isinstance(self.worker_id, str) or not self.worker_id:
            raise ValueError(f"worker_id must be a text that is not empty, got {self.worker_id!r}")


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


@dataclass
class MultiEndpointPoolStatus(PoolStatus):
    """How the pool of several servers stands."""

    total_endpoints: int
    healthy_endpoints: int
    endpoint_details: List[Dict[str, Any]]


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


#: What `request_gpu` gives back.
Assignment = Union[GPUAssignment, GlobalGPUAssignment]


def _check_gpu_id(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number that is not negative, got {value!r}")


def _check_percent(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise ValueError(f"{name} must be a number from 0 to 100, got {value!r}")
