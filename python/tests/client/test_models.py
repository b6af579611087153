"""Data classes reject invalid values with an error that names the field, the value and the allowed range."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gpu_worker_pool import (
    EndpointInfo,
    GlobalGPUAssignment,
    GlobalGPUInfo,
    GPUAssignment,
    GPUInfo,
    GPUStats,
    MultiEndpointPoolStatus,
    PoolStatus,
    WorkerInfo,
)

NOW = datetime(2026, 11, 18, 4, 0)


@pytest.mark.parametrize(
    ("model", "valid_values", "field", "invalid_value"),
    [
        (GPUInfo, (0, "H100", 12.5, 40), 0, -1),
        (GPUInfo, (0, "H100", 12.5, 40), 2, 100.5),
        (GPUInfo, (0, "H100", 12.5, 40), 3, "40"),
        (GPUStats, (0, 0, 0, 0.0, [], 0.0, "now"), 0, -1),
        (GPUStats, (0, 0, 0, 0.0, [], 0.0, "now"), 0, 2),
        (WorkerInfo, ("w",), 0, ""),
        (GPUAssignment, (0, "w", NOW), 0, True),
        (GPUAssignment, (0, "w", NOW), 1, ""),
        (GlobalGPUAssignment, ("a:1", "a", 1, "w", NOW), 0, "a:2"),
        (GlobalGPUAssignment, ("a:1", "a", 1, "w", NOW), 1, ""),
        (GlobalGPUAssignment, ("a:1", "a", 1, "w", NOW), 2, -1),
        (PoolStatus, (4, 2, 1, 0, {}), 0, -1),
        (PoolStatus, (4, 2, 1, 0, {}), 1, 5),
        (PoolStatus, (4, 2, 1, 0, {}), 2, -1),
        (PoolStatus, (4, 2, 1, 0, {}), 3, None),
        (MultiEndpointPoolStatus, (4, 2, 1, 0, {}, 2, 1, []), 1, 5),
        (MultiEndpointPoolStatus, (4, 2, 1, 0, {}, 2, 1, []), 6, 3),
        (EndpointInfo, ("a", "http://a", True, NOW, 4, 2, 1.5), 0, ""),
        (EndpointInfo, ("a", "http://a", True, NOW, 4, 2, 1.5), 1, None),
        (EndpointInfo, ("a", "http://a", True, NOW, 4, 2, 1.5), 5, 5),
        (EndpointInfo, ("a", "http://a", True, NOW, 4, 2, 1.5), 6, -1),
        (GlobalGPUInfo, ("a:1", "a", 1, "H100", 0.0, 0.0, True), 4, -5),
        (GlobalGPUInfo, ("a:1", "a", 1, "H100", 0.0, 0.0, True), 5, 500),
        (GlobalGPUInfo, ("a:1", "a", 1, "H100", 0.0, 0.0, True), 0, "a"),
    ],
)
def test_invalid_values_are_rejected(model: Any, valid_values: tuple[Any, ...], field: int, invalid_value: Any) -> None:
    assert model(*valid_values) == model(*valid_values)
    with pytest.raises(ValueError, match="must|is") as refused:
        model(*valid_values[:field], invalid_value, *valid_values[field + 1 :])
    assert repr(invalid_value) in str(refused.value)
