"""Convert data of the native client to the public models."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Dict, List, Optional, Union

from .models import MultiEndpointPoolStatus, PoolStatus, WorkerInfo


def to_pool_status(native_status: Dict[str, Any], is_multi: bool) -> PoolStatus:
    """Return the status of the pool."""
    gpu_counts = (native_status["total_gpus"], native_status["available_gpus"])
    worker_counts = (native_status["active_workers"], native_status["blocked_workers"])
    assignments = _to_assignments(native_status, is_multi)
    status: PoolStatus
    if is_multi:
        details = [to_endpoint(info) for info in native_status["endpoint_details"]]
        healthy = native_status["healthy_endpoints"]
        status = MultiEndpointPoolStatus(
            *gpu_counts, *worker_counts, assignments, native_status["total_endpoints"], healthy, details
        )
    else:
        status = PoolStatus(*gpu_counts, *worker_counts, assignments)
    status.authority = native_status["authority"]
    status.age_secs = native_status["age_secs"]
    return status


def to_metrics(metrics: Dict[str, Any], status: Dict[str, Any], is_multi: bool) -> Dict[str, Any]:
    """Return the detailed metrics, completed from the status."""
    assignments = _to_assignments(status, is_multi)
    metrics["gpu_assignments"] = {gpu: [worker.worker_id for worker in workers] for gpu, workers in assignments.items()}
    metrics["authority"] = status["authority"]
    metrics["age_secs"] = status["age_secs"]
    thresholds = metrics["thresholds"]
    thresholds["memory_threshold"] = thresholds["memory_threshold_percent"]
    thresholds["utilization_threshold"] = thresholds["utilization_threshold_percent"]
    return metrics


def to_endpoint(info: Dict[str, Any]) -> Dict[str, Any]:
    """Return the details of an endpoint, with `last_seen` as a `datetime`."""
    info["last_seen"] = _to_datetime(info["last_seen"])
    return info


def to_local_time(secs: float) -> datetime:
    """Return a Unix time as local time without an offset, as `datetime.now()` does."""
    return datetime.fromtimestamp(secs)


def _to_assignments(status: Dict[str, Any], is_multi: bool) -> Dict[Union[int, str], List[WorkerInfo]]:
    assignments: Dict[Union[int, str], List[WorkerInfo]] = {}
    for global_id, workers in status["gpu_assignments"].items():
        gpu = global_id if is_multi else int(global_id.rpartition(":")[2])
        infos = [WorkerInfo(worker["worker_id"], _to_datetime(worker["assigned_at"]), worker["lease"]) for worker in workers]
        assignments.setdefault(gpu, []).extend(infos)
    return assignments


def _to_datetime(time: Optional[Dict[str, int]]) -> Optional[datetime]:
    if time is None:
        return None
    return to_local_time(time["secs_since_epoch"] + time["nanos_since_epoch"] / 1e9)
