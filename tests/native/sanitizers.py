"""Compiler flags for C++ programs that check themselves while they run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# For the environment of the program.
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}


def sanitizer_flags(sanitizer: str, folder: Path) -> list[str]:
    """Flags of a sanitizer such as "thread"; none for "" and where the compiler lacks it. `folder`: for a probe."""
    if not sanitizer:
        return []
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}")
    flag = f"-fsanitize={sanitizer}"
    run = subprocess.run([os.environ.get("CXX", "c++"), flag, probe, "-o", folder / "probe"], capture_output=True)
    return [] if run.returncode else [flag]
