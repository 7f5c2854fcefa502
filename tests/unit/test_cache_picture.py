"""The picture of a cache, from a made-up status: there is none without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts.cache import Cache, CacheStatus

ACTIVE = CacheStatus(
    requested=True,
    active=True,
    reason="",
    slots=8,
    steps=10,
    layers=(0, 1, 5),
    regions=np.array([10, 10, 0]),
    hits=np.array([60, 70, 0]),
    misses=np.array([20, 10, 0]),
    fetches=np.array([5, 5, 0]),
    cpu_seconds=np.array([1e-3, 2e-3, 0.0]),
    wait_seconds=np.array([1e-4, 2e-4, 0.0]),
)


def plot(status: CacheStatus, path: Path | str) -> Path:
    with patch.object(Cache, "status", new_callable=PropertyMock, return_value=status):
        return Cache(object(), None, True, "").plot(path)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    file = plot(ACTIVE, tmp_path / "cache.png")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("status", "name", "error", "message"),
    [
        (ACTIVE, "cache.jpg", phx.ConfigError, "must name a PNG file"),
        (ACTIVE, "missing/cache.png", phx.ConfigError, "does not exist"),
        (CacheStatus(True, False, "no GPU"), "cache.png", phx.UnavailableError, "not active: no GPU"),
        (CacheStatus(True, True, "", regions=np.zeros(2, int)), "cache.png", phx.UnavailableError, "no token yet"),
    ],
)
def test_what_cannot_be_drawn_is_said(status: CacheStatus, name: str, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        plot(status, tmp_path / name)
