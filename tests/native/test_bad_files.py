"""Files that are no models, or damaged ones: an exception that says what is wrong, never an abort."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

import pyhotexperts as phx

# Loads the files that are named on standard input, one a line, and reports each outcome on a line of its own.
LOADER = """
import sys
import pyhotexperts as phx
for path in sys.stdin.read().split("\\n"):
    try:
        with phx.Model(path, n_threads=1, n_ctx=256) as model:
            model.generate("Hello there", max_tokens=2)
        print("loaded", flush=True)
    except phx.PyHotExpertsError as e:
        print(type(e).__name__, flush=True)
"""


def refuse(path: Path, kind: type[phx.PyHotExpertsError], *words: str) -> None:
    with pytest.raises(kind) as failure:
        phx.Model(path)
    for word in (path.name, *words):
        assert word in str(failure.value)


def test_missing_file(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing.gguf", phx.ModelNotFoundError, "no file")


def test_folder(tmp_path: Path) -> None:
    refuse(tmp_path, phx.ModelLoadError, "folder")


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    refuse(path, phx.ModelLoadError, "empty")


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("Dear diary")
    refuse(path, phx.ModelLoadError, "no GGUF", "Dear")


def test_unreadable_path(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refuse(file / "model.gguf", phx.ModelLoadError, "cannot read")


@pytest.mark.parametrize("path", [3, object(), "zero\0byte", "\ud800"])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(phx.ConfigError, match="path"):
        phx.Model(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4, 5, 24, 100, 5_000, 250_000, 1_000_000, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(phx.embedded_model().read_bytes()[:size])
    refuse(path, phx.ModelLoadError, "incomplete or damaged: download or copy it again")


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "perceptron1958")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse(path, phx.ModelLoadError, "unknown model architecture", "perceptron1958")


def test_file_name_outside_ascii(tmp_path: Path) -> None:
    path = tmp_path / "mödel 模型.gguf"
    path.symlink_to(phx.embedded_model())
    with phx.Model(path, n_threads=1) as model:
        assert model.generate("a", max_tokens=1).tokens
    broken = tmp_path / "kaputt ü.gguf"
    broken.write_bytes(b"GGUF")
    refuse(broken, phx.ModelLoadError)


def test_a_failure_leaves_the_process_usable(tmp_path: Path) -> None:
    test_truncated_file(tmp_path, 250_000)
    with phx.Model(n_threads=1) as model:
        assert model.generate("a", max_tokens=1).tokens


@pytest.mark.parametrize("n_ctx", [50_000_000, 2**31 - 1])
def test_a_context_larger_than_memory_is_refused_before_it_is_taken(n_ctx: int) -> None:
    with pytest.raises(phx.OutOfMemoryError, match="n_ctx") as failure:
        phx.Model(n_ctx=n_ctx)
    assert "GiB" in str(failure.value)


def test_damaged_files_never_end_the_process(tmp_path: Path) -> None:
    """Bytes of header and metadata are changed at random (fixed seed), where a parser believes what it reads."""
    rng = random.Random(20_261_129)
    good = phx.embedded_model().read_bytes()
    paths = []
    for i in range(40):
        data = bytearray(good)
        for _ in range(rng.choice([1, 2, 5])):
            at = rng.randrange(4, rng.choice([64, 600, 4000, 250_000]))
            data[at] = rng.choice([0, 255, rng.randrange(256), data[at] ^ 1 << rng.randrange(8)])
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", LOADER], input="\n".join(map(str, paths)), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    outcomes = run.stdout.split()
    assert len(outcomes) == len(paths)
    assert set(outcomes) <= {"loaded", "ModelLoadError", "OutOfMemoryError", "UnavailableError", "ConfigError"}
    assert outcomes.count("ModelLoadError") > 10
