"""From the arguments of Python calls to the settings and requests of the native client."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional

from .errors import ConfigurationError

#: What a client can be told; what is `None` is as the environment has it.
NAMES = (
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
TEXTS = ("service_endpoint", "service_endpoints", "load_balancing_strategy", "token", "proxy")


def settings(*, prefers_socket: bool = False, **given: Any) -> Dict[str, Any]:
    """The settings of a native client, or an error that names what cannot be used."""
    said: Dict[str, Any] = dict.fromkeys(NAMES)
    said["prefers_socket"] = prefers_socket
    for name, value in given.items():
        if value is None:
            continue
        if name in TEXTS:
            said[name] = _text(name, value)
        elif name == "ca_file":
            said[name] = value
        elif name == "max_retries":
            said[name] = _count(name, value)
        else:
            said[name] = number(name, value)
    return said


def wish(timeout: Optional[float], given: Mapping[str, Any]) -> Dict[str, Any]:
    """The request that arguments say."""
    said = {name: value for name, value in given.items() if value is not None}
    if timeout is not None:
        said["wait_limit_secs"] = seconds("timeout", timeout)
    return said


def seconds(name: str, value: Any) -> float:
    """A time that is not negative."""
    said = number(name, value)
    if not said >= 0:
        raise ConfigurationError(f"{name} is {value!r}, and must be a number of seconds that is not negative")
    # For ever, for a server that wants a number.
    return min(said, 86_400.0 * 365)


def number(name: str, value: Any) -> float:
    """A number of whatever type, text excepted: `"80"` is most likely a mistake."""
    is_number = not isinstance(value, (str, bytes, bytearray, bool))
    try:
        said = float(value) if is_number else math.nan
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise WrongType(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return said


def _count(name: str, value: Any) -> int:
    said = number(name, value)
    if said != int(said) or not 0 <= said <= 100:
        raise ConfigurationError(f"{name} is {value!r}, and must be a whole number from 0 to 100")
    return int(said)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name == "service_endpoints" and isinstance(value, (list, tuple)) and all(isinstance(url, str) for url in value):
        return ",".join(value)
    raise WrongType(f"{name} must be a str, got {value!r} ({type(value).__name__})")


class WrongType(ConfigurationError, TypeError):
    """An argument of a type that cannot be used."""
