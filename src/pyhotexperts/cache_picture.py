"""A picture of what the hot-expert cache did: hits and misses of every layer, and the time they took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyhotexperts import picture

if TYPE_CHECKING:
    from pyhotexperts.cache import CacheStatus


def draw(status: CacheStatus, path: Path) -> None:
    """Write the picture of an active cache."""
    layers = np.array(status.layers)
    regions = np.maximum(1, status.regions)
    figure = picture.new_figure(11, 6)
    selections, times = figure.subplots(2, 1, sharex=True)
    bottom = np.zeros(len(layers))
    for label, count in (("resident", status.hits), ("missed", status.misses)):
        selections.bar(layers, count / regions, bottom=bottom, width=0.9, label=label)
        bottom += count / regions
    selections.plot(layers, status.fetches / regions, "k.", label="experts that the GPU fetched")
    selections.set(
        ylabel="selections of a step", title=f"{status.slots} slots per layer, {status.hit_rate:.0%} resident"
    )
    selections.legend(loc="upper left", bbox_to_anchor=(1, 1))
    times.plot(layers, 1e6 * status.cpu_seconds / regions, label="the CPU computed")
    times.plot(layers, 1e6 * status.wait_seconds / regions, label="the GPU waited for it")
    times.set(xlabel="layer", ylabel="microseconds of a step")
    times.set_ylim(bottom=0)
    times.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)
