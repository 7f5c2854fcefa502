"""Kept prompts and batches on models that remember in other ways: recurrent layers, sliding windows, latent keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_geometry_models import small

import pyhotexperts as phx

PROMPT = list(range(40, 240))
NAMES = {"qwen3.5-122b-a10b": True, "gpt-oss-120b": False, "deepseek-v2": False}  # whether it has recurrent layers


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, make_model: Any, tmp_path_factory: Any) -> tuple[str, Path]:
    name = request.param
    g = small(make_model, name)
    if name == "deepseek-v2":
        g = replace(g, n_ff_shared=g.n_ff * g.n_shared)  # type: ignore[type-var, attr-defined]
    path = tmp_path_factory.mktemp(name) / "model.gguf"
    make_model.write(name, g, path)
    return name, path


def test_what_is_kept_is_right(named: tuple[str, Path]) -> None:
    name, path = named
    with phx.Model(path, n_ctx=512, n_ubatch=64, n_threads=1) as model:
        assert model.n_seq_max == (1 if NAMES[name] else 8)
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "reuse_prefix": True}
        first = model.generate(PROMPT, **options)
        longer = [*PROMPT, *first.tokens, 7, 8, 9]
        n_known = len(PROMPT) + 5  # the last token was not evaluated
        assert model.generate(longer, max_tokens=1, temperature=0, reuse_prefix=True).n_reused_tokens == n_known
        check_logits(model, longer)
        other = [*PROMPT[:150], 11, *PROMPT[151:]]
        n_reused = model.generate(other, max_tokens=1, temperature=0, reuse_prefix=True).n_reused_tokens
        assert n_reused == (0 if NAMES[name] else 150)
        check_logits(model, other)


def check_logits(model: phx.Model, tokens: list[int]) -> None:
    """What the context gives after these tokens is what it gives when all of them are evaluated anew."""
    kept = model.logits
    model.reset()
    model.eval(tokens)
    assert np.abs(kept - model.logits).max() < 0.05 * np.abs(kept).max()
    assert kept.argmax() == model.logits.argmax()


def test_a_batch_is_right(named: tuple[str, Path]) -> None:
    _, path = named
    with phx.Model(path, n_ctx=1024, n_ubatch=64, n_seq_max=3, n_threads=1) as model:
        prompts = [PROMPT[i : i + 90] for i in (0, 20, 50, 70)]
        for prompt, result in zip(
            prompts, model.generate(prompts, temperature=0, max_tokens=8, logprobs=0), strict=True
        ):
            assert result.logprobs
            nll = model.score([*prompt, *result.tokens]).nll[len(prompt) - 1 :]
            together = [entry.logprob for entry in result.logprobs]
            assert np.abs(-nll - together).mean() < 0.1
