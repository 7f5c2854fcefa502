"""Prompt and generation speed of a model in several offload modes, one process for each mode and repetition.

    python benchmarks/bench_offload.py -m MODEL --modes cpu_experts layers:24 full_gpu -p 2048 -n 64 -r 3

Tokens are fed, not chosen: consecutive token ids, each repetition in a segment of its own, so that the geometry
models (random weights with realistic routing) route as real models do. Prints one JSON line for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyhotexperts as phx
from provenance import provenance

BUILDS = ("pyhotexperts", "unpatched")
SEGMENT = 1024  # consecutive ids that belong together in a geometry model


def offload_mode(text: str) -> phx.Offload:
    """The mode that a word such as ``layers:24`` names."""
    name, _, number = text.partition(":")
    if name == "layers" and number.isdecimal():
        return phx.layers(int(number))
    if name == "hot_experts" and number.isdecimal():
        return phx.hot_experts(slots=int(number), strict=True)
    if text in ("cpu_experts", "full_gpu"):
        return phx.cpu_experts() if text == "cpu_experts" else phx.full_gpu()
    raise argparse.ArgumentTypeError(f"{text!r} is none of cpu_experts, layers:N, hot_experts:N, full_gpu")


def vram_used() -> int:
    """Bytes in use on all GPUs, by anybody."""
    return sum(d.memory_total - d.memory_free for d in phx.devices() if d.is_gpu)


def cache_figures(model: phx.Model, n_gen: int) -> dict[str, Any]:
    """What the hot-expert cache did while tokens were generated."""
    status = model.cache.status  # (the unpatched build has it too: only the CUDA backend differs)
    if not status.active:
        return {}
    per_token = 1 / max(1, n_gen)
    return {
        "slots": status.slots,
        "policy": status.policy,
        "pinned": status.pinned,
        "hit_rate": round(status.hit_rate, 4),
        "uploads_per_token": round(float(status.uploads.sum()) * per_token, 2),
        "cpu_lane_ms_per_token": round(1e3 * float(status.cpu_seconds.sum()) * per_token, 3),
        "wait_ms_per_token": round(1e3 * float(status.wait_seconds.sum()) * per_token, 3),
        "bypassed": status.bypassed,
    }


def run_one(a: argparse.Namespace, mode: str, repetition: int) -> dict[str, Any]:
    """Load the model in this process and time it."""
    before = vram_used()
    started = time.perf_counter()
    with phx.Model(
        a.model,
        offload=offload_mode(mode),
        n_ctx=a.prompt + a.generate + 64,
        n_batch=a.ubatch,
        n_ubatch=a.ubatch,
        n_threads=a.threads,
        load_mode=a.load_mode,
        flash_attn="on",
        progress=False,
    ) as model:
        load_seconds = time.perf_counter() - started

        def ids(start: int, n: int) -> list[int]:
            return [(start + i) % model.info.n_vocab for i in range(n)]

        if not a.cold:  # a segment before those that are timed: kernels are loaded, pages are read
            model.eval(ids(0, a.ubatch if a.prompt >= a.ubatch else 16))
            for token in ids(a.ubatch, 16):
                model.eval([token])
            model.reset()

        start = SEGMENT * (4 + repetition * (1 + -(-(a.prompt + a.generate) // SEGMENT)))
        mark = time.perf_counter()
        model.eval(ids(start, a.prompt))
        prompt_seconds = time.perf_counter() - mark
        if model.cache.status.active:
            model.cache.reset_stats()
        steps = []
        for token in ids(start + a.prompt, a.generate):
            mark = time.perf_counter()
            model.eval([token])
            steps.append(time.perf_counter() - mark)
        return {
            "offload_mode": mode,
            "build": a.build,
            "warm": not a.cold,
            "load_mode": a.load_mode,
            "repetition": repetition,
            "model": Path(a.model).name,
            "n_gpu_layers": model.n_gpu_layers,
            "n_threads": a.threads or phx.machine.default_threads(),
            "n_ubatch": a.ubatch,
            "load_seconds": round(load_seconds, 2),
            **cache_figures(model, a.generate),
            "vram_mib": round((vram_used() - before) / 2**20),
            "vram_planned_mib": round(sum(m.needed for m in model.memory if m.is_gpu) / 2**20),
            "n_prompt": a.prompt,
            "prompt_tokens_per_second": round(a.prompt / prompt_seconds, 2),
            "n_gen": a.generate,
            "generated_tokens_per_second": round(a.generate / sum(steps), 2),
            **provenance(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(phx.embedded_model()), help="GGUF; default: the embedded model")
    parser.add_argument(
        "--modes", nargs="+", default=["cpu_experts"], help="cpu_experts, layers:N, hot_experts:N, full_gpu"
    )
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens; default: 512")
    parser.add_argument("-n", "--generate", type=int, default=64, help="generated tokens; default: 64")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="default: 3")
    parser.add_argument("-ub", "--ubatch", type=int, default=512, help="micro-batch; default: 512")
    parser.add_argument(
        "-t", "--threads", type=int, nargs="+", help="CPU threads, each is tried; default: physical cores"
    )
    parser.add_argument("-lm", "--load-mode", nargs="+", default=["mmap"], help="mmap, copy, direct_io; default: mmap")
    parser.add_argument("--cold", action="store_true", help="no warm-up: the first tokens of a process are timed")
    parser.add_argument(
        "--unpatched", metavar="DIR", help="a folder that holds this package built without the patch queue"
    )
    parser.add_argument(
        "--builds",
        nargs="+",
        choices=BUILDS,
        help="which build runs; default: modes without a cache on the unpatched one, if given",
    )
    parser.add_argument("--in-process", nargs=5, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.in_process:
        mode, repetition, threads, a.load_mode, a.build = a.in_process
        a.threads = int(threads) or None
        print(json.dumps(run_one(a, mode, int(repetition))))
        return
    for mode in a.modes:
        offload_mode(mode)
    if a.builds and "unpatched" in a.builds and not a.unpatched:
        parser.error("--builds unpatched needs --unpatched DIR")
    rows = [row for mode in a.modes for row in variants(a, mode)]
    for repetition in range(a.repetitions):
        shift = repetition % len(rows)
        for mode, threads, load_mode, build in rows[shift:] + rows[:shift]:
            inner = ["--in-process", mode, str(repetition), str(threads), load_mode, build]
            env = {**os.environ, **({"PYTHONPATH": a.unpatched} if build == "unpatched" else {})}
            run = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], *inner], stdout=subprocess.PIPE, text=True, env=env
            )
            if run.returncode:
                sys.exit(f"{mode}, repetition {repetition}: failed, see above; the lines so far are complete")
            print(run.stdout.strip(), flush=True)


def variants(a: argparse.Namespace, mode: str) -> list[tuple[str, int, str, str]]:
    """The mode with every number of threads and load mode, on each build: (mode, threads, load mode, build)."""
    threads = [0] if mode == "full_gpu" else a.threads or [0]
    builds = a.builds or ["unpatched" if a.unpatched and not mode.startswith("hot_experts") else "pyhotexperts"]
    return [
        (mode, t, lm, b)
        for t in threads
        for lm in (a.load_mode[:1] if mode == "full_gpu" else a.load_mode)
        for b in builds
    ]


if __name__ == "__main__":
    main()
