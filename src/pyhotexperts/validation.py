"""Checks of parameters before they reach native code. Each raises `ConfigError` naming parameter and value."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Iterable

from pyhotexperts.errors import ConfigError


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int within low..high."""
    try:
        result = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        result = low - 1
    if not low <= result <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return result


def real(name: str, value: object, low: float, high: float) -> float:
    """`value` as a finite float within low..high."""
    try:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        result = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or not low <= result <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return result


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """`value` as one of the allowed strings."""
    options = list(allowed)
    if not isinstance(value, str) or value not in options:
        raise ConfigError(f"{name} must be one of {', '.join(options)}, not {value!r}")
    return value


def boolean(name: str, value: object) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def memory_size(name: str, value: object) -> int:
    """Bytes, from an integer or a text such as "12GiB", "12000 MiB" or "1.5GB" (powers of 1000 without the i)."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].lower() not in UNITS:
            raise ConfigError(f'{name} must be bytes or a text such as "12GiB", not {value!r}')
        value = int(float(match[1]) * UNITS[match[2].lower()])
    return integer(name, value, 1, 2**63 - 1)
