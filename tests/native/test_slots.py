"""Slots, and the share between the lanes, by C++ programs that are compiled with nothing but the standard library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def output_of(test: str, source: str, root: Path, folder: Path) -> str:
    """Compile a test with the one source that it tests, run it, and return what it prints."""
    program = folder / test
    sources = [root / "tests" / "native" / f"{test}.cpp", root / "src" / "hotexperts" / source]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{root / 'src' / 'hotexperts'}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, *map(str, sources), "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_slots_keep_their_invariants(root: Path, tmp_path: Path) -> None:
    word, done, _ = output_of("slots_test", "slots.cpp", root, tmp_path).split()
    assert word == "ok"
    assert int(done) > 10_000


def test_the_lanes_share_as_the_machine_allows(root: Path, tmp_path: Path) -> None:
    word, choices, _ = output_of("lane_share_test", "lane_share.cpp", root, tmp_path).split()
    assert word == "ok"
    assert int(choices) == 6 * 5 * 3 * 7 + 4 * 2 + 3
