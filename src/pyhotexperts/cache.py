"""The hot-expert cache of a loaded model: what it was asked for, what it is, what it did."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhotexperts import _ffi, cache_picture, picture
from pyhotexperts.errors import ClosedError, UnavailableError
from pyhotexperts.offload import HotExperts

BYPASS_REASONS = ("batch", "shape", "type", "no_cache", "failed")
LANE_TIMEOUT_MS = 20_000


@dataclass(frozen=True, eq=False)
class CacheStatus:
    """State and counters of the cache. Arrays have one entry for each of `layers`.

    Parameters
    ----------
    requested
        Whether the offload mode asked for a cache.
    active
        Whether it keeps experts in VRAM.
    reason
        Why something is not as asked for; "" if all is.
    devices
        The GPUs that have slots.
    policy
        Which experts get the slots.
    slots
        Per layer.
    slot_bytes
        VRAM of all slots.
    pinned
        Whether the host's weights are pinned (page-locked), so that the GPU can read them at the bus's speed.
    steps
        Graphs that were computed: one for each token of a generation.
    layers
        Layer numbers.
    lanes
        bool: whether GPU lane and CPU lane compute the layer; if not, its experts are always staged.
    regions
        int64: how often the lanes computed the layer.
    hits, misses
        int64: selections of resident experts and of others, in those.
    uploads, upload_failures, evictions
        int64: experts that were copied into slots, that could not be, that gave way.
    fetches, kept
        int64: missed experts that the GPU fetched over the bus and computed itself; of those, that stayed resident.
    wait_seconds
        float64: the GPU waited for the CPU lane.
    cpu_seconds
        float64: the CPU lane computed.
    upload_bytes, upload_seconds
        Copied into slots, and how long that took; it runs beside the computation.
    bypassed
        Regions of graphs that took the staged path instead of the lanes, by reason: "batch": too many tokens at a
        time; "shape", "type": the lanes do not compute such a layer; "no_cache": weights outside the cache; "failed":
        the lanes were given up.
    observations_lost
        Selections that the policy did not see.
    """

    requested: bool
    active: bool
    reason: str
    devices: tuple[str, ...] = ()
    policy: str = ""
    slots: int = 0
    slot_bytes: int = 0
    pinned: bool = False
    steps: int = 0
    layers: tuple[int, ...] = ()
    lanes: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    regions: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    hits: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    misses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    uploads: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    upload_failures: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    evictions: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    fetches: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    kept: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    wait_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    cpu_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    upload_bytes: int = 0
    upload_seconds: float = 0.0
    bypassed: dict[str, int] = field(default_factory=dict)
    observations_lost: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the lanes' selections of experts that were resident, 0..1; 0 if there were none."""
        total = int(self.hits.sum() + self.misses.sum())
        return float(self.hits.sum() / total) if total else 0.0

    def __str__(self) -> str:
        if not self.active:
            return f"hot-expert cache not active: {self.reason}"
        note = f"; {self.reason}" if self.reason else ""
        return (
            f"hot-expert cache on {', '.join(self.devices)}: {self.slots} slots in each of {len(self.layers)} layers, "
            f"{self.slot_bytes / 2**20:.0f} MiB, policy {self.policy}, host weights "
            f"{'pinned' if self.pinned else 'not pinned'}{note}"
        )


