"""What the environment says to clients, checked: a value that cannot be used is an error that names it."""

from __future__ import annotations

from typing import Any, Dict, List

from gpupool import _native

__all__ = ["ConfigurationManager", "EnvironmentConfigurationManager"]


class ConfigurationManager:
    """Reads the variables (and the section `[client]` of `gpupool.toml`) once, when it is made.

    A value that cannot be used raises `ConfigurationError`. With `strict=False` it is a line in `warnings`, and the default
    counts in its place.
    """

    def __init__(self, strict: bool = True) -> None:
        self._said: Dict[str, Any] = _native.client_settings(not strict)

    @property
    def warnings(self) -> List[str]:
        """What was wrong and is left out."""
        return list(self._said["warnings"])

    def get_service_endpoint(self) -> str:
        """The server to ask; the first one where there are several."""
        return str(self._said["endpoints"][0])

    def get_service_endpoints(self) -> List[str]:
        """All servers to ask."""
        return list(self._said["endpoints"])

    def is_multi_endpoint_mode(self) -> bool:
        """Whether several servers are named."""
        return len(self._said["endpoints"]) > 1

    def get_memory_threshold(self) -> float:
        """Memory in use, in percent, from which on a GPU does not do."""
        return float(self._said["memory_threshold"])

    def get_utilization_threshold(self) -> float:
        """Utilization in percent from which on a GPU does not do."""
        return float(self._said["utilization_threshold"])

    def get_polling_interval(self) -> float:
        """Seconds between two looks at the statistics."""
        return _whole(self._said["polling_interval"])

    def get_load_balancing_strategy(self) -> str:
        """How one of several servers is chosen."""
        return str(self._said["load_balancing_strategy"])

    def get_endpoint_timeout(self) -> float:
        """Seconds an answer may take."""
        return float(self._said["endpoint_timeout"])

    def get_endpoint_max_retries(self) -> int:
        """How often a request that failed everywhere is tried again."""
        return int(self._said["endpoint_max_retries"])

    def get_endpoint_health_check_interval(self) -> float:
        """Seconds between two looks at the health of a server."""
        return float(self._said["endpoint_health_check_interval"])


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


class EnvironmentConfigurationManager(ConfigurationManager):
    """The same, under the name some programs know it by."""
