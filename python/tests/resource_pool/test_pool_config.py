"""Configuration of resource pools."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest
from gpupool.resource_pool import ResourceConfig, ResourcePool


def test_the_config_is_a_dataclass_with_the_documented_fields() -> None:
    config = ResourceConfig(2, 5, 512)
    assert is_dataclass(config)
    assert (config.max_workers, config.worker_timeout_secs, config.worker_memory_mb) == (2, 5, 512)
    assert config.devices == ["cpu"]
    assert ResourceConfig(max_workers=1, worker_timeout_secs=1, worker_memory_mb=1, devices=["cuda:0"]).devices == ["cuda:0"]
    assert config.devices is not ResourceConfig(2, 5, 512).devices


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_workers": 0}, "max_workers must be positive, got 0"),
        ({"max_workers": -3}, "max_workers must be positive, got -3"),
        ({"worker_timeout_secs": 0}, "worker_timeout_secs must be positive, got 0"),
        ({"worker_timeout_secs": float("nan")}, "worker_timeout_secs must be positive, got nan"),
        ({"worker_memory_mb": -1}, "worker_memory_mb must be positive, got -1"),
        ({"max_workers": 1.5}, "max_workers must be a whole number, got 1.5"),
        ({"max_workers": "4"}, "max_workers must be a number, got '4'"),
        ({"max_workers": float("inf")}, "max_workers must be a whole number, got inf"),
        ({"max_workers": None}, "max_workers must be a number, got None"),
        ({"min_workers": 9}, "min_workers must be at most max_workers (4), got 9"),
        ({"acquire_timeout_secs": 0}, "acquire_timeout_secs must be positive, got 0"),
        ({"worker_processes": 0}, "worker_processes must be positive, got 0"),
        ({"devices": []}, "devices must have at least one name, got []"),
        ({"devices": [0]}, "devices must have at least one name, got [0]"),
        ({"devices": "cuda:0"}, "devices must be a list of names, or 'auto' for leased GPUs, got 'cuda:0'"),
    ],
)
def test_an_invalid_config_value_is_named_with_the_allowed_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        ResourceConfig(**values)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_workers": 10**12}, "max_workers must be at most 4096, got 4294967295"),
        ({"worker_timeout_secs": 1e300}, "worker_timeout_secs must be at most 315360000"),
    ],
)
def test_values_above_the_native_limits_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResourcePool(ResourceConfig(**values))


def test_a_config_made_invalid_later_is_rejected() -> None:
    config = ResourceConfig()
    config.max_workers = 0
    with pytest.raises(ValueError, match="max_workers must be positive, got 0"):
        ResourcePool(config)


def test_an_unwritable_audit_file_is_rejected() -> None:
    with pytest.raises(OSError, match="/nowhere/audit"):
        ResourcePool(ResourceConfig(audit_file="/nowhere/audit"))