class Cache:
    """The hot-expert cache of a model, as `Model.cache`."""

    def __init__(self, model: Any, offload: HotExperts | None, requested: bool, reason: str) -> None:
        self._model = model
        self._offload = offload  # None: it was not asked for, or cannot be had
        self._requested = requested
        self._reason = reason
        self._lock = threading.RLock()  # against being closed meanwhile

    def _close(self) -> None:
        """Forget the native model, which is about to be freed."""
        with self._lock:
            self._model = None

    def __reduce__(self) -> str:
        raise TypeError("the cache of a model cannot be copied or pickled: its `status` can")

    @property
    def _native(self) -> Any:
        _ffi.refuse_fork()
        if self._model is None:
            raise ClosedError("the model was closed: load it again")
        return self._model

    @property
    def status(self) -> CacheStatus:
        """State and counters. May be asked for by any thread, while the model computes too."""
        with self._lock:
            return self._status(self._native)

    def _status(self, model: Any) -> CacheStatus:
        if self._offload is None:
            return CacheStatus(requested=self._requested, active=False, reason=self._reason)
        native = _ffi.ffi.new("phx_cache_status *")
        _ffi.check(_ffi.lib.phx_cache_get_status(model, native, _ffi.ffi.NULL), "reading the cache's status")
        table = _ffi.ffi.new("phx_cache_layer[]", max(1, native.n_layers))  # owns what `rows` shows
        _ffi.check(_ffi.lib.phx_cache_get_status(model, native, table), "reading the cache's status")
        rows = table[0 : native.n_layers]

        def column(name: str) -> npt.NDArray[np.int64]:
            return np.array([getattr(r, name) for r in rows], np.int64)

        reasons = [text for text in (self._reason, _ffi.text_of(native.reason)) if text]
        return CacheStatus(
            requested=True,
            active=native.n_slots > 0 and not native.failed,
            reason="; ".join(reasons),
            devices=tuple(f"CUDA{d}" for d in sorted({r.device for r in rows})),
            policy=self._offload.policy,
            slots=native.n_slots,
            slot_bytes=sum(r.slot_bytes for r in rows),
            pinned=bool(native.pinned),
            steps=native.steps,
            layers=tuple(r.layer for r in rows),
            lanes=column("has_lanes").astype(np.bool_),
            regions=column("regions"),
            hits=column("hits"),
            misses=column("misses"),
            uploads=column("uploads"),
            upload_failures=column("upload_failures"),
            evictions=column("evictions"),
            fetches=column("fetches"),
            kept=column("kept"),
            wait_seconds=column("wait_ns") / 1e9,
            cpu_seconds=column("cpu_ns") / 1e9,
            upload_bytes=native.upload_bytes,
            upload_seconds=native.upload_ns / 1e9,
            bypassed={name: native.bypassed[i] for i, name in enumerate(BYPASS_REASONS)},
            observations_lost=native.observations_lost,
        )

    def reset_stats(self) -> None:
        """Set all counters to zero. What is resident stays."""
        with self._lock:
            model = self._native
            if self._offload is not None:
                _ffi.check(_ffi.lib.phx_cache_reset_stats(model), "resetting the cache's counters")

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw hits, misses, fetches and times of every layer since the start, or since `reset_stats`.

        Parameters
        ----------
        path
            A PNG file.

        Raises
        ------
        UnavailableError
            If the cache is not active or has computed nothing yet, or without matplotlib (extra ``plot``).
        ConfigError
            If the path is none of a PNG file in a folder that is there.
        """
        file, status = picture.check(path, "Cache.plot"), self.status
        if not status.active:
            raise UnavailableError(f"there is nothing to draw: {status}")
        if not status.regions.any():
            raise UnavailableError("there is nothing to draw: the cache has computed no token yet")
        cache_picture.draw(status, file)
        return file

    def residency(self) -> npt.NDArray[np.int32]:
        """int32[n_layers, slots]: the expert in each slot, -1 = none."""
        with self._lock:
            status = self._status(self._native)
            out = np.full((len(status.layers), status.slots), -1, np.int32)
            for i in range(len(out)):
                row = _ffi.ffi.from_buffer("int32_t[]", out[i])
                _ffi.check(_ffi.lib.phx_cache_get_residency(self._model, i, row), "reading the cache's slots")
            return out


def start(model: Any, offload: HotExperts, slots: int, n_threads: int, **test: int) -> None:
    """Start the native cache of a loaded model. `test`: the native configuration's fields for tests."""
    config = _ffi.ffi.new("phx_cache_config *")
    config.n_slots = slots
    config.policy = getattr(_ffi.lib, f"PHX_POLICY_{offload.policy.upper()}")
    config.interval = offload.rebalance_interval
    config.half_life = offload.half_life
    config.hysteresis = offload.hysteresis
    config.uploads_per_step = -1 if offload.uploads_per_step is None else offload.uploads_per_step
    config.max_fetches = offload.fetches_per_step
    config.bypass_tokens = offload.prefill_bypass
    config.n_threads = n_threads
    config.deterministic = offload.deterministic
    config.lane_timeout_ms = LANE_TIMEOUT_MS
    for name, value in test.items():
        setattr(config, name, value)
    _ffi.check(_ffi.lib.phx_cache_start(model, config), "cannot start the hot-expert cache")
