"""What the tests of the build share: the files of the repository, and running a command on a copy of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest


def repository_files(root: Path) -> set[str]:
    """The tracked files, and those that would be: without what git ignores, such as vendor/llama.cpp."""
    if not (root / ".git").exists() or not shutil.which("git"):
        pytest.skip("needs git and a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in listed if name and (root / name).is_file()}


def run_merged(
    command: Iterable[str | Path], cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; stdout holds what it wrote to both streams."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
