"""Configuration by environment and arguments, and the errors for invalid values."""

from __future__ import annotations

import inspect

import pytest

from gpu_worker_pool import ConfigurationError, GPUWorkerPoolClient
from gpu_worker_pool.config import ConfigurationManager, EnvironmentConfigurationManager


def test_the_constructor_has_the_documented_arguments_in_their_order() -> None:
    parameters = inspect.signature(GPUWorkerPoolClient).parameters
    documented = {
        "service_endpoint": None,
        "service_endpoints": None,
        "load_balancing_strategy": None,
        "memory_threshold": None,
        "utilization_threshold": None,
        "polling_interval": None,
        "worker_timeout": 300.0,
        "request_timeout": 30.0,
    }
    assert list(parameters)[: len(documented)] == list(documented)
    assert {name: parameters[name].default for name in documented} == documented
    ours = list(parameters.values())[len(documented) :]
    assert ours and all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in ours)


def test_defaults_are_the_documented_ones(monkeypatch) -> None:
    manager = ConfigurationManager()
    assert manager.get_service_endpoint() == "http://localhost:8000"
    assert (manager.get_memory_threshold(), manager.get_utilization_threshold()) == (80.0, 90.0)
    assert manager.get_polling_interval() == 5 and isinstance(manager.get_polling_interval(), int)
    assert manager.get_load_balancing_strategy() == "availability"
    assert manager.get_endpoint_timeout() == 10.0
    assert manager.get_endpoint_max_retries() == 3
    assert manager.get_endpoint_health_check_interval() == 30.0
    assert not manager.is_multi_endpoint_mode() and manager.warnings == []


def test_the_endpoint_list_is_cleaned_and_overrides_the_single_endpoint(monkeypatch) -> None:
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", "http://one:1")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINTS", " http://a:1/ ,, http://b:2,http://a:1")
    assert ConfigurationManager().get_service_endpoints() == ["http://a:1", "http://b:2"]
    monkeypatch.setenv("GPU_STATS_SERVICE_ENDPOINTS", "http://c:3")
    manager = EnvironmentConfigurationManager()
    assert manager.get_service_endpoints() == ["http://c:3"] and not manager.is_multi_endpoint_mode()
    assert not GPUWorkerPoolClient().is_multi_endpoint_mode()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("GPU_MEMORY_THRESHOLD_PERCENT", "101", "0"),
        ("GPU_UTILIZATION_THRESHOLD_PERCENT", "much", "100"),
        ("GPU_POLLING_INTERVAL", "0", "0.05"),
        ("GPU_POLLING_INTERVAL_SECONDS", "soon", "seconds"),
        ("GPU_LOAD_BALANCING_STRATEGY", "luck", "round_robin"),
        ("GPU_ENDPOINT_TIMEOUT", "-1", "seconds"),
        ("GPU_ENDPOINT_MAX_RETRIES", "1.5", "100"),
        ("GPU_SERVICE_ENDPOINT", "gpu1:8000", "http"),
    ],
)
def test_an_invalid_variable_is_named_with_its_value_and_range(
    monkeypatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    for made in (GPUWorkerPoolClient, ConfigurationManager):
        with pytest.raises(ConfigurationError) as raised:
            made()
        text = str(raised.value)
        assert name in text and value in text and expected in text, text
        assert isinstance(raised.value, ValueError)
    manager = ConfigurationManager(strict=False)
    assert any(name in warning for warning in manager.warnings)
    assert manager.get_memory_threshold() == 80.0


def test_arguments_override_even_an_invalid_environment(monkeypatch) -> None:
    monkeypatch.setenv("GPU_MEMORY_THRESHOLD_PERCENT", "much")
    monkeypatch.setenv("GPU_SERVICE_ENDPOINT", "nonsense")
    monkeypatch.setenv("GPU_LOAD_BALANCING_STRATEGY", "luck")
    GPUWorkerPoolClient("http://a:1", memory_threshold=70, load_balancing_strategy="weighted")


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"memory_threshold": 150}, ValueError, ["memory_threshold", "150", "0 to 100"]),
        ({"utilization_threshold": -1.0}, ValueError, ["utilization_threshold", "-1", "0 to 100"]),
        ({"memory_threshold": "80"}, TypeError, ["memory_threshold", "'80'", "number"]),
        ({"service_endpoint": "gpu-server:8000"}, ValueError, ["gpu-server:8000", "http://gpu-server:8000"]),
        ({"service_endpoint": "ftp://gpu"}, ValueError, ["ftp://gpu", "scheme"]),
        ({"service_endpoint": 8000}, TypeError, ["service_endpoint", "8000", "str"]),
        ({"service_endpoints": " , "}, ValueError, ["service_endpoints", "empty"]),
        ({"service_endpoints": "http://a:1,b:2"}, ValueError, ["b:2", "http://"]),
        ({"load_balancing_strategy": "random"}, ValueError, ["random", "round_robin"]),
        ({"polling_interval": 0}, ValueError, ["polling_interval", "0.01"]),
        ({"polling_interval": float("nan")}, ValueError, ["polling_interval", "NaN"]),
        ({"worker_timeout": -5}, ValueError, ["worker_timeout", "-5"]),
        ({"request_timeout": 0}, ValueError, ["request_timeout", "0.01"]),
        ({"max_retries": 1.5}, ValueError, ["max_retries", "1.5"]),
        ({"ca_file": "/nowhere/ca.pem", "service_endpoint": "https://a"}, ValueError, ["/nowhere/ca.pem"]),
    ],
)
def test_an_invalid_argument_is_named(arguments, error, expected) -> None:
    with pytest.raises(error) as raised:
        GPUWorkerPoolClient(**arguments)
    assert all(word in str(raised.value) for word in expected), str(raised.value)


def test_whole_numbers_and_lists_are_accepted() -> None:
    client = GPUWorkerPoolClient(
        service_endpoints=["http://a:1", "http://b:2"],  # type: ignore[arg-type]
        memory_threshold=70,
        polling_interval=3,
        worker_timeout=60,
        request_timeout=10,
    )
    assert client.is_multi_endpoint_mode()
