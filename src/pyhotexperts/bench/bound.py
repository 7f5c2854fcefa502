"""How long a token must take: the GPU's part, and the bytes of experts that are in no slot at the machine's bandwidth.

    bound = GPU part + cold bytes / (plain reads while copies run + copies)

Cold bytes of a token are what it reads of experts in RAM: (1 - hit rate) x their bytes, from the sizes of the model's
own tensors. The bandwidth is measured by code that is not the engine's: benchmarks/microbench/machine.py.

The GPU part is the token time of `full_gpu` in the same comparison. Where that has none (the model does not fit, or
nobody asked for it), it is predicted from the layers: a line over the bytes of experts in RAM is fitted by least
squares to the token times of the best `layers` rows (of all budgets) and of the best `cpu_experts` row, and its value
at no bytes is the GPU part. The errors of rows are magnified by that as far as zero is from them: a prediction from few
layers on the GPU is a rough one. One that is no shorter than a whole token of some row is none.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from pyhotexperts.errors import ConfigError

Row = dict[str, Any]

FIELDS = ("cold_bytes_per_token", "bound_gpu_ms", "bound_gpu_from", "bound_ms", "over_bound")


def cold_bandwidth(path: str) -> float:
    """GB/s that this machine reads and copies to the GPU at the same time, with as many threads as are best for both.

    Parameters
    ----------
    path
        What benchmarks/microbench/machine.py has printed: JSON lines, of which those of the part reads_and_dma count.

    Raises
    ------
    ConfigError
        If the file cannot be read, is no such file, or lacks that part.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        parts = [line for line in lines if line.get("part") == "reads_and_dma"]
        sums = [
            rate(reads) + rate(part["dma_gb_per_second"][threads])
            for part in parts
            for threads, reads in part["reads_gb_per_second"].items()
        ]
    except OSError as e:
        raise ConfigError(f"cannot read the machine's figures {path}: {e.strerror}") from e
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{path} is not what benchmarks/microbench/machine.py prints") from None
    if not sums:
        raise ConfigError(f"{path} has no line of the part reads_and_dma: let machine.py measure it")
    return max(sums)


def rate(value: object) -> float:
    """A measured rate: a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ValueError(value)
    return float(value)


def add(rows: list[Row], gb_per_second: float | None) -> None:
    """Fill in `FIELDS` of all rows; None where they do not apply, the bounds also without a bandwidth.

    Parameters
    ----------
    rows
        All rows of a comparison.
    gb_per_second
        As of `cold_bandwidth`.
    """
    for row in rows:
        row.update(dict.fromkeys(FIELDS))
        if row["hit_rate"] is None:
            continue
        row["cold_bytes_per_token"] = round((1 - row["hit_rate"]) * row["expert_bytes_in_ram"])
        gpu_ms, origin = gpu_part(rows, row["test"])
        if gb_per_second is None or gpu_ms is None:
            continue
        row["bound_gpu_ms"], row["bound_gpu_from"] = gpu_ms, origin
        row["bound_ms"] = gpu_ms + row["cold_bytes_per_token"] / gb_per_second / 1e6
        row["over_bound"] = 1e3 / row["median_ts"] / row["bound_ms"]


def gpu_part(rows: list[Row], test: str) -> tuple[float | None, str | None]:
    """Milliseconds of a token on the GPU alone, and the mode that says so; None if nothing does."""
    times: dict[str, list[tuple[int, float]]] = {}  # mode -> bytes of experts in RAM, milliseconds
    for row in rows:
        if row["best"] and row["test"] == test:
            mode = row["offload_mode"].split(":")[0]
            times.setdefault(mode, []).append((row["expert_bytes_in_ram"], 1e3 / row["median_ts"]))
    if "full_gpu" in times:
        return times["full_gpu"][0][1], "full_gpu"
    points = times.get("layers", []) + times.get("cpu_experts", [])
    if "layers" not in times or len({n_bytes for n_bytes, _ in points}) < 2:
        return None, None
    at_none = statistics.linear_regression(*zip(*points, strict=True)).intercept
    fastest = min(1e3 / row["median_ts"] for row in rows if row["test"] == test)
    return (at_none, "layers") if 0 < at_none < fastest else (None, None)
