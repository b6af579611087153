"""Shares GPUs fairly and safely.

`with gpupool.lease(fraction=0.5) as gpu:` holds half a GPU for the block; `gpupool.status()` says how the pool stands.
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
    # Loaded when first asked for: a worker process needs none of it, and starts sooner.
    from importlib import import_module

    if name in ("errors", "resource_pool"):
        return import_module(f"{__name__}.{name}")
    for module in ("_lease", "errors"):
        found = getattr(import_module(f"{__name__}.{module}"), name, None) if name in __all__ else None
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
