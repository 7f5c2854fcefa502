"""Models in several files: any of them stands for all, and files that are missing or do not belong are named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from test_geometry_models import small
from test_other_models import write_dense

import pyhotexperts as phx


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The same model in one file (model.gguf) and in several."""
    write_dense(tmp_path / "model.gguf")
    write_dense(tmp_path / "split.gguf", tensors_per_file=8)
    files = sorted(tmp_path.glob("split-*.gguf"))
    assert [f.name for f in files] == [f"split-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return files


def test_any_file_stands_for_all(parts: list[Path]) -> None:
    with phx.Model(parts[0].with_name("model.gguf"), n_threads=1) as whole:
        expected = whole.generate([1, 2, 3], temperature=0, max_tokens=12).tokens
        size = whole.info.size
    for part in parts:
        with phx.Model(part, n_threads=1, load_mode="copy") as model:
            assert model.generate([1, 2, 3], temperature=0, max_tokens=12).tokens == expected
            assert model.info.size == size
            assert model.path == str(parts[0])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_file_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    for part in parts:
        if part.exists():
            with pytest.raises(phx.ModelNotFoundError, match=f"3 files are missing: .*split-0000{missing + 1}-of"):
                phx.Model(part)


def test_many_missing_files_are_counted(parts: list[Path], tmp_path: Path) -> None:
    write_dense(tmp_path / "fine.gguf", tensors_per_file=1)
    files = sorted(tmp_path.glob("fine-*.gguf"))
    for file in files[1:]:
        file.unlink()
    with pytest.raises(phx.ModelNotFoundError, match=f"and {len(files) - 4} more"):
        phx.Model(files[0])


def test_a_file_under_the_name_of_another_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(phx.ModelLoadError, match=r"00003-of-00003.gguf does not .* it is file 2, not 3, of 3"):
        phx.Model(parts[0])
    with pytest.raises(phx.ModelLoadError, match=r"its name must end with -00002-of-00003.gguf"):
        phx.Model(parts[2])


def test_a_file_of_another_model_is_refused(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_dense(other / "split.gguf", tensors_per_file=9)  # as many tensors in all, in other files
    shutil.copy(other / parts[1].name, parts[1])
    with pytest.raises(phx.ModelLoadError, match=r"hold \d+ tensors, not 21|does not belong"):
        phx.Model(parts[0])
    shutil.copy(parts[0].with_name("model.gguf"), parts[1])  # a whole model
    with pytest.raises(phx.ModelLoadError, match=r"it is file 1 of 1"):
        phx.Model(parts[0])


def test_damaged_files_are_refused(parts: list[Path]) -> None:
    parts[2].write_bytes(b"GGUF and then nothing that makes sense")
    with pytest.raises(phx.ModelLoadError, match="00003-of-00003"):
        phx.Model(parts[0])
    parts[2].write_bytes(b"")
    with pytest.raises(phx.ModelLoadError, match=r"00003-of-00003.gguf is empty"):
        phx.Model(parts[0])


def test_another_name_is_refused(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("first.gguf"))
    with pytest.raises(phx.ModelLoadError, match=r"file 1 of 3: its name must end with -00001-of-00003.gguf"):
        phx.Model(renamed)


def test_a_name_that_looks_like_a_part_may_be_a_whole_model(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "model-00002-of-00005.gguf")
    with phx.Model(path, n_threads=1) as model:
        assert model.generate([1], max_tokens=2).tokens


def test_odd_types_in_a_later_file_are_found(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("split.count", 3)  # the wrong type

    with pytest.raises(phx.ModelLoadError, match=r"split\.count has the wrong type"):
        phx.Model(write_dense(tmp_path / "odd.gguf", add))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("adapter", "LoRA adapter.*merge it into its base model"), ("mmproj", "projector of a multimodal")],
)
def test_adapters_and_projectors_are_no_models(tmp_path: Path, kind: str, message: str) -> None:
    path = write_dense(tmp_path / "extra.gguf", lambda writer: writer.add_type(kind))
    with pytest.raises(phx.ModelLoadError, match=message):
        phx.Model(path)


def test_a_mixture_of_experts_in_several_files(make_model: Any, tmp_path: Path) -> None:
    g = small(make_model, "qwen3-30b-a3b")
    make_model.write("qwen3-30b-a3b", g, tmp_path / "whole.gguf")
    make_model.write("qwen3-30b-a3b", g, tmp_path / "parts.gguf", split_max_size=4_000_000)
    files = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(files) > 3
    outcomes = []
    for path in (tmp_path / "whole.gguf", files[2]):
        with phx.Model(path, n_ctx=256, n_threads=1) as model:
            outcomes.append((model.generate([5, 6, 7], temperature=0, max_tokens=12).tokens, model.memory[-1].model))
    assert outcomes[0] == outcomes[1]
