"""What a resource pool is to be."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Callable, List, Optional, Union

#: Numbers above this are refused by the pool itself, which then says what is allowed.
_MOST = 2**32 - 1


@dataclass
class ResourceConfig:
    """What a resource pool is to be; a value that cannot be is a `ValueError` that names it.

    The first four are all most programs need. Worker i works on `devices[i % len(devices)]`; with `"auto"` each worker
    has a GPU of its own, leased from the agent of this machine.
    """

    max_workers: int = 4
    #: How long a worker may be held.
    worker_timeout_secs: float = 300
    #: MiB of host memory a worker may use, with everything it starts. None: as much as there is.
    worker_memory_mb: Optional[float] = 2048
    devices: Union[List[str], str] = field(default_factory=lambda: ["cpu"])
    #: Workers there are also when nobody wants one; as many as `max_workers`, unless said.
    min_workers: Optional[int] = None
    #: How long somebody waits for a worker.
    acquire_timeout_secs: float = 30
    #: Processes and threads a worker may have at one time.
    worker_processes: Optional[int] = None
    #: Processor time of one hold.
    worker_cpu_secs: Optional[float] = None
    #: How long a worker above `min_workers` may idle.
    idle_secs: float = 60
    #: How long a worker may take to start.
    setup_timeout_secs: float = 300
    #: How long a worker may take to finish what it is at when the pool is shut down.
    clean_up_timeout_secs: float = 30
    #: A file to which the audit trail is appended.
    audit_file: Union[str, "os.PathLike[str]", None] = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuses what cannot be."""
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
            raise ValueError(f"devices must be one name or more, got {devices!r}")

    def _wish(self) -> dict[str, object]:
        """As the native module wants it."""
        least = self.max_workers if self.min_workers is None else self.min_workers
        memory, processes = self.worker_memory_mb, self.worker_processes
        return {
            "max_workers": min(int(self.max_workers), _MOST),
            "min_workers": min(int(least), _MOST),
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


def _require(name: str, value: object, allowed: str, is_so: Callable[[float], bool]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not is_so(value):
        raise ValueError(f"{name} must be {allowed}, got {value}")
