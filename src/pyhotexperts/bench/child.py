"""Measures one run in a process of its own: ``python -m pyhotexperts.bench.child RUN_AS_JSON`` prints one JSON line.

Tokens are fed, not chosen, so every mode computes the same. Each repetition takes tokens of its own: segments of
consecutive ids, or a part of the text.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyhotexperts as phx
from pyhotexperts import competition
from pyhotexperts.bench.config import PARTS, SEGMENT, Run, read_text
from pyhotexperts.errors import ConfigError, PyHotExpertsError, UnavailableError

WARM_UP_STEPS = 16


def vram_used() -> int:
    """Bytes in use on all GPUs, by anybody."""
    return sum(d.memory_total - d.memory_free for d in phx.devices() if d.is_gpu)


def warm_up_tokens(run: Run) -> int:
    """Tokens to warm up with: one pass, and `WARM_UP_STEPS` one at a time."""
    return min(run.n_ubatch, run.n_own) + WARM_UP_STEPS if run.warm_up else 0


def first_token(run: Run) -> int:
    """Where a run's consecutive ids begin: behind those of the warm-up and of other repetitions, with a segment."""
    return SEGMENT * (4 + run.repetition * -(-run.n_own // SEGMENT))


def finish(model: phx.Model) -> None:
    """Wait for the GPU: evaluating returns before it is done."""
    _ = model.logits


def tokens_of(run: Run, model: phx.Model) -> tuple[list[int], list[int]]:
    """Tokens to warm up with, and the run's own: depth, prompt and what is generated."""
    n_own, n_warm = run.n_own, warm_up_tokens(run)
    if run.text is None:
        n_vocab, start = model.info.n_vocab, first_token(run)
        return [i % n_vocab for i in range(n_warm)], [(start + i) % n_vocab for i in range(n_own)]
    try:
        ids = model.tokenize(read_text(run.text))
    except UnavailableError as e:
        raise ConfigError(f"{e}: measure it with --consecutive") from None
    if len(ids) < 2 * n_own:
        raise ConfigError(
            f"{run.text} has {len(ids)} tokens, and a run needs {2 * n_own}: give a longer text, or less to do"
        )
    start = run.repetition * n_own % (len(ids) - n_own)
    elsewhere = (start + n_own + len(ids) // 2) % len(ids)
    return [ids[(elsewhere + i) % len(ids)] for i in range(n_warm)], ids[start : start + n_own]


def generate(model: phx.Model, tokens: list[int]) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each token, and what the hot-expert cache did meanwhile."""
    has_cache = model.cache.status.active
    if has_cache:
        model.cache.reset_stats()
    steps = []
    for token in tokens:
        mark = time.perf_counter()
        model.eval([token])
        steps.append(time.perf_counter() - mark)
    mark = time.perf_counter()
    finish(model)
    steps[-1] += time.perf_counter() - mark
    return steps, cache_figures(model, len(tokens)) if has_cache else {}


def cache_figures(model: phx.Model, n_gen: int) -> dict[str, Any]:
    """What the hot-expert cache did while tokens were generated."""
    status = model.cache.status
    return {
        "hit_rate": status.hit_rate,
        "uploads_per_token": float(status.uploads.sum()) / n_gen,
        "cpu_lane_ms_per_token": 1e3 * float(status.cpu_seconds.sum()) / n_gen,
        "wait_ms_per_token": 1e3 * float(status.wait_seconds.sum()) / n_gen,
        "bypassed": status.bypassed,
    }


def measure(run: Run) -> dict[str, Any]:
    """Load the model and time it; all times in seconds."""
    before = vram_used()
    mark = time.perf_counter()
    model = phx.Model(run.model, offload=run.mode.offload(), progress=False, **run.load_options)
    load_seconds = time.perf_counter() - mark
    with model:
        warm, own = tokens_of(run, model)
        if warm:
            model.eval(warm[:-WARM_UP_STEPS])
            for token in warm[-WARM_UP_STEPS:]:
                model.eval([token])
            finish(model)
            model.reset()
        peak = vram_used()
        if run.n_depth:
            model.eval(own[: run.n_depth])
            finish(model)
        before_timing = competition.times()
        mark = time.perf_counter()
        if run.n_prompt:
            model.eval(own[run.n_depth : run.n_depth + run.n_prompt])
            finish(model)
        prompt_seconds = time.perf_counter() - mark
        peak = max(peak, vram_used())
        steps, cache = [], {}
        for name, part in PARTS.items():
            tokens = own[run.n_depth + run.n_prompt :][part]
            if tokens:
                seconds, cache[name] = generate(model, tokens)
                steps += seconds
        n_busy = competition.busy_threads(model.offload, run.n_threads)
        disturbance = competition.hint(before_timing, competition.times(), n_busy)
        peak = max(peak, vram_used())
        status = model.cache.status
        return {
            "package": str(Path(phx.__file__).resolve().parent),
            "model_type": model.info.description,
            "model_size": model.info.size,
            "model_n_params": model.info.n_params,
            "expert_bytes_in_ram": model.info.expert_bytes_in_ram,
            "n_gpu_layers": model.n_gpu_layers,
            "n_ctx": model.n_ctx,
            "load_seconds": load_seconds,
            "prompt_seconds": prompt_seconds,
            "steps_seconds": steps,
            "vram_peak": peak - before,
            "vram_planned": sum(m.needed for m in model.memory if m.is_gpu),
            "slots": status.slots if status.active else None,
            "policy": status.policy if status.active else None,
            "pinned": status.pinned,
            "cache": cache,
            "disturbance": disturbance,
        }


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the others does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else 0.0


def spread(values: list[float]) -> float | None:
    """Standard deviation, None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


if __name__ == "__main__":
    try:
        print(json.dumps(measure(Run.from_json(sys.argv[1]))))
    except PyHotExpertsError as e:
        sys.exit(f"{type(e).__name__}: {e}")
