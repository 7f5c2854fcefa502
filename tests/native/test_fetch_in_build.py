"""Configuring a checkout that has no upstream sources yet: CMake fetches them, or says plainly what is missing.

Nothing is compiled. The source archive is the one that PYHOTEXPERTS_LLAMA_CPP_SDIST names or that vendor/.cache
holds; failing both, vendor/fetch.py downloads it.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from checkout import repository_files, run_merged

pytestmark = pytest.mark.slow

SDIST_VARIABLE = "PYHOTEXPERTS_LLAMA_CPP_SDIST"
NO_NETWORK = re.compile(r"connection broken|connection error|connecttimeout|name resolution|unreachable", re.IGNORECASE)


def environment(**variables: str) -> dict[str, str]:
    """Our environment without what changes the configuration, with the tools beside our Python."""
    removed = re.compile("PYHOTEXPERTS_|PYTHON|CMAKE|CUDA|GIT_")
    kept = {name: value for name, value in os.environ.items() if not removed.match(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path} | variables


def run(command: list[str | Path], cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit code, and the output with each run of white space made one space (CMake breaks lines)."""
    result = run_merged(command, cwd, env, timeout=600)
    return result.returncode, re.sub(r"\s+", " ", result.stdout)


def configure(tree: Path, env: dict[str, str], *options: str, build: str = "build") -> tuple[int, str]:
    for program in ("cmake", "ninja"):
        if not shutil.which(program, path=env["PATH"]):
            pytest.skip(f"needs {program}")
    command = ["cmake", "-S", ".", "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options]
    return run([*command], tree, env)


def copy_repository(root: Path, to: Path, only: str = "") -> Path:
    """Copy the tracked files, and those that would be: without what git ignores, such as vendor/llama.cpp."""
    for name in repository_files(root):
        if name.startswith(only):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    assert not (to / "vendor/llama.cpp").exists()
    return to


@pytest.fixture(scope="module")
def archive(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source archive."""
    if given := os.environ.get(SDIST_VARIABLE):
        return Path(given).expanduser().resolve()
    lock = configparser.ConfigParser(interpolation=None)
    lock.read(root / "vendor/llama.cpp.lock", encoding="utf-8")
    filename = lock["llama.cpp"]["filename"]
    cached = root / "vendor/.cache" / filename
    if cached.is_file():
        return cached
    copy = copy_repository(root, tmp_path_factory.mktemp("download"), only="vendor/")
    code, output = run([sys.executable, "vendor/fetch.py"], copy, environment())
    if code and (NO_NETWORK.search(output) or "PIP_NO_INDEX" in os.environ):
        pytest.skip(f"no network, no {filename} in vendor/.cache, and {SDIST_VARIABLE} is not set")
    assert code == 0, output
    return copy / "vendor/.cache" / filename


@pytest.fixture(scope="module")
def configured(root: Path, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy that was configured once, and what CMake said."""
    tree = copy_repository(root, tmp_path_factory.mktemp("tree"))
    code, output = configure(tree, environment(**{SDIST_VARIABLE: str(archive)}), "-DGGML_CUDA=OFF")
    assert code == 0, output
    return tree, output


def test_configuring_fetches_the_sources(configured: tuple[Path, str]) -> None:
    tree, output = configured
    assert f"made {tree / 'vendor/llama.cpp'}" in output
    assert (tree / "build/build.ninja").is_file()
    code, text = run([sys.executable, "vendor/fetch.py", "--status"], tree, environment())
    status = json.loads(text)
    assert (code, status["current"], status["edits"], status["origin"]) == (0, True, {}, "sdist")
    header = (tree / "build/phx_build_info.h").read_text(encoding="utf-8")
    assert status["commit"] in header
    assert status["patch_sha256"] in header
    assert not list(tree.glob("vendor/.fetch-staging-*"))


def test_configuring_again_needs_no_archive(configured: tuple[Path, str]) -> None:
    tree, _ = configured
    code, output = configure(tree, unreachable_index())
    assert code == 0, output
    assert f"{tree / 'vendor/llama.cpp'} is up to date" in output
    assert "downloading" not in output


def test_without_network_and_archive_the_message_says_what_to_do(root: Path, tmp_path: Path) -> None:
    tree = copy_repository(root, tmp_path / "tree")
    code, output = configure(tree, unreachable_index(), "-DGGML_CUDA=OFF")
    assert code != 0
    assert "fetch.py: error: pip could not download llama_cpp_python-" in output
    assert f"set {SDIST_VARIABLE} to its path" in output
    assert "vendor/fetch.py could not provide llama.cpp: see its message above." in output
    assert "Traceback" not in output
    assert not (tree / "vendor/llama.cpp").exists()
    assert not list(tree.glob("vendor/.fetch-staging-*"))


def test_a_damaged_archive_is_named(root: Path, tmp_path: Path) -> None:
    tree = copy_repository(root, tmp_path / "tree")
    damaged = tmp_path / "llama.tar.gz"
    damaged.write_bytes(b"not an archive")
    code, output = configure(tree, environment(**{SDIST_VARIABLE: str(damaged)}), "-DGGML_CUDA=OFF")
    assert code != 0
    assert f"fetch.py: error: {damaged} (14 bytes) is not the pinned llama_cpp_python-" in output
    assert not (tree / "vendor/llama.cpp").exists()


def test_asking_for_cuda_without_a_toolkit_is_an_error(configured: tuple[Path, str]) -> None:
    """PHX_NVCC=OFF stands for a search that found nothing: NOTFOUND would search again, in /usr/local too."""
    tree, _ = configured
    code, output = configure(tree, environment(), "-DGGML_CUDA=ON", "-DPHX_NVCC=OFF", build="build-cuda")
    assert code != 0
    assert "GGML_CUDA=ON, but there is no CUDA compiler (nvcc). Install the CUDA toolkit" in output


def unreachable_index() -> dict[str, str]:
    """An environment in which pip reaches no package index."""
    kept = {name: value for name, value in environment().items() if not re.match("PIP_|.*_proxy$", name, re.IGNORECASE)}
    pip = {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1"}
    return kept | {f"PIP_{name}": value for name, value in pip.items()}
