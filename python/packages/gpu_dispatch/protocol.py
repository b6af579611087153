"""What becomes of tasks and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional


@dataclass
class TaskSuccess:
    """A task was done."""

    task_id: int
    data: Any
    worker_id: Optional[int] = None


@dataclass
class TaskError:
    """A task failed; `error` is a traceback, or how its worker died."""

    task_id: int
    error: str
    worker_id: Optional[int] = None


@dataclass
class TaskTimeout:
    """A task took longer than it may."""

    task_id: int
    timeout: float
    worker_id: Optional[int] = None


@dataclass
class TaskStarted:
    """A worker works on a task."""

    task_id: int
    worker_id: Optional[int] = None


@dataclass
class SetupFailed:
    """A worker could not be set up."""

    gpu_id: int
    error: str


@dataclass
class CleanupFailed:
    """A worker could not clean up. No task is lost by that."""

    gpu_id: int
    error: str
