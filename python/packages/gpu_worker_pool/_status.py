"""From the native client's facts to the shapes programs know."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Dict, List, Optional, Union

from .models import MultiEndpointPoolStatus, PoolStatus, WorkerInfo


def pool_status(said: Dict[str, Any], is_multi: bool) -> PoolStatus:
    """How the pool stands."""
    counts = (said["total_gpus"], said["available_gpus"], said["active_workers"], said["blocked_workers"])
    assignments = _assignments(said, is_multi)
    status: PoolStatus
    if is_multi:
        details = [endpoint(info) for info in said["endpoint_details"]]
        healthy = said["healthy_endpoints"]
        status = MultiEndpointPoolStatus(*counts, assignments, said["total_endpoints"], healthy, details)
    else:
        status = PoolStatus(*counts, assignments)
    status.authority = said["authority"]
    status.age_secs = said["age_secs"]
    return status


def metrics(said: Dict[str, Any], status: Dict[str, Any], is_multi: bool) -> Dict[str, Any]:
    """Everything that is counted."""
    workers = _assignments(status, is_multi)
    said["gpu_assignments"] = {gpu: [worker.worker_id for worker in held] for gpu, held in workers.items()}
    said["authority"] = status["authority"]
    said["age_secs"] = status["age_secs"]
    thresholds = said["thresholds"]
    thresholds["memory_threshold"] = thresholds["memory_threshold_percent"]
    thresholds["utilization_threshold"] = thresholds["utilization_threshold_percent"]
    return said


def endpoint(info: Dict[str, Any]) -> Dict[str, Any]:
    """One server."""
    info["last_seen"] = _when(info["last_seen"])
    return info


def moment(secs: float) -> datetime:
    """Local time without an offset, as `datetime.now()` has it."""
    return datetime.fromtimestamp(secs)


def _assignments(said: Dict[str, Any], is_multi: bool) -> Dict[Union[int, str], List[WorkerInfo]]:
    held: Dict[Union[int, str], List[WorkerInfo]] = {}
    for global_id, workers in said["gpu_assignments"].items():
        gpu = global_id if is_multi else int(global_id.rpartition(":")[2])
        infos = [WorkerInfo(worker["worker_id"], _when(worker["assigned_at"]), worker["lease"]) for worker in workers]
        held.setdefault(gpu, []).extend(infos)
    return held


def _when(said: Optional[Dict[str, int]]) -> Optional[datetime]:
    if said is None:
        return None
    return moment(said["secs_since_epoch"] + said["nanos_since_epoch"] / 1e9)
