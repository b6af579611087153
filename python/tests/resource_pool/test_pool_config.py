"""What a pool may be."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest
from gpupool.resource_pool import ResourceConfig, ResourcePool


def test_it_is_a_dataclass_with_the_fields_programs_know() -> None:
    config = ResourceConfig(2, 5, 512)
    assert is_dataclass(config)
    assert (config.max_workers, config.worker_timeout_secs, config.worker_memory_mb) == (2, 5, 512)
    assert config.devices == ["cpu"]
    assert ResourceConfig(max_workers=1, worker_timeout_secs=1, worker_memory_mb=1, devices=["cuda:0"]).devices == ["cuda:0"]
    assert config.devices is not ResourceConfig(2, 5, 512).devices


@pytest.mark.parametrize(
    ("values", "says"),
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
def test_what_cannot_be_is_named_with_what_can(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        ResourceConfig(**values)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_workers": 10**12}, "max_workers must be at most 4096, got 4294967295"),
        ({"worker_timeout_secs": 1e300}, "worker_timeout_secs must be at most 315360000"),
    ],
)
def test_what_no_machine_has_is_refused_by_the_pool(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ResourcePool(ResourceConfig(**values))


def test_a_config_that_was_spoilt_later_makes_no_pool() -> None:
    config = ResourceConfig()
    config.max_workers = 0
    with pytest.raises(ValueError, match="max_workers must be positive, got 0"):
        ResourcePool(config)


def test_an_audit_file_that_cannot_be_written_makes_no_pool() -> None:
    with pytest.raises(OSError, match="/nowhere/audit"):
        ResourcePool(ResourceConfig(audit_file="/nowhere/audit"))
