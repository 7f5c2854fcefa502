"""Where a result comes from: commit, command, hardware, versions. Every line of benchmarks/results carries it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyhotexperts as phx
from pyhotexperts import _ffi

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """What PYHOTEXPERTS_COMMIT says, else the commit of this repository."""
    if "PYHOTEXPERTS_COMMIT" in os.environ:
        return os.environ["PYHOTEXPERTS_COMMIT"]
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def program() -> str:
    """The script that runs, as seen from the repository."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def provenance() -> dict[str, Any]:
    """Fields for a result."""
    build = _ffi.build_info()
    given = sys.argv[1:]
    if "--in-process" in given:  # how bench_offload.py calls itself
        given = given[: given.index("--in-process")]
    return {
        "commit": commit(),
        "command": " ".join(["python", program(), *given]),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "gpu": [d.description for d in phx.devices() if d.is_gpu],
        "llama_cpp_commit": build["llama_cpp_commit"],
        "patch_hash": build["patch_hash"],
        "cuda": build["cuda_built"],
        "compiler": build["compiler"],
    }
