"""The CPU lane of the cache, by a C++ program that compares it with the installed ggml."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sanitizers import OPTIONS, sanitizer_flags

from pyhotexperts import _ffi

# Types of expert tensors in use today: the program must have compared these among others.
COMMON = {"f16", "bf16", "q4_0", "q5_0", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "mxfp4"}
SLOW_TO_QUANTISE = {"iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "iq4_nl", "iq4_xs"}


def check_kernels(line: str, expected: set[str]) -> None:
    """`line`: how many results were compared, and of which types."""
    compared, *types = line.split()
    assert set(types) == expected
    assert int(compared) > 5000 * len(expected) or not expected


@pytest.mark.parametrize(
    ("extent", "sanitizer"),
    [
        ("quick", ""),
        pytest.param("all", "", marks=pytest.mark.slow),
        pytest.param("quick", "thread", marks=pytest.mark.slow),
        pytest.param("quick", "address,undefined", marks=pytest.mark.slow),
    ],
)
def test_the_cpu_lane_equals_ggml_bit_for_bit(extent: str, sanitizer: str, root: Path, tmp_path: Path) -> None:
    libraries = _ffi.library_dir()
    if not (libraries / "libphx-ggml-cpu.so").exists():
        pytest.skip("this build has one CPU backend per instruction set: nothing to link with")
    program = tmp_path / "cold_lane_test"
    ours = root / "src" / "hotexperts"
    sources = [root / "tests" / "native" / "cold_lane_test.cpp", *ours.glob("cold_*.cpp")]
    headers = [f"-I{root / 'src' / 'hotexperts'}", "-isystem", str(root / "vendor" / "llama.cpp" / "ggml" / "include")]
    linked = [f"-L{libraries}", "-lphx-ggml-cpu", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *headers]
    flags += sanitizer_flags(sanitizer, tmp_path)
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program), *linked], check=True)
    env = {**os.environ, **OPTIONS}
    run = subprocess.run([program, extent], capture_output=True, text=True, env=env, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    *types, avx2, avx512, conversions, last = run.stdout.splitlines()
    assert set(types) >= (COMMON if extent == "quick" else COMMON | SLOW_TO_QUANTISE)
    word, n_types, _, rows, _ = last.split()
    assert word == "ok"
    assert int(n_types) == len(types)
    assert int(rows) > 3000
    assert int(conversions.split()[1]) == 6000
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    check_kernels(avx2, {"q4_0", "mxfp4", "q4_K", "q5_K", "q8_0"} if "avx2" in processor else set())
    check_kernels(avx512, {"q4_0", "mxfp4", "q4_K", "q5_K", "q6_K", "q8_0"} if "avx512_vnni" in processor else set())
