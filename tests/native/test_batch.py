"""Several prompts at once: each continued as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhotexperts as phx

PROMPTS = [
    "The harbour lay quiet",
    "def main():",
    "Il était une fois",
    "Es war",
    "#include <",
    "",
    "NAME\n   copier",
    "La casa " * 30,
    "One more than eight",
    "And the tenth, which waits for a place",
]


@pytest.fixture(scope="module")
def small() -> Iterator[phx.Model]:
    with phx.Model(n_threads=1, n_ctx=1024, n_ubatch=64) as model:
        yield model


def check(model: phx.Model, prompt: Any, result: phx.Generation) -> None:
    """The result's log-probabilities are those of its tokens after this prompt alone."""
    assert result.logprobs is not None
    ids = model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
    score = model.score([*ids, *result.tokens])
    alone = -score.nll[len(ids) - 1 :]
    together = [entry.logprob for entry in result.logprobs]
    # other kernels run for several rows than for one, and a router may tip over: close, not equal
    assert np.abs(alone - together).mean() < 0.05
    assert result.n_prompt_tokens == len(ids)
    assert result.prompt_seconds > 0


def test_every_prompt_is_continued_on_its_own(small: phx.Model) -> None:
    assert small.n_seq_max == 8
    results = small.generate(PROMPTS, temperature=0, max_tokens=24, logprobs=0)
    assert len(results) == len(PROMPTS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        check(small, prompt, result)
        assert result.finish_reason == "length" or result.tokens[-1] == small.info.token_eos
        assert len(result.tokens) <= 24
    assert sum(len(result.tokens) for result in results) > 200


def test_a_batch_of_one_sequence_at_a_time_gives_what_single_calls_give() -> None:
    with phx.Model(n_threads=1, n_seq_max=1) as model:
        assert model.n_seq_max == 1
        results = model.generate(PROMPTS[:4], seed=7, max_tokens=12)
        singles = [model.generate(prompt, seed=7 + i, max_tokens=12) for i, prompt in enumerate(PROMPTS[:4])]
        assert [r.tokens for r in results] == [r.tokens for r in singles]
        assert [r.text for r in results] == [r.text for r in singles]


def test_each_of_equal_prompts_has_a_seed_of_its_own(small: phx.Model) -> None:
    results = small.generate(["The harbour"] * 4, seed=1, max_tokens=16)
    assert len({result.tokens for result in results}) == 4
    assert [r.tokens for r in small.generate(["The harbour"] * 4, seed=1, max_tokens=16)] == [r.tokens for r in results]


def test_prompts_that_do_not_fit_together_wait_for_each_other(small: phx.Model) -> None:
    long = [[5 + i] * 600 for i in range(3)]
    for prompt, result in zip(long, small.generate(long, temperature=0, max_tokens=8, logprobs=0), strict=True):
        check(small, prompt, result)
        assert len(result.tokens) == 8
    # each may take all of the context
    results = small.generate([[7] * 1000, [9] * 1000], temperature=0, max_tokens=500)
    assert [len(r.tokens) for r in results if r.finish_reason == "length"] == [25, 25]


def test_without_max_tokens_the_context_is_shared_equally(small: phx.Model) -> None:
    results = small.generate(["a", "b", "c", "d"], seed=2, logit_bias={small.info.token_eos: -1000})
    assert [r.n_prompt_tokens + len(r.tokens) for r in results] == [1024 // 4 + 1] * 4


def test_stop_strings_schemas_and_ends_are_each_prompts_own(small: phx.Model) -> None:
    results = small.generate(["a", "The", "x"], json_schema={"type": "boolean"}, temperature=0)
    assert {r.text for r in results} <= {"true", "false"}
    free = small.generate(PROMPTS[:2], temperature=0, max_tokens=20)
    stop = free[0].text[5:8]
    stopped = small.generate(PROMPTS[:2], temperature=0, max_tokens=20, stop=stop)
    assert stopped[0].text == free[0].text[: free[0].text.find(stop)]
    assert stopped[0].stop_string == stop


def test_a_batch_leaves_an_empty_context(small: phx.Model) -> None:
    small.generate(["a", "b"], max_tokens=3)
    assert small.n_past == 0
    single = small.generate("The harbour lay quiet", temperature=0, max_tokens=8)
    small.generate(["a", "b"], max_tokens=3)
    assert small.generate("The harbour lay quiet", temperature=0, max_tokens=8).tokens == single.tokens


def test_batches_of_fewer_tokens_than_sequences() -> None:
    sizes = {"n_threads": 1, "n_ctx": 512, "n_ubatch": 2}
    with phx.Model(**sizes, n_batch=1) as one, phx.Model(**sizes, n_batch=3) as three:
        for model in (one, three):
            results = model.generate(PROMPTS[:5], max_tokens=4, temperature=0, logprobs=1)
            for prompt, result in zip(PROMPTS[:5], results, strict=True):
                check(model, prompt, result)


def test_no_prompts_give_no_results(small: phx.Model) -> None:
    assert small.generate([], max_tokens=3) == []
    with pytest.raises(phx.PromptError, match="empty"):
        small.stream([])
    with pytest.raises(phx.ConfigError, match="max_tokens"):
        small.generate([], max_tokens=-2)


def test_bad_batches_are_refused(small: phx.Model) -> None:
    with pytest.raises(phx.PromptError, match="no token of this model"):
        small.generate([[1, 2], [99999]])
    with pytest.raises(phx.PromptError, match="expected text"):
        small.generate(["a", None])  # type: ignore[list-item]
    with pytest.raises(phx.ContextFullError, match="1024"):
        small.generate(["a", [5] * 1024])
    with pytest.raises(phx.ConfigError, match="reuse_prefix"):
        small.generate(["a"], reuse_prefix=True)  # type: ignore[call-overload]
    for n in (0, 257, "many"):
        with pytest.raises(phx.ConfigError, match="n_seq_max"):
            phx.Model(n_seq_max=n)  # type: ignore[arg-type]
    assert small.generate(["a"], max_tokens=1)[0].tokens


def test_an_error_in_the_middle_leaves_the_model_usable(small: phx.Model) -> None:
    with pytest.raises(phx.DecodeError):
        small.generate(["a", "b"], grammar="root ::= <[99999999]>")
    assert small.n_past == 0
    assert small.generate(["a", "b"], max_tokens=2)


def test_a_batch_costs_no_more_memory_than_one_text() -> None:
    with phx.Model(n_threads=1, n_seq_max=1) as one, phx.Model(n_threads=1, n_seq_max=8) as eight:
        assert eight.memory[-1].needed <= one.memory[-1].needed * 1.01


def test_a_model_without_a_tokenizer_takes_batches_of_ids(tmp_path: Path) -> None:
    from test_other_models import write_dense

    with phx.Model(write_dense(tmp_path / "dense.gguf"), n_threads=1) as dense:
        results = dense.generate([[1, 2, 3], [4], np.array([5, 6])], max_tokens=4, temperature=0)
        assert [len(r.tokens) for r in results] == [4, 4, 4]
