"""The cache's host part, by a C++ program with a made-up CUDA in plain memory: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sanitizers import OPTIONS, sanitizer_flags

from pyhotexperts import _ffi

SOURCES = ("hot_cache", "hot_upload", "hot_status", "lane_share", "policy", "slots", "transitions")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_slots_hold_what_the_tables_say(sanitizer: str, root: Path, tmp_path: Path) -> None:
    libraries = _ffi.library_dir()
    if not (libraries / "libphx-ggml-cpu.so").exists():
        pytest.skip("this build has one CPU backend per instruction set: nothing to link with")
    compiler = os.environ.get("CXX", "c++")
    program = tmp_path / "hot_cache_test"
    ours, ggml = root / "src" / "hotexperts", root / "vendor" / "llama.cpp" / "ggml"
    sources = [root / "tests" / "native" / "hot_cache_test.cpp", *(ours / f"{name}.cpp" for name in SOURCES)]
    headers = [f"-I{root / 'tests' / 'native' / 'fake_cuda'}", f"-I{ours}"]
    for folder in ("include", "src"):
        headers += ["-isystem", str(ggml / folder)]
    linked = [f"-L{libraries}", "-lphx-ggml-cpu", "-lphx-ggml", "-lphx-ggml-base", f"-Wl,-rpath,{libraries}"]
    flags = [*sanitizer_flags(sanitizer, tmp_path), "-std=c++17", "-O1", "-g", "-pthread", *headers]
    flags += ["-Wall", "-Wextra", "-Wno-unused-function"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program), *linked], check=True)
    run = subprocess.run([program], capture_output=True, text=True, env={**os.environ, **OPTIONS}, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    word, reads, _ = run.stdout.split()
    assert word == "ok"
    assert int(reads) > 20_000
