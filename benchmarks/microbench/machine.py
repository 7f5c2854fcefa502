"""The machine's bounds, by code that is not the engine's: plain reads, copies to the GPU, both at once, hand-overs.

    python benchmarks/microbench/machine.py > machine.jsonl

Compiles bandwidth.cu and handover.cu with nvcc and prints a JSON line for each group of figures (GB/s by number of
threads, bytes of a copy or blocks of a kernel; microseconds), within 25 seconds on 16 cores. `bench --machine
machine.jsonl` then says how far each hot row is from what the machine allows. On a machine without a GPU:
`--parts reads`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pyhotexperts import machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from provenance import provenance  # noqa: E402

PROGRAMS = {"bandwidth": ("bandwidth.cu", "readers.cpp"), "handover": ("handover.cu",)}
BANDWIDTHS = ("reads", "dma", "zero_copy", "reads_and_dma", "reads_and_zero_copy")
KIB, MIB = 1 << 10, 1 << 20
PIECES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
HAND_OVER_BYTES = (12 * KIB, 48 * KIB)  # there: one token's activations; back: those of four experts


def find_nvcc() -> str:
    """The CUDA compiler."""
    found = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not found:
        sys.exit("there is no CUDA compiler (nvcc): install the CUDA toolkit, or set NVCC to its path")
    if not shutil.which(found):
        sys.exit(f"cannot run the CUDA compiler {found}: set NVCC to its path")
    return found


def compile_programs(nvcc: str, names: list[str], folder: str, arch: str) -> None:
    """Build the programs into a folder, all at a time."""
    flags = [nvcc, "-std=c++17", "-O3", f"-arch={arch}", "-Xcompiler", "-march=native,-pthread"]
    running = {
        name: subprocess.Popen([*flags, *(str(HERE / source) for source in PROGRAMS[name]), "-o", f"{folder}/{name}"])
        for name in names
    }
    failed = [name for name, process in running.items() if process.wait()]
    if failed:
        sys.exit(f"nvcc could not compile {', '.join(failed)} (see above); --arch names another GPU architecture")


def default_threads() -> list[int]:
    """Powers of two, three quarters, all cores and all but one."""
    cores = machine.default_threads()
    return sorted({1 << i for i in range(cores.bit_length())} | {max(1, cores * 3 // 4), max(1, cores - 1), cores})


def joined(values: list[int] | list[str]) -> str:
    """A list as the programs take it."""
    return ",".join(map(str, values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (*BANDWIDTHS, "handover")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="default: all")
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=default_threads(), metavar="N")
    parser.add_argument("--pages", nargs="+", choices=("4k", "huge"), default=["4k", "huge"], help="of what is read")
    parser.add_argument("--pieces", type=int, nargs="+", default=list(PIECES), metavar="N", help="bytes of one copy")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256], metavar="N")
    parser.add_argument("--interval", type=int, default=200, metavar="MS", help="of each figure; default: 200")
    parser.add_argument("--mib", type=int, default=2048, metavar="N", help="memory that is read; default: 2048")
    parser.add_argument("--round-trips", type=int, default=5000, metavar="N", help="hand-overs; default: 5000")
    parser.add_argument("--arch", default="native", help="GPU architecture such as sm_90; default: this machine's GPU")
    a = parser.parse_args()
    if min(a.threads + a.pieces + a.blocks + [a.interval, a.mib, a.round_trips]) < 1:
        parser.error("all numbers must be positive")
    bandwidths = [part for part in BANDWIDTHS if part in a.parts]
    arguments = [joined(bandwidths), str(a.interval), str(a.mib)]
    arguments += [joined(a.threads), joined(a.pages), joined(a.pieces), joined(a.blocks)]
    commands = {"bandwidth": arguments} if bandwidths else {}
    if "handover" in a.parts:
        commands["handover"] = [str(a.round_trips), *map(str, HAND_OVER_BYTES)]
    nvcc = find_nvcc()
    if set(a.parts) != {"reads"} and not machine.has_gpu():
        sys.exit(f"all parts but reads need a GPU, and this process can use none: {machine.no_gpu_reason()}")
    origin = provenance()
    with tempfile.TemporaryDirectory() as folder:
        compile_programs(nvcc, list(commands), folder, a.arch)
        for name, given in commands.items():
            with subprocess.Popen([f"{folder}/{name}", *given], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(json.dumps({"benchmark": "machine", **json.loads(line), **origin}), flush=True)
            if process.returncode:
                sys.exit(f"{name} failed (see above)")


if __name__ == "__main__":
    main()
