"""Checks of parameters before they reach native code. Each raises `ConfigError` naming parameter and value."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable

from pyhotexperts.errors import ConfigError


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int within low..high."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    result = operator.index(value)
    if not low <= result <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return result


def real(name: str, value: object, low: float, high: float) -> float:
    """`value` as a finite float within low..high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    result = float(value)
    if not math.isfinite(result) or not low <= result <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return result


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """`value` as one of the allowed strings."""
    options = list(allowed)
    if not isinstance(value, str) or value not in options:
        raise ConfigError(f"{name} must be one of {', '.join(options)}, not {value!r}")
    return value
