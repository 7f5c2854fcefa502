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


UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def memory_size(name: str, value: object, low: int, bare: str | None = None) -> int:
    """Bytes, from an integer or a text such as "12GiB", "12000 MiB" or "1.5GB" (powers of 1000 without the i).

    Parameters
    ----------
    low
        The least value, bytes.
    bare
        The unit of a text without one, None = such a text is refused.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", value, re.ASCII)
        unit = (match[2] or bare or "?").lower() if match else "?"
        if not match or unit not in UNITS:
            raise ConfigError(f'{name} must be a size such as "12GiB", not {value!r}')
        value = int(float(match[1]) * UNITS[unit])
    result = integer(name, value, 0, 2**63 - 1)
    if result < low:
        raise ConfigError(f"{name} must be at least {low >> 20} MiB, not {result} bytes: is a unit missing?")
    return result


def upload_limit(name: str, value: object) -> int | None:
    """`value` as a number of uploads per layer and token; None and -1 mean no limit, and give None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == -1):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        raise ConfigError(f"{name} must be -1 (no limit) or an integer from 0, not {value!r}")
    return integer(name, value, 0, 2**31 - 1)
