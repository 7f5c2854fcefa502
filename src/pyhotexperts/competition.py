"""Whether other programs take processors from this one while it computes: every thread waits for the slowest."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pyhotexperts.offload import Offload, full_gpu

PROC_STAT = Path("/proc/stat")
SHORTEST = 0.1  # seconds: the system counts in hundredths
WORTH_A_WORD = 0.25  # processors
WORTH_A_WORD_SHARE = 0.05  # of all, where there are many


@dataclass(frozen=True)
class Times:
    """Seconds since some time in the past."""

    clock: float
    busy: float  # of all processors that this process may use, together
    own: float  # of all threads of this process, together


def times() -> Times | None:
    """What the system has counted up to now, None where it does not tell."""
    try:
        allowed = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        ticks = 0
        for line in PROC_STAT.read_text().splitlines():
            name, *counts = line.split()
            if name in allowed:
                user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, counts)
                ticks += user + nice + system + irq + softirq + steal
        own = os.times()
        return Times(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system)
    except (OSError, ValueError, AttributeError):
        return None


def busy_threads(offload: Offload, n_threads: int) -> int:
    """CPU threads that a model keeps busy while it generates; with everything on the GPU only one."""
    return 1 if offload == full_gpu() else n_threads


def hint(before: Times | None, after: Times | None, n_threads: int) -> str | None:
    """A word to the user if what ran between the two had more threads than free processors; None if all was well."""
    if before is None or after is None or after.clock - before.clock < SHORTEST:
        return None
    others = ((after.busy - before.busy) - (after.own - before.own)) / (after.clock - before.clock)
    there = len(os.sched_getaffinity(0))
    least = max(WORTH_A_WORD, WORTH_A_WORD_SHARE * there)
    if others < least or n_threads + others < there + least:
        return None
    fewer = max(1, min(n_threads - 1, round(there - others)))
    advice = f": -t {fewer} may be many times faster" if fewer < n_threads else ""
    return (
        f"other programs kept {others:.1f} of {there} processors busy meanwhile, and every thread waits for the slowest"
        + advice
    )
