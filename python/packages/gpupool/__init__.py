"""Share GPUs fairly and safely.

`with gpupool.lease(fraction=0.5) as gpu:` leases half a GPU for the block; `gpupool.status()` returns the pool's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._native import __version__

if TYPE_CHECKING:
    from . import errors, resource_pool
    from ._lease import Lease, LeaseBlock, lease, status
    from .errors import (
        CircuitBreakerOpenError,
        ConfigurationError,
        GpupoolError,
        NoCapacityError,
        NotAllowedError,
        RequestRefusedError,
        ServiceUnavailableError,
        StaleAssignmentError,
        WorkerTimeoutError,
    )

__all__ = [
    "CircuitBreakerOpenError",
    "ConfigurationError",
    "GpupoolError",
    "Lease",
    "LeaseBlock",
    "NoCapacityError",
    "NotAllowedError",
    "RequestRefusedError",
    "ServiceUnavailableError",
    "StaleAssignmentError",
    "WorkerTimeoutError",
    "__version__",
    "errors",
    "lease",
    "resource_pool",
    "status",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: a worker process needs none of these modules and starts faster without them.
    from importlib import import_module

    if name in ("errors", "resource_pool"):
        return import_module(f"{__name__}.{name}")
    for module in ("_lease", "errors"):
        value = getattr(import_module(f"{__name__}.{module}"), name, None) if name in __all__ else None
        if value is not None:
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
