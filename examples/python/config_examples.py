"""Settings for common situations, what the environment says, and how mistakes are told.

    python examples/python/config_examples.py
"""

from __future__ import annotations

import os
from typing import Any, Dict

from gpu_worker_pool import ConfigurationError, GPUWorkerPoolClient
from gpu_worker_pool.config import ConfigurationManager

SITUATIONS: Dict[str, Dict[str, Any]] = {
    "production: leave room on each GPU, wait long": {
        "service_endpoints": "http://gpu-prod-1:8000,http://gpu-prod-2:8000",
        "load_balancing_strategy": "availability",
        "memory_threshold": 70.0,
        "utilization_threshold": 80.0,
        "worker_timeout": 600.0,
    },
    "development: spread over what there is, fail soon": {
        "service_endpoints": "http://gpu-dev-1:8000,http://gpu-dev-2:8000",
        "load_balancing_strategy": "round_robin",
        "worker_timeout": 60.0,
        "polling_interval": 2,
    },
    "batch: servers of different size, half an hour of patience": {
        "service_endpoints": "http://big:8000,http://small:8000",
        "load_balancing_strategy": "weighted",
        "memory_threshold": 85.0,
        "worker_timeout": 1800.0,
    },
    "edge: close servers first seen, slow networks forgiven": {
        "service_endpoints": "http://edge-1:8000,http://cloud:8000",
        "request_timeout": 15.0,
        "max_retries": 5,
    },
    "one server, over https, with a token": {
        "service_endpoint": "https://gpu.example.com",
        "token": "made with: gpupool token create --owner me",
    },
}

MISTAKES: Dict[str, Dict[str, Any]] = {
    "no scheme": {"service_endpoint": "gpu1:8000"},
    "more than all": {"memory_threshold": 120},
    "a text for a number": {"utilization_threshold": "90"},
    "a strategy nobody knows": {"service_endpoints": "http://a:1,http://b:1", "load_balancing_strategy": "luck"},
}


def main() -> None:
    for situation, settings in SITUATIONS.items():
        # Nothing is asked before it is started, so this needs no server.
        client = GPUWorkerPoolClient(**settings)
        print(f"{situation}: {'several servers' if client.is_multi_endpoint_mode() else 'one server'}")

    for mistake, settings in MISTAKES.items():
        try:
            GPUWorkerPoolClient(**settings)
        except ConfigurationError as error:
            print(f"{mistake}: {error}")

    os.environ["GPU_MEMORY_THRESHOLD_PERCENT"] = "seventy"
    try:
        ConfigurationManager()
    except ConfigurationError as error:
        print(f"a variable that is wrong: {error}")
    lenient = ConfigurationManager(strict=False)
    print(f"only warned of: {lenient.warnings}; used instead: {lenient.get_memory_threshold()}")


if __name__ == "__main__":
    main()
