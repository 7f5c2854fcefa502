"""The CPU lane beside plain reads of the same memory and beside ggml's own CPU path, by threads and page size.

    python benchmarks/microbench/cpu_lane.py -t 1 2

Compiles cpu_lane.cpp against the installed package and prints one JSON line for each number of threads, page size and
number of experts that are computed at a time; figures are GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyhotexperts import _ffi, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
from provenance import provenance  # noqa: E402

TYPES = ["q4_0", "q8_0", "q4_K", "q5_K", "q6_K", "mxfp4"]  # what experts are mostly quantised to


def compile_program(folder: str) -> str:
    """Build the C++ program; returns its path."""
    ours, libraries = ROOT / "src" / "hotexperts", _ffi.library_dir()
    program = f"{folder}/cpu_lane"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native", "-pthread"]
    command += [f"-I{ours}", "-isystem", str(ROOT / "vendor" / "llama.cpp" / "ggml" / "include")]
    sources = [HERE / "cpu_lane.cpp", HERE / "readers.cpp", *ours.glob("cold_*.cpp")]
    command += [*map(str, sources), "-o", program]
    command += [f"-L{libraries}", "-lphx-ggml-cpu", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    threads = machine.default_threads()
    help_threads = f"default: the physical cores, here {threads}"
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[threads], metavar="N", help=help_threads)
    parser.add_argument("--pages", nargs="+", choices=("4k", "huge"), default=["4k", "huge"], help="default: both")
    help_types = f"of weights, as ggml names them; default: {' '.join(TYPES)}; each takes some 20 s"
    parser.add_argument("--types", nargs="+", default=TYPES, metavar="TYPE", help=help_types)
    a = parser.parse_args()
    if not all(1 <= t <= machine.MAX_THREADS for t in a.threads):
        parser.error(f"--threads must be from 1 to {machine.MAX_THREADS}")
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(folder)
        for threads in a.threads:
            for pages in a.pages:
                run = subprocess.run([program, str(threads), pages, *a.types], capture_output=True, text=True)
                if run.returncode:
                    sys.exit(f"{' '.join(run.args)} ended with status {run.returncode}. {run.stderr}")
                *rates, reads = (line.split() for line in run.stdout.splitlines())
                for n_rows in sorted({int(rate[1]) for rate in rates}):
                    of_these = [rate for rate in rates if int(rate[1]) == n_rows]
                    figures = {"reads": float(reads[1]), **{kind: float(lane) for kind, _, lane, _ in of_these}}
                    ggml = {kind: float(rate) for kind, _, _, rate in of_these}
                    row = {"threads": threads, "pages": pages, "experts": n_rows, "gb_per_second": figures}
                    row["ggml_gb_per_second"] = ggml
                    print(json.dumps({**row, **provenance()}), flush=True)


if __name__ == "__main__":
    main()
