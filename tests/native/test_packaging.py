"""What wheel and sdist contain, and that both work where nothing else of this project is.

They are built from a copy of the repository into which leftovers of all kinds are planted. Two native builds for
the CPU: with ccache the second one is quick.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import pytest
from checkout import repository_files, run_merged

pytestmark = pytest.mark.slow

LIBRARIES = {f"pyhotexperts/lib/lib{n}.so" for n in ("phx", "phx-ggml", "phx-ggml-base", "phx-ggml-cpu", "phx-llama")}
MODULE = "pyhotexperts/_native.abi3.so"
DATA = {
    "pyhotexperts/py.typed",
    "pyhotexperts/data/tinymoe-q4_k_m.gguf",
    "pyhotexperts/data/SOURCES.md",
    "pyhotexperts/data/bench.txt",
}
# what C and C++ programs of any Linux distribution find without our help
SYSTEM_LIBRARY = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|atomic)|ld-linux[\w-]*)\.so\.\d+")
MAX_BYTES = 36_000_000  # sdist and wheel: the model has 27.9 MB, which no compression makes smaller
LEFTOVERS = (
    ".git/HEAD",
    ".venv/bin/python",
    ".mypy_cache/cache.json",
    "benchmarks/results/run.json",
    "build/old/CMakeCache.txt",
    "dist/pyhotexperts-0.0.1.tar.gz",
    "src/pyhotexperts.egg-info/PKG-INFO",
    "src/pyhotexperts/__pycache__/errors.cpython-310.pyc",
    "src/pyhotexperts/_native.abi3.so",
    "src/pyhotexperts/_native.cpython-310-x86_64-linux-gnu.so",
    "src/pyhotexperts/lib/libggml.so",
    "vendor/.cache/llama.cpp.tar.gz",
)
NOT_IN_SDIST = (".ci/", ".github/", "benchmarks/results/")
GENERATE = """
import json, sys
import pyhotexperts as phx
with phx.Model(n_threads=1) as model:
    result = model.generate("The harbour lay quiet under the snow", temperature=0, max_tokens=5)
json.dump([phx.__file__, str(phx._ffi.library_dir()), len(result.tokens), result.text], sys.stdout)
"""


def environment(**variables: str) -> dict[str, str]:
    """Our environment without what changes a build, with the tools beside our Python and without any network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match("PIP_|PYTHON|PYHOTEXPERTS_|SKBUILD|CMAKE|GIT_|LD_|.*_proxy$|CUDA", name, re.IGNORECASE)
    }
    closed = "http://127.0.0.1:9"
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "CMAKE_ARGS": "-DGGML_CUDA=OFF",
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "http_proxy": closed,
        "https_proxy": closed,
        **variables,
    }


def run(command: Iterable[str | Path], cwd: Path, env: dict[str, str]) -> str:
    result = run_merged(command, cwd, env, timeout=1800)
    assert result.returncode == 0, f"{command}:\n{result.stdout[-6000:]}"
    return result.stdout


