"""Configuration of a resource pool."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Callable, List, Optional, Union

#: Larger counts are reduced to this; the native pool rejects it with a message that states its limit.
_UINT32_MAX = 2**32 - 1


@dataclass
class ResourceConfig:
    """Configuration of a resource pool; an invalid value raises a `ValueError` that names it.

    Most programs need only the first four fields. Worker i uses `devices[i % len(devices)]`; with `"auto"`, each worker
    leases its own GPU from the agent of this machine.
    """

    max_workers: int = 4
    #: Maximum time for which a task may use a worker.
    worker_timeout_secs: float = 300
    #: Maximum host memory in MiB of a worker and all processes it starts; `None` means unlimited.
    worker_memory_mb: Optional[float] = 2048
    devices: Union[List[str], str] = field(default_factory=lambda: ["cpu"])
    #: Workers that the pool keeps running while idle; `None` means `max_workers`.
    min_workers: Optional[int] = None
    #: Maximum wait for a worker.
    acquire_timeout_secs: float = 30
    #: Maximum number of processes and threads of a worker at one time.
    worker_processes: Optional[int] = None
    #: Maximum CPU time of a worker during one task.
    worker_cpu_secs: Optional[float] = None
    #: Idle time after which a worker above `min_workers` ends.
    idle_secs: float = 60
    #: Maximum time for the start of a worker.
    setup_timeout_secs: float = 300
    #: Maximum time for a worker to finish its current work when the pool shuts down.
    clean_up_timeout_secs: float = 30
    #: File to which the pool appends its audit trail.
    audit_file: Union[str, "os.PathLike[str]", None] = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise a `ValueError` if a value is invalid."""
        for name in ("max_workers", "worker_timeout_secs", "worker_memory_mb", "acquire_timeout_secs",
                     "worker_processes", "worker_cpu_secs", "setup_timeout_secs"):  # fmt: skip
            _require(name, getattr(self, name), "positive", lambda value: value > 0)
        for name in ("min_workers", "idle_secs", "clean_up_timeout_secs"):
            _require(name, getattr(self, name), "0 or more", lambda value: value >= 0)
        for name in ("max_workers", "min_workers", "worker_processes"):
            _require(name, getattr(self, name), "a whole number", lambda value: value % 1 == 0)
        if self.min_workers is not None and self.min_workers > self.max_workers:
            raise ValueError(f"min_workers must be at most max_workers ({self.max_workers}), got {self.min_workers}")
        for name in ("max_workers", "worker_timeout_secs", "acquire_timeout_secs", "idle_secs",
                     "setup_timeout_secs", "clean_up_timeout_secs"):  # fmt: skip
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a number, got None")
        self._check_devices()

    def _check_devices(self) -> None:
        devices = self.devices
        if isinstance(devices, str):
            if devices != "auto":
                raise ValueError(f"devices must be a list of names, or 'auto' for leased GPUs, got {devices!r}")
            return
        names = list(devices)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"devices must have at least one name, got {devices!r}")

    def _native_settings(self) -> dict[str, object]:
        """Return the settings of the native pool."""
        min_workers = self.max_workers if self.min_workers is None else self.min_workers
        memory, processes = self.worker_memory_mb, self.worker_processes
        return {
            "max_workers": min(int(self.max_workers), _UINT32_MAX),
            "min_workers": min(int(min_workers), _UINT32_MAX),
            "worker_timeout_secs": float(self.worker_timeout_secs),
            "worker_memory_bytes": None if memory is None else int(memory * 2**20),
            "worker_processes": None if processes is None else int(processes),
            "worker_cpu_secs": None if self.worker_cpu_secs is None else float(self.worker_cpu_secs),
            "devices": ["cpu"] if self.devices == "auto" else list(self.devices),
            "leases_gpus": self.devices == "auto",
            "acquire_timeout_secs": float(self.acquire_timeout_secs),
            "idle_secs": float(self.idle_secs),
            "setup_timeout_secs": float(self.setup_timeout_secs),
            "clean_up_timeout_secs": float(self.clean_up_timeout_secs),
            "audit_file": None if self.audit_file is None else os.fspath(self.audit_file),
        }


def _require(name: str, value: object, allowed: str, is_valid: Callable[[float], bool]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not is_valid(value):
        raise ValueError(f"{name} must be {allowed}, got {value}")
