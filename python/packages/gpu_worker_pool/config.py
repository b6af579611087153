"""Client configuration from the environment; an invalid value raises an error that names it."""

from __future__ import annotations

from typing import Any, Dict, List

from gpupool import _native

__all__ = ["ConfigurationManager", "EnvironmentConfigurationManager"]


class ConfigurationManager:
    """Configuration from the variables and from section `[client]` of `gpupool.toml`, read once by the constructor.

    An invalid value raises `ConfigurationError`. With `strict=False`, `warnings` lists it and its default applies instead.
    """

    def __init__(self, strict: bool = True) -> None:
        self._settings: Dict[str, Any] = _native.client_settings(not strict)

    @property
    def warnings(self) -> List[str]:
        """Warnings about invalid values that were ignored."""
        return list(self._settings["warnings"])

    def get_service_endpoint(self) -> str:
        """Return the URL of the server, or of the first if there are several."""
        return str(self._settings["endpoints"][0])

    def get_service_endpoints(self) -> List[str]:
        """Return the URLs of all servers."""
        return list(self._settings["endpoints"])

    def is_multi_endpoint_mode(self) -> bool:
        """Return whether several servers are configured."""
        return len(self._settings["endpoints"]) > 1

    def get_memory_threshold(self) -> float:
        """Return the memory usage in percent at which a GPU stops being available."""
        return float(self._settings["memory_threshold"])

    def get_utilization_threshold(self) -> float:
        """Return the utilization in percent at which a GPU stops being available."""
        return float(self._settings["utilization_threshold"])

    def get_polling_interval(self) -> float:
        """Return the seconds between two polls of the statistics."""
        return _int_if_whole(self._settings["polling_interval"])

    def get_load_balancing_strategy(self) -> str:
        """Return the strategy that selects one of several servers."""
        return str(self._settings["load_balancing_strategy"])

    def get_endpoint_timeout(self) -> float:
        """Return the timeout of one HTTP request in seconds."""
        return float(self._settings["endpoint_timeout"])

    def get_endpoint_max_retries(self) -> int:
        """Return the number of retries of a request that failed on all servers."""
        return int(self._settings["endpoint_max_retries"])

    def get_endpoint_health_check_interval(self) -> float:
        """Return the seconds between two health checks of a server."""
        return float(self._settings["endpoint_health_check_interval"])


def _int_if_whole(value: float) -> float:
    return int(value) if value == int(value) else value


class EnvironmentConfigurationManager(ConfigurationManager):
    """Alias of `ConfigurationManager` for existing programs."""
