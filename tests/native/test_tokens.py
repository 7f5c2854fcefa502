"""Tokens, text, scores, routing and the facts of the embedded model."""

from __future__ import annotations

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts.scoring import nll_of

SAMPLES = ["", " ", "a", "Ein Übermaß an Öl - naïve façade", "数字 😀\u200d🔥", "tab\tnewline\r\n\x07", "x" * 3000]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_tokens(model: phx.Model, text: str) -> None:
    tokens = model.tokenize(text, add_special=False)
    assert model.detokenize(tokens) == text
    assert model.tokenize(text) == [model.info.token_bos, *tokens]
    assert model.tokenize(text.encode()) == [model.info.token_bos, *tokens]


def test_names_of_special_tokens_are_text_unless_asked(model: phx.Model) -> None:
    name = "<|endoftext|>"
    assert model.info.token_eos not in model.tokenize(name, add_special=False)
    assert model.tokenize(name, add_special=False, parse_special=True) == [model.info.token_eos]
    assert model.detokenize([model.info.token_eos]) == ""
    assert model.detokenize([model.info.token_eos], special=True) == name


@pytest.mark.parametrize(
    "prompt",
    [b"\xff\xfe", "\ud800", 3, None, [1, "a"], [1.5], [True], [-1], [8192], [2**40], np.ones((2, 2), int), np.array(5)],
)
def test_what_is_no_prompt_is_refused(model: phx.Model, prompt: object) -> None:
    for call in (model.generate, model.eval, model.score):
        with pytest.raises(phx.PromptError) as failure:
            call(prompt)  # type: ignore[operator]
        assert model.generate("a", max_tokens=1).tokens, failure  # not busy, although the traceback is kept


def test_no_tokens_are_no_prompt(model: phx.Model) -> None:
    with pytest.raises(phx.PromptError, match="empty"):
        model.stream([])
    assert model.generate([]) == []  # no prompts, no generations
    with pytest.raises(phx.PromptError, match="two tokens"):
        model.score("")


def test_an_unknown_parameter_is_named(model: phx.Model) -> None:
    with pytest.raises(phx.ConfigError, match=r"temprature.*temperature"):
        model.generate("a", temprature=1)


def test_logits_need_an_evaluation() -> None:
    with phx.Model(n_threads=1) as fresh, pytest.raises(phx.ConfigError, match="no logits"):
        _ = fresh.logits


def test_score_is_the_log_softmax_of_the_logits(model: phx.Model) -> None:
    score = model.score("The cat sat on the mat.")
    model.reset()
    for i, token in enumerate(score.tokens[:-1]):
        model.eval([token])
        logits = model.logits.astype(np.float64)
        nll = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[score.tokens[i + 1]]
        assert score.nll[i] == pytest.approx(nll, abs=0.3)  # a batch runs other kernels
    assert score.perplexity == pytest.approx(np.exp(score.nll.mean()))


def test_nll_of_agrees_with_the_definition_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 40, (9, 50)).astype(np.float32)
    targets = rng.integers(0, 50, 9).tolist()
    exact = logits.astype(np.longdouble)
    expected = [float(np.log(np.exp(row).sum()) - row[t]) for row, t in zip(exact, targets, strict=True)]
    monkeypatch.setattr("pyhotexperts.scoring.ROW_BLOCK", 100)
    np.testing.assert_allclose(nll_of(logits, targets), expected, rtol=1e-6)


def test_a_text_shorter_than_a_chunk_has_no_perplexity(model: phx.Model) -> None:
    with pytest.raises(phx.PromptError, match="fewer than one chunk"):
        model.perplexity("short")


def test_perplexity_scores_the_second_half_of_each_chunk(model: phx.Model) -> None:
    tokens = np.random.default_rng(1).integers(1, 8192, 200).tolist()
    result = model.perplexity(tokens, n_ctx=64)
    assert (result.n_chunks, result.n_scored) == (3, 3 * 31)
    nll = [model.score([model.info.token_bos, *tokens[64 * k + 1 : 64 * k + 64]]).nll[32:] for k in range(3)]
    assert result.mean_nll == pytest.approx(np.mean(nll), rel=2e-3)
    assert model.perplexity(tokens, n_ctx=64, max_chunks=1).n_scored == 31


def test_routing_tells_the_experts_of_every_token(model: phx.Model) -> None:
    text = "def main():\n    return 0\n" * 90
    routing = model.record_routing(text)
    n_tokens = len(model.tokenize(text))
    assert n_tokens > 512  # more than one micro-batch
    assert routing.layers == (0, 1, 2, 3, 4, 5)
    assert routing.experts.shape == (n_tokens, 6, 8)
    assert routing.experts.dtype == np.uint16
    assert routing.experts.max() < 64
    assert all(len(set(row)) == 8 for row in routing.experts.reshape(-1, 8).tolist())
    assert routing.counts().sum(axis=1).tolist() == [8 * n_tokens] * 6
    np.testing.assert_array_equal(model.record_routing(text).experts, routing.experts)


def test_routing_agrees_with_the_trace_of_training(model: phx.Model, texts) -> None:  # type: ignore[no-untyped-def]
    trace = np.load(texts / "trace.npz")
    domain = trace["domains"].tolist().index("prose")
    tokens = trace["tokens"][domain][:1024].tolist()
    recorded = trace["ids"][domain][:1024]
    ours = model.record_routing(tokens).experts
    same = np.mean(
        [len(set(a) & set(b)) / 8 for a, b in zip(recorded.reshape(-1, 8), ours.reshape(-1, 8), strict=True)]
    )
    assert same > 0.95  # models/README.md: 96.6-98.5 % with Q4_K_M


def test_facts_of_the_embedded_model(model: phx.Model) -> None:
    info = model.info
    assert (info.architecture, info.n_layer, info.n_expert, info.n_expert_used) == ("qwen3moe", 6, 64, 8)
    assert (info.n_embd, info.n_vocab, info.n_ctx_train) == (256, 8192, 2048)
    assert info.n_params == 43_225_088
    assert model.n_ctx == 2048
    assert model.metadata("general.architecture") == "qwen3moe"
    assert model.metadata("no.such.key") is None
    assert model.metadata("\ud800") is None
    for key in (None, b"general.name", "general.name\0x"):
        with pytest.raises(phx.ConfigError, match="key"):
            model.metadata(key)  # type: ignore[arg-type]
    assert [m.name for m in model.memory][-1] == "CPU"
    assert model.memory[-1].context == 6 * 2 * 2 * 64 * 2 * 2048 or any(m.is_gpu for m in model.memory)
