"""Another ggml in the same process: nothing of it is called, and where it would be, an error says so.

The other ggml is made here: libraries with upstream's names and SONAMEs that export every function that ours
export too, each of which aborts the process.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pyhotexperts as phx
from pyhotexperts import _ffi

PROMPT = "The harbour lay quiet under the snow, and the old captain"
OURS = sorted(path.stem.removeprefix("libphx-") for path in _ffi.library_dir().glob("libphx-*.so"))
UPSTREAM_FUNCTION = re.compile(r"(_ZN?K?\d+)?(ggml|gguf|llama|llm)_")  # C names, and C++ ones

SETUP = f"""
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def load_decoys(mode):
    for suffix in (".so", ".so.0"):
        for name in {OURS!r}:
            ctypes.CDLL(os.path.join(os.environ["DECOYS"], f"lib{{name}}{{suffix}}"), mode)

def text(model):
    return model.generate({PROMPT!r}, temperature=0, max_tokens=5).text
"""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


def our_libraries() -> list[Path]:
    """The package's shared libraries, the cffi module among them."""
    found = [*_ffi.library_dir().glob("*.so"), *_ffi.library_dir().parent.glob("_native*.so")]
    assert len(found) >= 6, f"{_ffi.library_dir()} holds only {found}"
    return found


def exported(library: Path, kinds: str) -> list[str]:
    """The symbols of these kinds (nm's letters) that a library exports."""
    command = [tool("nm"), "--dynamic", "--defined-only", "--format=posix", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name, kind in (line.split()[:2] for line in lines) if kind in kinds]


def upstream_functions(library: Path) -> list[str]:
    """The functions of llama.cpp, in C and C++, that a library of ours exports."""
    return [name for name in exported(library, "TW") if UPSTREAM_FUNCTION.match(name)]


def decoy_source(functions: list[str]) -> str:
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        'static void called(const char * name) { fprintf(stderr, "the decoy of %s was called\\n", name); abort(); }',
    ]
    for i, name in enumerate(functions):
        lines.append(f'void f{i}(void) __asm__("{name}");')
        lines.append(f'void f{i}(void) {{ called("{name}"); }}')
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def decoys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the other ggml twice: with and without versions in names and SONAMEs."""
    folder = tmp_path_factory.mktemp("decoys")
    for name in OURS:
        functions = upstream_functions(_ffi.library_dir() / f"libphx-{name}.so")
        source = folder / f"{name}.c"
        source.write_text(decoy_source(functions), encoding="utf-8")
        subprocess.run([tool("cc"), "-c", "-fPIC", "-O0", source.name], cwd=folder, check=True)
        for soname in (f"lib{name}.so", f"lib{name}.so.0"):
            command = [tool("cc"), "-shared", f"-Wl,-soname,{soname}", "-o", soname, f"{name}.o"]
            subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.fixture
def expected(model: phx.Model) -> str:
    """What the embedded model writes where there is no other ggml."""
    return model.generate(PROMPT, temperature=0, max_tokens=5).text


def run(decoys: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name, value in variables.items():  # what is set already, such as a sanitizer to preload, comes after ours
        variables[name] = ":".join([value, *filter(None, [os.environ.get(name)])])
    return subprocess.run(
        [sys.executable, "-c", SETUP + code],
        cwd=decoys,
        env=os.environ | {"DECOYS": str(decoys)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines_of(process: subprocess.CompletedProcess[str]) -> list[str]:
    assert process.returncode == 0, process.stderr
    return [line for line in process.stdout.split("\0") if line]


def test_the_decoys_cover_llama_cpp_and_abort(decoys: Path) -> None:
    assert {"ggml", "ggml-base", "llama"} <= set(OURS)
    assert sum(len(upstream_functions(path)) for path in our_libraries()) > 1000
    for name, function in [("ggml-base", "ggml_init"), ("llama", "llama_decode"), ("ggml", "ggml_backend_load")]:
        process = run(decoys, f"getattr(ctypes.CDLL(os.path.join(os.getcwd(), 'lib{name}.so')), '{function}')()")
        assert process.returncode == -signal.SIGABRT
        assert process.stderr == f"the decoy of {function} was called\n"


def test_another_ggml_that_was_loaded_first(decoys: Path, expected: str) -> None:
    process = run(
        decoys,
        """