def link_distributions(folder: Path, names: Iterable[str]) -> Path:
    """Fill a folder with links to installed packages and all that they need, as far as they are installed."""
    from packaging.requirements import Requirement

    folder.mkdir()
    wanted, seen = list(names), set()
    while wanted:
        name = re.sub("[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        for top in {PurePosixPath(file).parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(package.locate_file(top)))
        requirements = [Requirement(text) for text in package.requires or ()]
        wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("build", "cffi", "packaging", "pip", "scikit_build_core"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs the build tools of pyproject.toml and {module}")
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def runtime(base: Path) -> Path:
    """A folder with what the package needs to run, and nothing else."""
    return link_distributions(base / "runtime", ["cffi", "jinja2", "numpy", "tqdm"])


@pytest.fixture(scope="module")
def files(root: Path) -> set[str]:
    return repository_files(root)


@pytest.fixture(scope="module")
def tree(root: Path, base: Path, files: set[str]) -> Path:
    """A copy of the repository with the vendored sources, and with leftovers that nothing may pick up."""
    copy = base / "tree"
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)
    shutil.copytree(root / "vendor/llama.cpp", copy / "vendor/llama.cpp")
    for name in LEFTOVERS:
        assert name not in files
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("left over\n", encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def wheel(base: Path, tree: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", base / "wheel"]
    run(command, tree, environment(CCACHE_BASEDIR=str(base)))
    built = list((base / "wheel").iterdir())
    assert len(built) == 1, built
    return built[0]


@pytest.fixture(scope="module")
def unpacked(base: Path, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(base / "unpacked")
    return base / "unpacked"


@pytest.fixture(scope="module")
def sdist(base: Path, tree: Path, wheel: Path) -> Path:
    """The sdist, made after the wheel: its build folder is there to be picked up."""
    assert list(tree.glob("build/cp310-abi3-*/CMakeCache.txt"))
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", base / "sdist"]
    run(command, tree, environment(CCACHE_BASEDIR=str(base)))
    built = list((base / "sdist").iterdir())
    assert len(built) == 1, built
    return built[0]


def test_the_wheel_is_for_the_stable_abi(wheel: Path) -> None:
    assert re.fullmatch(r"pyhotexperts-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    assert wheel.stat().st_size < MAX_BYTES


def test_the_wheel_has_each_file_once_and_no_other(wheel: Path, files: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    assert len(names) == len(set(names))
    package = {name.removeprefix("src/") for name in files if name.startswith("src/pyhotexperts/")}
    assert package >= DATA
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    licences = {name for name in names if name.startswith(f"{info}/") and name.endswith("LICENSE")}
    assert set(names) == package | {MODULE} | LIBRARIES | about | licences


def test_the_wheel_has_both_licences(unpacked: Path, tree: Path) -> None:
    found = sorted(path.read_bytes() for path in unpacked.glob("*.dist-info/**/LICENSE"))
    assert found == sorted((tree / name).read_bytes() for name in ("LICENSE", "vendor/llama.cpp/LICENSE"))


def test_libraries_of_the_wheel_find_each_other_and_need_only_the_system(unpacked: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    ours = {PurePosixPath(name).name for name in LIBRARIES}
    for name in (MODULE, *LIBRARIES):
        dynamic = run([readelf, "--dynamic", "--wide", unpacked / name], unpacked, {"LC_ALL": "C"})
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        foreign = {library for library in needed - ours if not SYSTEM_LIBRARY.fullmatch(library)}
        assert needed, name
        assert not foreign, name
        paths = [path for entry in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) for path in entry.split(":")]
        assert paths == (["$ORIGIN/lib"] if name == MODULE else ["$ORIGIN"]), name


def test_the_unpacked_wheel_works_with_its_requirements_alone(unpacked: Path, runtime: Path, tmp_path: Path) -> None:
    code = f"import sys\nsys.path[:0] = [{str(unpacked)!r}, {str(runtime)!r}]\n" + GENERATE
    check_generated(run([sys.executable, "-I", "-S", "-c", code], tmp_path, environment()), unpacked)


def test_the_sdist_has_the_repository_and_upstream_and_nothing_else(sdist: Path, tree: Path, files: set[str]) -> None:
    assert sdist.stat().st_size < MAX_BYTES
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if not member.isdir()]
    assert all(member.isreg() for member in members)
    folder, _, _ = sdist.name.partition(".tar.gz")
    names = [member.name.removeprefix(f"{folder}/") for member in members]
    assert len(names) == len(set(names))
    stamp = json.loads((tree / "vendor/llama.cpp/.fetch-stamp.json").read_text(encoding="utf-8"))
    upstream = {f"vendor/llama.cpp/{name}" for name in (*stamp["files"], ".fetch-stamp.json")}
    ours = {name for name in files if not name.startswith(NOT_IN_SDIST)}
    assert {"LICENSE", "CMakeLists.txt", "cmake/vendored_llama.cmake", "vendor/fetch.py"} <= ours
    assert set(names) == ours | upstream | {"PKG-INFO"}


def test_the_sdist_installs_without_network_and_works(
    root: Path, base: Path, sdist: Path, runtime: Path, tmp_path: Path
) -> None:
    tools = link_distributions(tmp_path / "tools", ["scikit-build-core", "cffi", "cmake", "ninja"])
    run([sys.executable, "-m", "venv", "--without-pip", "venv"], tmp_path, environment())
    python = tmp_path / "venv/bin/python"
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "runtime.pth").write_text(f"{runtime}\n", encoding="utf-8")

    command = [sys.executable, "-m", "pip", "--python", python, "install", "-v", "--no-build-isolation", sdist]
    output = run(command, tmp_path, environment(PYTHONPATH=str(tools), TMPDIR=str(base), CCACHE_BASEDIR=str(base)))
    assert "vendor/llama.cpp is up to date" in output
    assert "local edits" not in output
    assert "downloading" not in output

    (tmp_path / "elsewhere").mkdir()
    check_generated(run([python, "-I", "-c", GENERATE], tmp_path / "elsewhere", environment()), site)
    info = json.loads(run([python.with_name("pyhotexperts"), "info", "--json"], tmp_path / "elsewhere", environment()))
    assert info["llama_cpp_commit"] in (root / "vendor/llama.cpp.lock").read_text(encoding="utf-8")
    assert not info["cuda_built"]


def check_generated(output: str, site: Path) -> None:
    module, libraries, n_tokens, text = json.loads(output)
    assert Path(module) == site / "pyhotexperts/__init__.py"
    assert Path(libraries) == site / "pyhotexperts/lib"
    assert n_tokens == 5
    assert text.strip()
