"""The slot table alone, by a C++ program that is compiled with nothing but the standard library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_slots_keep_their_invariants(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "slots_test"
    sources = [root / "tests" / "native" / "slots_test.cpp", root / "src" / "hotexperts" / "slots.cpp"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{root / 'src' / 'hotexperts'}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, *map(str, sources), "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    word, done, _ = run.stdout.split()
    assert word == "ok"
    assert int(done) > 10_000