load_decoys(os.RTLD_LOCAL)
import pyhotexperts as phx
with phx.Model(n_threads=1) as model:
    print(text(model), end="\\0")
""",
    )
    assert lines_of(process) == [expected]


def test_another_ggml_that_is_loaded_later_with_global_symbols(decoys: Path, expected: str) -> None:
    process = run(
        decoys,
        """
import pyhotexperts as phx
with phx.Model(n_threads=1) as model:
    load_decoys(os.RTLD_GLOBAL)
    print(text(model), end="\\0")
    with phx.Model(n_threads=1) as second:
        print(text(second), end="\\0")
print(len(phx.devices()) > 0, end="\\0")
""",
    )
    assert lines_of(process) == [expected, expected, "True"]


# ggml before it had loadable backends, and a libllama with its own ggml hidden in it, are other ggmls too
@pytest.mark.parametrize("libraries", [OURS, ["ggml-base"], ["llama"]], ids=["all", "ggml", "llama"])
@pytest.mark.parametrize("by", ["RTLD_GLOBAL", "LD_PRELOAD"])
def test_another_ggml_with_global_symbols_before_ours_is_an_error(decoys: Path, libraries: list[str], by: str) -> None:
    paths = [str(decoys / f"lib{name}.so.0") for name in libraries]
    code = """
import pyhotexperts as phx
for use in (phx.kv_types, phx.devices, phx.Model):
    try:
        use()
    except phx.PyHotExpertsError as error:
        print(type(error).__name__, error, end="\\0")
"""
    if by == "LD_PRELOAD":
        process = run(decoys, code, LD_PRELOAD=":".join(paths))
    else:
        process = run(decoys, f"for path in {paths!r}:\n    ctypes.CDLL(path, os.RTLD_GLOBAL)\n" + code)
    errors = lines_of(process)
    assert len(errors) == 3
    for error in errors:
        assert re.fullmatch(r"NativeLibraryError .*ggml.*RTLD_GLOBAL.*separate processes", error)


def test_another_ggml_on_the_library_path(decoys: Path, expected: str) -> None:
    code = 'import pyhotexperts as phx\nwith phx.Model(n_threads=1) as model:\n    print(text(model), end="\\0")\n'
    assert lines_of(run(decoys, code, LD_LIBRARY_PATH=str(decoys))) == [expected]


def test_our_symbols_are_not_offered_to_other_libraries(decoys: Path) -> None:
    process = run(
        decoys,
        """
import pyhotexperts as phx
phx.devices()
visible = [name for name in ("ggml_init", "ggml_backend_load", "llama_decode", "phx_init")
           if hasattr(ctypes.CDLL(None), name)]
print(visible, end="\\0")
""",
    )
    assert lines_of(process) == ["[]"]


def test_no_library_has_or_needs_a_name_of_upstream() -> None:
    for library in our_libraries():
        command = [tool("readelf"), "--dynamic", "--wide", str(library)]
        text = subprocess.run(command, check=True, capture_output=True, text=True, env={"LC_ALL": "C"}).stdout
        names = re.findall(r"\((?:SONAME|NEEDED)\).*\[(.*)\]", text)
        assert names, text
        assert not [name for name in names if re.match(r"libggml|libllama|libmtmd", name)], library


def test_no_variable_of_llama_cpp_is_one_for_the_whole_process() -> None:
    """STB_GNU_UNIQUE, GCC's default for statics of inline functions, ignores RTLD_LOCAL: all libraries share them."""
    for library in our_libraries():
        shared = [name for name in exported(library, "u") if re.search("ggml|gguf|llama|llm_", name)]
        assert not shared, f"{library.name}: compile with -fno-gnu-unique"
