"""Client settings for common situations, configuration by environment, and errors for invalid values.

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
    "development: distribute over all servers, short timeout": {
        "service_endpoints": "http://gpu-dev-1:8000,http://gpu-dev-2:8000",
        "load_balancing_strategy": "round_robin",
        "worker_timeout": 60.0,
        "polling_interval": 2,
    },
    "batch: servers of different sizes, 30 minutes timeout": {
        "service_endpoints": "http://big:8000,http://small:8000",
        "load_balancing_strategy": "weighted",
        "memory_threshold": 85.0,
        "worker_timeout": 1800.0,
    },
    "edge: slow networks": {
        "service_endpoints": "http://edge-1:8000,http://cloud:8000",
        "request_timeout": 15.0,
        "max_retries": 5,
    },
    "one server, over https, with a token": {
        "service_endpoint": "https://gpu.example.com",
        "token": "create it with: gpupool token create --owner me",
    },
}

MISTAKES: Dict[str, Dict[str, Any]] = {
    "no scheme": {"service_endpoint": "gpu1:8000"},
    "threshold above 100": {"memory_threshold": 120},
    "string instead of a number": {"utilization_threshold": "90"},
    "unknown strategy": {"service_endpoints": "http://a:1,http://b:1", "load_balancing_strategy": "luck"},
}


def main() -> None:
    for situation, settings in SITUATIONS.items():
        # The client connects when it starts, so this needs no server.
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
        print(f"invalid variable: {error}")
    lenient = ConfigurationManager(strict=False)
    print(f"warnings: {lenient.warnings}; default used instead: {lenient.get_memory_threshold()}")


if __name__ == "__main__":
    main()
