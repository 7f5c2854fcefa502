"""Lanes and staged path on small layers, by a C++ program: against upstream's kernels and the CPU lane alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyhotexperts import _ffi

pytestmark = pytest.mark.gpu

# Least number of comparisons of each case.
CASES = {
    "masks": 100_000,
    "large": 5_000,
    "resident": 19_000,
    "fetched": 30_000,
    "staged": 1_000,
    "moving": 20_000,
    "layers": 6_000,
    "threads": 5_000,
    "stopped": 5,
}


@pytest.fixture(scope="module")
def program(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    libraries = _ffi.library_dir()
    if not (libraries / "libphx-ggml-cpu.so").exists():
        pytest.skip("this build has one CPU backend per instruction set: nothing to link with")
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (cuda / "include" / "cuda_runtime_api.h").exists():
        pytest.skip("needs the headers of the CUDA toolkit")
    program = tmp_path_factory.mktemp("lanes") / "hot_lane_test"
    ours = root / "src" / "hotexperts"
    sources = [root / "tests" / "gpu" / "hot_lane_test.cpp", *ours.glob("cold_*.cpp")]
    ggml = root / "vendor" / "llama.cpp" / "ggml" / "include"
    headers = [f"-I{root / 'src' / 'hotexperts'}", "-isystem", str(ggml), "-isystem", str(cuda / "include")]
    linked = [f"-L{libraries}", "-lphx-ggml-cpu", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"]
    linked += [f"-L{cuda / 'lib64'}", "-lcudart", f"-Wl,-rpath,{cuda / 'lib64'}"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *headers]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program), *linked], check=True)
    return program


@pytest.mark.parametrize("graphs", ["CUDA graphs", "no CUDA graphs"])
@pytest.mark.parametrize("case", CASES)
def test_small_layers(case: str, graphs: str, program: Path, report_figure: Callable[[str], None]) -> None:
    env = dict(os.environ)
    if graphs == "no CUDA graphs":
        env["GGML_CUDA_DISABLE_GRAPHS"] = "1"
    module = _ffi.library_dir() / "libphx-ggml-cuda.so"
    run = subprocess.run([program, module, case], env=env, stdout=subprocess.PIPE, text=True, timeout=900)
    assert run.returncode == 0, run.stdout
    word, name, compared = run.stdout.splitlines()[-1].split()
    assert (word, name) == ("ok", case)
    report_figure(f"{compared} comparisons: {case}, {graphs}")
    assert int(compared) >= CASES[case]
