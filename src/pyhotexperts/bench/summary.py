"""From measurements to rows: medians with their spread, cold and warm apart, ratios against the baselines.

A row is a flat dictionary with llama-bench's field names where it has them. Each configuration gives one row for the
prompt, one for the first generated tokens (cold: the cache has not seen this text), one for those after them (warm).
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from pyhotexperts import __version__, _ffi, machine
from pyhotexperts.bench import bound
from pyhotexperts.bench.child import percentile, spread
from pyhotexperts.bench.config import PARTS, Run

Row = dict[str, Any]
Measured = tuple[Run, dict[str, Any]]


def build_facts() -> Row:
    """Fields that say what was measured with."""
    build = _ffi.build_info()
    devices = machine.devices()
    return {
        "build_commit": build["llama_cpp_commit"],
        "pyhotexperts": __version__,
        "cpu_info": next((d.description for d in devices if not d.is_gpu), ""),
        "cpus": os.cpu_count(),
        "gpu_info": ", ".join(d.description for d in devices if d.is_gpu),
        "backends": ",".join(build["backends"]),
    }


def rows(measured: list[Measured], winners: set[str], gb_per_second: float | None = None) -> list[Row]:
    """Rows of all configurations in the order of their first measurement.

    Parameters
    ----------
    measured
        Runs and what their processes returned.
    winners
        Labels of the best configuration of each mode.
    gb_per_second
        The machine's bandwidth for experts that are in no slot, None = unknown (see `bound`).
    """
    groups: dict[str, list[Measured]] = {}
    for run, result in measured:
        groups.setdefault(run.label, []).append((run, result))
    facts = build_facts()
    made: list[Row] = []
    for label, group in groups.items():
        made += [{**facts, **row, "best": label in winners} for row in _rows(group)]
    for row in made:
        row["ratio_cpu_experts"] = _ratio(row, made, "cpu_experts")
        row["ratio_layers"] = _ratio(row, made, "layers")
    bound.add(made, gb_per_second)
    return made


def _ratio(row: Row, all_rows: list[Row], mode: str) -> float | None:
    """The row's speed over that of a mode in the same test: with the load mode and threads that are best in this test.

    They may be others for the prompt than those that generate fastest and are repeated.
    """
    same = [
        other
        for other in all_rows
        if other["offload_mode"].split(":")[0] == mode
        and other["test"] == row["test"]
        and other["vram_budget_mib"] in (None, row["vram_budget_mib"])
    ]
    chosen = next((other["offload_mode"] for other in same if other["best"]), None)
    speeds = [other["median_ts"] for other in same if other["offload_mode"] == chosen]
    return row["median_ts"] / max(speeds) if speeds and max(speeds) else None


def _rows(group: list[Measured]) -> list[Row]:
    """The rows of one configuration."""
    run, first = group[0]
    common: Row = {
        "model_filename": Path(run.model).name,
        "model_type": first["model_type"],
        "model_size": first["model_size"],
        "model_n_params": first["model_n_params"],
        "expert_bytes_in_ram": first["expert_bytes_in_ram"],
        "offload_mode": str(run.mode),
        "load_mode": run.load_mode,
        "n_ctx": first.get("n_ctx", run.load_options["n_ctx"]),  # another build may not say
        "n_batch": run.n_batch,
        "n_ubatch": run.n_ubatch,
        "n_threads": run.n_threads,
        "type_k": run.type_k,
        "type_v": run.type_v,
        "n_gpu_layers": first["n_gpu_layers"],
        "flash_attn": run.flash_attn,
        "n_depth": run.n_depth,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "repetitions": len(group),
        "disturbed": sum(bool(r.get("disturbance")) for _, r in group),
        "vram_budget_mib": None if run.vram_budget is None else run.vram_budget >> 20,
        "vram_peak_mib": round(max(r["vram_peak"] for _, r in group) / 2**20),
        "load_seconds": statistics.median(r["load_seconds"] for _, r in group),
        "slots": first["slots"],
        "policy": first["policy"],
    }
    made = []
    if run.n_prompt:
        seconds = [r["prompt_seconds"] for _, r in group]
        first_token = [r["prompt_seconds"] + r["steps_seconds"][0] for _, r in group if r["steps_seconds"]]
        made.append(
            {
                **common,
                "test": f"pp{run.n_prompt}",
                "n_prompt": run.n_prompt,
                "n_gen": 0,
                "warm": None,
                **_speed(run.n_prompt, seconds),
                "ttft_ms": 1e3 * statistics.median(first_token) if first_token else None,
                "p50_ms": None,
                "p95_ms": None,
                "hit_rate": None,
                "uploads_per_token": None,
            }
        )
    for name, part in PARTS.items():
        steps = [r["steps_seconds"][part] for _, r in group]
        if not steps[0]:
            continue
        all_steps = [s for one in steps for s in one]
        made.append(
            {
                **common,
                "test": f"tg{len(steps[0])} {name}",
                "n_prompt": 0,
                "n_gen": len(steps[0]),
                "warm": name == "warm",
                **_speed(len(steps[0]), [sum(one) for one in steps]),
                "ttft_ms": None,
                "p50_ms": 1e3 * percentile(all_steps, 0.5),
                "p95_ms": 1e3 * percentile(all_steps, 0.95),
                "hit_rate": _median_of(group, name, "hit_rate"),
                "uploads_per_token": _median_of(group, name, "uploads_per_token"),
            }
        )
    return made


def _median_of(group: list[Measured], part: str, name: str) -> float | None:
    values = [r["cache"][part][name] for _, r in group if name in r["cache"].get(part, {})]
    return statistics.median(values) if values else None


def _speed(n_tokens: int, seconds: list[float]) -> Row:
    speeds = [n_tokens / s for s in seconds]
    deviation = spread(seconds)
    return {
        "avg_ns": round(1e9 * statistics.mean(seconds)),
        "stddev_ns": None if deviation is None else round(1e9 * deviation),
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": spread(speeds),
        "median_ts": statistics.median(speeds),
        "min_ts": min(speeds),
        "max_ts": max(speeds),
    }
