"""Convert arguments of Python calls to settings and requests of the native client."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional

from .errors import ConfigurationError

#: Settings of a client; for `None`, the environment or the default applies.
SETTING_NAMES = (
    "service_endpoint",
    "service_endpoints",
    "load_balancing_strategy",
    "memory_threshold",
    "utilization_threshold",
    "polling_interval",
    "worker_timeout",
    "request_timeout",
    "usual_request_timeout",
    "health_check_interval",
    "max_retries",
    "stale_age",
    "token",
    "ca_file",
    "proxy",
)
STRING_SETTINGS = ("service_endpoint", "service_endpoints", "load_balancing_strategy", "token", "proxy")


def build_client_settings(*, prefers_socket: bool = False, **arguments: Any) -> Dict[str, Any]:
    """Return the settings of a native client. Raise an error that names an argument that is invalid."""
    settings: Dict[str, Any] = dict.fromkeys(SETTING_NAMES)
    settings["prefers_socket"] = prefers_socket
    for name, value in arguments.items():
        if value is None:
            continue
        if name in STRING_SETTINGS:
            settings[name] = _checked_string(name, value)
        elif name == "ca_file":
            settings[name] = value
        elif name == "max_retries":
            settings[name] = _checked_count(name, value)
        else:
            settings[name] = checked_number(name, value)
    return settings


def build_request(timeout: Optional[float], arguments: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the request body for these arguments, without those that are `None`."""
    request = {name: value for name, value in arguments.items() if value is not None}
    if timeout is not None:
        request["wait_limit_secs"] = checked_seconds("timeout", timeout)
    return request


def checked_seconds(name: str, value: Any) -> float:
    """Return the value as seconds; raise an error if it is negative or not a number."""
    secs = checked_number(name, value)
    if not secs >= 0:
        raise ConfigurationError(f"{name} is {value!r}, but must be a number of seconds, 0 or more")
    # Infinity becomes a year: the server needs a finite number.
    return min(secs, 86_400.0 * 365)


def checked_number(name: str, value: Any) -> float:
    """Return a number of any type as a float; reject strings, because `"80"` is most likely a mistake."""
    is_number = not isinstance(value, (str, bytes, bytearray, bool))
    try:
        number = float(value) if is_number else math.nan
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise ArgumentTypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return number


def _checked_count(name: str, value: Any) -> int:
    count = checked_number(name, value)
    if count != int(count) or not 0 <= count <= 100:
        raise ConfigurationError(f"{name} is {value!r}, but must be a whole number from 0 to 100")
    return int(count)


def _checked_string(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name == "service_endpoints" and isinstance(value, (list, tuple)) and all(isinstance(url, str) for url in value):
        return ",".join(value)
    raise ArgumentTypeError(f"{name} must be a str, got {value!r} ({type(value).__name__})")


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument has the wrong type."""
