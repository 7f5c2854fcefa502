"""Whether the benchmark's baselines are llama.cpp's own speed: `bench_offload.py` against a C loop over llama.h.

    python benchmarks/agreement.py --unpatched DIR -m 30b.gguf --modes cpu_experts layers:24 -t 16 -lm copy

Both decode the same consecutive ids with the libraries of DIR, which holds this package built without the patch queue
(without it: this build), alternating, each in a process of its own. Prints one JSON line for each mode; its ratios are
those of the benchmark to the loop, medians of the pairs. Exit status 1 if one of generation is further than 5 % from 1.
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

from provenance import ROOT, provenance
from pyhotexperts import _ffi, loading, machine
from pyhotexperts.bench import child, runner
from pyhotexperts.bench.config import Mode, Run
from pyhotexperts.cli import complain
from pyhotexperts.cli.bench import mode_of
from pyhotexperts.errors import ConfigError, PyHotExpertsError

TOLERANCE = 0.05


def libraries_of(unpatched: str | None) -> Path:
    """The folder of the native libraries."""
    if unpatched is None:
        return Path(_ffi.library_dir())
    folder = Path(unpatched).resolve() / "pyhotexperts" / "lib"
    if not folder.is_dir():
        raise ConfigError(f"{unpatched} does not hold this package: there is no {folder}")
    return folder


def compile_loop(folder: str, libraries: Path) -> str:
    """The C program, linked with these libraries."""
    program, upstream = f"{folder}/decode_loop", ROOT / "vendor" / "llama.cpp"
    command = [os.environ.get("CC", "cc"), "-O2", str(ROOT / "benchmarks" / "decode_loop.c"), "-o", program]
    command += [f"-I{upstream / 'include'}", f"-I{upstream / 'ggml' / 'include'}", f"-L{libraries}"]
    command += ["-lphx-llama", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise ConfigError(f"there is no C compiler {command[0]}: set CC to one") from None
    except subprocess.CalledProcessError:
        raise ConfigError("the C program could not be compiled (see above)") from None
    return program


def measure_loop(program: str, libraries: Path, run: Run) -> tuple[float, float]:
    """Prompt and generated tokens per second of the C program, which does what the benchmark does for the run."""
    n_warm = child.warm_up_tokens(run) - child.WARM_UP_STEPS
    n_cpu_moe = run.mode.offload().n_cpu_moe if machine.has_gpu() else 0
    numbers = [run.n_threads, run.n_ubatch, n_warm, child.first_token(run), run.n_prompt, run.n_gen]
    command = [program, str(libraries), run.model, str(n_cpu_moe), run.load_mode, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise runner.RunFailedError(f"the C loop: {done.stderr.strip() or f'exit status {done.returncode}'}")
    prompt, generated = map(float, done.stdout.split())
    return run.n_prompt / prompt, run.n_gen / generated


def measure_benchmark(run: Run, package: str | None) -> tuple[float, float]:
    """The same of the benchmark."""
    result = runner.execute(run, package)
    return run.n_prompt / result["prompt_seconds"], run.n_gen / sum(result["steps_seconds"])


def compared(pairs: list[tuple[tuple[float, float], tuple[float, float]]], index: int) -> dict[str, Any]:
    """Figures of the loop and of the benchmark, and their ratio."""
    loop, bench = ([pair[side][index] for pair in pairs] for side in (0, 1))
    return {
        "loop_ts": [round(v, 2) for v in loop],
        "bench_ts": [round(v, 2) for v in bench],
        "ratio": round(statistics.median(b / c for c, b in zip(loop, bench, strict=True)), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpatched", metavar="DIR", help="a folder that holds this package without the patch queue")
    parser.add_argument("-m", "--model", metavar="FNAME", help="GGUF; default: the embedded model")
    parser.add_argument("--modes", nargs="+", default=["cpu_experts"], metavar="MODE", help="cpu_experts, layers:N")
    parser.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="prompt tokens; default: 512")
    parser.add_argument("-n", "--n-gen", type=int, default=128, metavar="N", help="generated tokens; default: 128")
    parser.add_argument("-r", "--repetitions", type=int, default=3, metavar="N", help="pairs; default: 3")
    parser.add_argument("-t", "--threads", type=int, default=machine.default_threads(), metavar="N")
    parser.add_argument("-lm", "--load-mode", choices=("mmap", "copy", "repack"), default="mmap")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="default: 512")
    a = parser.parse_args()
    if min(a.n_prompt, a.n_gen, a.repetitions, a.threads, a.ubatch_size) < 1:
        parser.error("all numbers must be positive")
    agree = True
    try:
        modes = [mode_of(text) for text in a.modes]
        wrong = [m for m in modes if m != "cpu_experts" and not (isinstance(m, Mode) and m.name == "layers")]
        if wrong:
            raise ConfigError(f"{wrong[0]} is not compared: take cpu_experts or layers:N")
        libraries = libraries_of(a.unpatched)
        with tempfile.TemporaryDirectory() as folder:
            program = compile_loop(folder, libraries)
            for mode in modes:
                run = Run(
                    model=loading.check_file(a.model),
                    mode=mode if isinstance(mode, Mode) else Mode(mode),
                    n_prompt=a.n_prompt,
                    n_gen=a.n_gen,
                    n_depth=0,
                    n_batch=a.ubatch_size,
                    n_ubatch=a.ubatch_size,
                    n_threads=a.threads,
                    load_mode=a.load_mode,
                    type_k="f16",
                    type_v="f16",
                    flash_attn="on",
                    text=None,
                    repetition=0,
                )
                pairs = [
                    (measure_loop(program, libraries, run.repeated(i)), measure_benchmark(run.repeated(i), a.unpatched))
                    for i in range(a.repetitions)
                ]
                figures = {"prompt": compared(pairs, 0), "generated": compared(pairs, 1)}
                agree &= abs(figures["generated"]["ratio"] - 1) <= TOLERANCE
                facts = {"offload_mode": str(run.mode), "load_mode": run.load_mode, "n_threads": run.n_threads}
                facts |= {"n_prompt": run.n_prompt, "n_gen": run.n_gen, "n_ubatch": run.n_ubatch}
                model = {"model_filename": Path(run.model).name}
                build = {"build": "unpatched" if a.unpatched else "this build"}
                print(json.dumps({"benchmark": "agreement", **model, **facts, **build, **figures, **provenance()}))
    except PyHotExpertsError as e:
        return complain(str(e), 1)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
