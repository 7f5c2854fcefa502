"""What the Python layer costs: `Model.generate` against a C loop over the same libraries, same sampler, same threads.

Both generate the same tokens greedily; runs alternate, each in a process of its own. Prints one JSON object.

    python benchmarks/python_cost.py [-r RUNS] [-n TOKENS] [-t THREADS] [-m MODEL]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyhotexperts as phx
from provenance import ROOT, provenance
from pyhotexperts import _ffi

PROMPT = "The harbour lay quiet under the snow, and the old captain counted the lights along the quay."
N_CTX = 2048

PYTHON_LOOP = """
import sys
import pyhotexperts as phx
model, prompt, n_tokens, n_threads, n_ctx = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
with phx.Model(model, n_threads=n_threads, n_ctx=n_ctx) as m:
    result = m.generate(prompt, temperature=0, max_tokens=n_tokens)
print(*result.tokens)
print(result.generation_seconds)
"""


def compile_c_loop(folder: Path) -> Path:
    """The C program, linked with the libraries of the installed package."""
    program = folder / "greedy_loop"
    libraries = _ffi.library_dir()
    upstream = ROOT / "vendor" / "llama.cpp"
    subprocess.run(
        [
            *(os.environ.get("CC", "cc"), "-O2", str(ROOT / "benchmarks" / "greedy_loop.c"), "-o", str(program)),
            *(f"-I{upstream / 'include'}", f"-I{upstream / 'ggml' / 'include'}", f"-L{libraries}"),
            *("-lphx-llama", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"),
        ],
        check=True,
    )
    return program


def measure(command: list[str]) -> tuple[list[int], float]:
    """The tokens of one run and its speed in tokens per second."""
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    tokens = [int(t) for t in out[-2].split()]
    return tokens, (len(tokens) - 1) / float(out[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--runs", type=int, default=11, help="runs of each; default: 11")
    parser.add_argument("-n", "--tokens", type=int, default=400, help="tokens to generate; default: 400")
    parser.add_argument("-t", "--threads", type=int, default=1, help="CPU threads; default: 1")
    parser.add_argument("-m", "--model", default=str(phx.embedded_model()), help="GGUF; default: the embedded model")
    a = parser.parse_args()
    arguments = [a.model, PROMPT, str(a.tokens), str(a.threads), str(N_CTX)]
    speeds: dict[str, list[float]] = {"c": [], "python": []}
    seen: set[tuple[int, ...]] = set()
    with tempfile.TemporaryDirectory() as folder:
        c_loop = str(compile_c_loop(Path(folder)))
        for i in range(a.runs + 1):
            for name, command in (("c", [c_loop]), ("python", [sys.executable, "-c", PYTHON_LOOP])):
                tokens, speed = measure(command + arguments)
                seen.add(tuple(tokens))
                if i:  # the first pair warms up
                    speeds[name].append(round(speed, 2))
    if len(seen) != 1:
        sys.exit("the two loops generated different tokens: the comparison would be meaningless")
    pairs = [p / c for c, p in zip(speeds["c"], speeds["python"], strict=True)]
    result: dict[str, Any] = {
        "benchmark": "python_cost",
        "threads": a.threads,
        "tokens": a.tokens,
        "model": Path(a.model).name,
        "c_tokens_per_second": speeds["c"],
        "python_tokens_per_second": speeds["python"],
        "c_median": statistics.median(speeds["c"]),
        "python_median": statistics.median(speeds["python"]),
        "ratio_median": round(statistics.median(pairs), 4),
        **provenance(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
