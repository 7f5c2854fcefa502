"""Perplexity of the embedded model on the validation texts, against the figures measured with llama.cpp itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import pyhotexperts as phx

# ../shared/models/README.md, column "llama.cpp Q4_K_M": all chunks of 1024 tokens.
WHOLE_TEXT = {"prose": 17.553, "dict": 9.546, "tech": 13.294, "python": 8.296, "fr": 7.746, "de": 9.367}

# The first 8 chunks, measured with the plain C++ program over llama.h that gave the column above.
FIRST_8_CHUNKS = {"prose": 16.8088, "dict": 7.2080, "tech": 6.2538, "python": 6.3998, "fr": 5.0225, "de": 9.6109}


@pytest.mark.parametrize("name", WHOLE_TEXT)
def test_first_8_chunks(model: phx.Model, texts: Path, name: str, report_figure: Callable[[str], None]) -> None:
    result = model.perplexity((texts / f"val_{name}.txt").read_text(encoding="utf-8"), max_chunks=8)
    report_figure(f"perplexity, first 8 chunks of {name}: {result.perplexity:.4f} (llama.cpp {FIRST_8_CHUNKS[name]})")
    assert result.n_chunks == 8
    assert result.perplexity == pytest.approx(FIRST_8_CHUNKS[name], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_TEXT)
def test_whole_text(texts: Path, name: str, report_figure: Callable[[str], None]) -> None:
    with phx.Model() as model:
        result = model.perplexity((texts / f"val_{name}.txt").read_text(encoding="utf-8"))
    report_figure(f"perplexity, all of {name}: {result.perplexity:.3f} (llama.cpp {WHOLE_TEXT[name]})")
    assert result.perplexity == pytest.approx(WHOLE_TEXT[name], rel=0.01)
