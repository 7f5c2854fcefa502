"""Whether the patched build without a cache is what llama.cpp is without the patch queue: nodes, memory and logits.

    python benchmarks/cache_off.py --unpatched DIR

DIR holds this package built without the patch queue (its CUDA backend differs, nothing else). Prints one JSON line for
each offload mode. Their speeds: bench_offload.py --modes cpu_experts with and without --unpatched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import astuple
from typing import Any

import pyhotexperts as phx
from provenance import provenance
from pyhotexperts import _ffi

MODES = {"cpu_experts": phx.cpu_experts(), "layers:3": phx.layers(3), "full_gpu": phx.full_gpu()}
PROMPT = list(range(100, 400))
N_TOKENS = 64


class Nodes(logging.Handler):
    """The nodes of all graphs, each with its inputs, sizes and backends, as ggml's scheduler prints them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(("node #", "## SPLIT")):
            self.lines.append(line)
        elif "were lost" in line:
            raise RuntimeError(line)


def measure(mode: str) -> dict[str, Any]:
    """Nodes, hash of all logits after a prompt and after each of some tokens, and the memory in use."""
    nodes = Nodes()
    logger = logging.getLogger("pyhotexperts")
    logger.addHandler(nodes)
    logger.setLevel(logging.DEBUG)
    before = [d.memory_free for d in phx.devices() if d.is_gpu]
    digest = hashlib.sha256()
    with phx.Model(offload=MODES[mode], n_ctx=1024) as model:
        model.eval(PROMPT)
        for token in range(500, 500 + N_TOKENS):
            digest.update(model.logits.tobytes())
            model.eval([token])
        planned = [(astuple(m)[0], m.model, m.context, m.compute) for m in model.memory]
        used = [b - d.memory_free for b, d in zip(before, (d for d in phx.devices() if d.is_gpu), strict=True)]
    if not nodes.lines:
        raise RuntimeError("ggml's scheduler printed no nodes")
    return {
        "n_nodes": len(nodes.lines),
        "nodes_sha256": hashlib.sha256("\n".join(nodes.lines).encode()).hexdigest(),
        "logits_sha256": digest.hexdigest(),
        "planned": planned,
        "vram_used": used,
        "libraries": str(_ffi.library_dir()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpatched", metavar="DIR", required=True)
    parser.add_argument("--in-process", metavar="MODE", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.in_process:
        print(json.dumps(measure(a.in_process)))
        return
    for mode in MODES:
        results = []
        for env in ({"GGML_SCHED_DEBUG": "2"}, {"GGML_SCHED_DEBUG": "2", "PYTHONPATH": a.unpatched}):
            command = [sys.executable, __file__, "--unpatched", a.unpatched, "--in-process", mode]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
            results.append(json.loads(run.stdout))
        if results[0].pop("libraries") == results[1].pop("libraries"):
            sys.exit(f"{a.unpatched} is no other build, or an editable installation hides it")
        same = {key: results[0][key] == results[1][key] for key in results[0]}
        print(
            json.dumps(
                {"offload_mode": mode, "same": same, "n_tokens": len(PROMPT) + N_TOKENS, **results[0], **provenance()}
            )
        )


if __name__ == "__main__":
    main()
