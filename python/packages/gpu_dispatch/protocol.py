"""Messages about tasks and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional


@dataclass
class TaskSuccess:
    """A task succeeded."""

    task_id: int
    data: Any
    worker_id: Optional[int] = None


@dataclass
class TaskError:
    """A task failed; `error` is the traceback, or the reason why the worker died."""

    task_id: int
    error: str
    worker_id: Optional[int] = None


@dataclass
class TaskTimeout:
    """A task exceeded its timeout."""

    task_id: int
    timeout: float
    worker_id: Optional[int] = None


@dataclass
class TaskStarted:
    """A worker started a task."""

    task_id: int
    worker_id: Optional[int] = None


@dataclass
class SetupFailed:
    """The setup of a worker failed."""

    gpu_id: int
    error: str


@dataclass
class CleanupFailed:
    """The cleanup of a worker failed. This loses no task."""

    gpu_id: int
    error: str
