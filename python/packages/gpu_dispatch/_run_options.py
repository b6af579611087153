"""Options of a run and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, Optional, Sequence, Union


@dataclass
class RunOptions:
    """Options of a native run; the native module reads them by name."""

    program: list[str]
    environment: dict[str, str]
    settings: str
    helper: str
    by_value: bool
    shares_memory: bool
    places: list[tuple[int, list[int], dict[str, str]]]
    queue_size: int
    task_timeout: Optional[float]
    grace: float
    retries: int
    output: str
    tell_started: bool
    joblog: Optional[str]
    name: str
    gpus: Optional[tuple[Optional[int], int]]


def checked_gpu_ids(gpu_ids: Union[Sequence[int], str]) -> tuple[list[int], Optional[int]]:
    """Return the GPU numbers and `None`, or an empty list and the number of GPUs to lease (0 for all free ones)."""
    if isinstance(gpu_ids, str):
        word, _, count = gpu_ids.partition(":")
        if word != "auto" or (count and not (count.isdigit() and int(count) > 0)):
            raise ValueError(f"gpu_ids must be GPU numbers, 'auto' or 'auto:COUNT', got {gpu_ids!r}")
        return [], int(count or 0)
    ids = [_checked_gpu_id(gpu_id) for gpu_id in gpu_ids]
    if not ids:
        raise ValueError("gpu_ids cannot be empty")
    return ids, None


def visible_gpu_environment(gpu_id: int) -> dict[str, str]:
    """Return the environment that makes only one GPU visible, for either vendor."""
    return {"CUDA_VISIBLE_DEVICES": str(gpu_id), "HIP_VISIBLE_DEVICES": str(gpu_id)}


def _checked_gpu_id(gpu_id: Any) -> int:
    try:
        number = -1 if isinstance(gpu_id, bool) else index(gpu_id)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"gpu_ids must be GPU numbers, 0 or more, got {gpu_id!r}")
    return number


def checked_timeout(value: Any) -> Optional[float]:
    if value is None:
        return None
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"task_timeout must be a number of seconds or None, got {value!r} ({type(value).__name__})")
    return float(value)


def checked_count(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be a whole number, {minimum} or more, got {value!r}")
    return value
