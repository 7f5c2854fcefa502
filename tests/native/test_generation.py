"""Generation on the embedded model: determinism, limits, stop strings, streams, who may call when."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import pyhotexperts as phx

PROMPT = "The harbour lay quiet under the snow, and the old captain"


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def test_greedy_text_is_the_most_likely_token_each_time(model: phx.Model) -> None:
    result = model.generate(PROMPT, temperature=0, max_tokens=12)
    model.reset()
    model.eval(PROMPT)
    for token in result.tokens:
        assert token == int(model.logits.argmax())
        model.eval([token])
    assert result.finish_reason == "length"
    assert len(result.tokens) == 12
    assert result.n_prompt_tokens == len(model.tokenize(PROMPT))
    assert result.prompt_speed > 0
    assert result.generation_speed > 0


def test_a_seed_makes_the_text_repeatable(model: phx.Model) -> None:
    first = model.generate(PROMPT, seed=5, max_tokens=24)
    assert model.generate(PROMPT, seed=5, max_tokens=24).tokens == first.tokens
    assert model.generate(PROMPT, seed=6, max_tokens=24).tokens != first.tokens


def test_the_models_seed_is_the_default() -> None:
    with phx.Model(seed=5, n_threads=1) as seeded:
        again = seeded.generate(PROMPT, max_tokens=24)
        assert seeded.generate(PROMPT, max_tokens=24).tokens == again.tokens
        assert seeded.generate(PROMPT, seed=5, max_tokens=24).tokens == again.tokens


def test_a_stream_gives_the_text_of_generate(model: phx.Model) -> None:
    whole = model.generate(PROMPT, seed=5, max_tokens=40)
    with model.stream(PROMPT, seed=5, max_tokens=40) as stream:
        chunks = list(stream)
    assert "".join(c.text for c in chunks) == whole.text == stream.result.text
    assert tuple(t for c in chunks for t in c.tokens) == whole.tokens == stream.result.tokens
    assert len(chunks) > 20


def test_bytes_and_tokens_are_prompts_too(model: phx.Model) -> None:
    whole = model.generate(PROMPT, temperature=0, max_tokens=8).tokens
    assert model.generate(PROMPT.encode(), temperature=0, max_tokens=8).tokens == whole
    assert model.generate(np.array(model.tokenize(PROMPT)), temperature=0, max_tokens=8).tokens == whole


def test_a_stop_string_across_tokens_ends_the_text(model: phx.Model) -> None:
    free = model.generate(PROMPT, temperature=0, max_tokens=30)
    pieces = [model.detokenize([t]) for t in free.tokens]
    stop = pieces[4][-1] + pieces[5][:2]
    assert free.text.find(stop) > 0
    stopped = model.generate(PROMPT, temperature=0, max_tokens=30, stop=["never to be seen", stop])
    assert stopped.text == free.text[: free.text.find(stop)]
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    assert len(stopped.tokens) < 10


def test_the_end_token_ends_the_text(model: phx.Model) -> None:
    def texts() -> Iterator[phx.Generation]:
        for seed in range(50):
            yield model.generate("Ende.\n", seed=seed, temperature=1.5, top_k=0, top_p=1, min_p=0, max_tokens=200)

    result = next(r for r in texts() if r.finish_reason == "stop")
    assert result.tokens[-1] == model.info.token_eos
    assert model.info.token_eos not in result.tokens[:-1]
    assert result.stop_string is None


def test_an_empty_prompt_starts_from_bos(model: phx.Model) -> None:
    result = model.generate("", temperature=0, max_tokens=4)
    assert result.n_prompt_tokens == 1
    assert result.tokens == model.generate([model.info.token_bos], temperature=0, max_tokens=4).tokens


def test_a_full_context_ends_the_text() -> None:
    with phx.Model(n_ctx=256, n_threads=1) as small:
        result = small.generate(PROMPT, seed=3, temperature=1)
        # every position of the context is used, and the last token needs none
        if result.finish_reason == "length":
            assert result.n_prompt_tokens + len(result.tokens) == small.n_ctx + 1
        prompt = [5] * (small.n_ctx - 1)
        assert len(small.generate(prompt, temperature=0).tokens) <= 2
        with pytest.raises(phx.ContextFullError, match="256"):
            small.generate([5] * small.n_ctx)
        with pytest.raises(phx.ContextFullError, match="n_ctx"):
            small.score([5] * (small.n_ctx + 1))
        small.reset()
        small.eval([5] * 200)
        with pytest.raises(phx.ContextFullError, match="reset"):
            small.eval([5] * 57)
        assert small.n_past == 200


def test_penalties_change_the_choice(model: phx.Model) -> None:
    plain = model.generate(PROMPT, temperature=0, max_tokens=60).tokens
    penalised = model.generate(PROMPT, temperature=0, max_tokens=60, repeat_penalty=1.3, repeat_last_n=256).tokens
    assert len(set(penalised)) > len(set(plain))
    for name in ("presence_penalty", "frequency_penalty"):
        assert model.generate(PROMPT, temperature=0, max_tokens=60, **{name: 2.0}).tokens != plain
    assert model.generate(PROMPT, temperature=0, max_tokens=60, repeat_penalty=1.3, repeat_last_n=0).tokens == plain


def test_top_k_of_one_is_greedy(model: phx.Model) -> None:
    greedy = model.generate(PROMPT, temperature=0, max_tokens=10).tokens
    assert model.generate(PROMPT, temperature=1.5, top_k=1, max_tokens=10).tokens == greedy
    assert model.generate(PROMPT, temperature=1.5, top_k=0, top_p=0.0, max_tokens=10).tokens == greedy
    assert model.generate(PROMPT, temperature=1.5, top_k=0, top_p=1, min_p=1.0, max_tokens=10).tokens == greedy


def test_the_size_of_the_micro_batch_does_not_change_the_outcome(model: phx.Model) -> None:
    text = PROMPT * 6
    model.eval(text)
    expected = model.logits
    with phx.Model(n_ubatch=7, n_threads=1) as other:
        other.eval(text)
        # other kernels run for 7 rows than for many, and a router may tip over: close, not equal
        np.testing.assert_allclose(softmax(other.logits), softmax(expected), atol=0.02)


def test_one_caller_at_a_time(model: phx.Model) -> None:
    stream = model.stream(PROMPT, temperature=0, max_tokens=20)
    next(stream)
    for call in (
        lambda: model.generate(PROMPT),
        lambda: model.score(PROMPT),
        lambda: model.logits,
        model.reset,
    ):
        with pytest.raises(phx.BusyError, match="in use"):
            call()
    with pytest.raises(phx.PyHotExpertsError, match="not finished"):
        _ = stream.result
    stream.close()
    stream.close()
    assert list(stream) == []
    assert model.generate(PROMPT, temperature=0, max_tokens=2).text


def test_a_second_thread_gets_busy_error(model: phx.Model) -> None:
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(model.generate(PROMPT, max_tokens=2))
        except phx.BusyError as e:
            outcome.append(e)

    with model.stream(PROMPT, max_tokens=5) as stream:
        next(stream)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert isinstance(outcome[0], phx.BusyError)


def test_a_dropped_stream_frees_the_model(model: phx.Model) -> None:
    stream = model.stream(PROMPT, max_tokens=20)
    next(stream)
    del stream
    gc.collect()
    assert model.generate(PROMPT, max_tokens=1).tokens


def test_an_error_in_the_caller_leaves_the_model_usable(model: phx.Model) -> None:
    def show_nothing() -> None:
        with model.stream(PROMPT, max_tokens=20) as stream:
            for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        show_nothing()
    assert model.generate(PROMPT, max_tokens=1).tokens


def test_a_closed_model_says_so() -> None:
    model = phx.Model(n_threads=1)
    stream = model.stream(PROMPT, max_tokens=3)
    stream.close()
    model.close()
    model.close()
    for call in (
        lambda: model.generate(PROMPT),
        lambda: model.stream(PROMPT),
        lambda: model.tokenize("a"),
        lambda: model.detokenize([1]),
        lambda: model.score(PROMPT),
        lambda: model.eval([1]),
        lambda: model.logits,
        lambda: model.n_past,
        lambda: model.record_routing(PROMPT),
        lambda: model.metadata("general.name"),
        model.reset,
        model.__enter__,
    ):
        with pytest.raises(phx.ClosedError, match="closed"):
            call()
    assert model.info.n_expert == 64


def test_closing_the_model_ends_an_open_stream() -> None:
    with phx.Model(n_threads=1) as model:
        stream = model.stream(PROMPT, max_tokens=30)
        next(stream)
    assert list(stream) == []
    with pytest.raises(phx.PyHotExpertsError, match="not finished"):
        _ = stream.result


def test_a_model_in_use_by_another_thread_is_not_closed() -> None:
    model = phx.Model(n_threads=1)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            model.perplexity([7] * 8000, n_ctx=1000)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # until it has the model
        try:
            model.reset()
        except phx.BusyError:
            break
    with pytest.raises(phx.BusyError, match="another thread"):
        model.close()
    thread.join()
    model.close()
    assert not failures


def test_a_dropped_model_is_freed() -> None:
    model = phx.Model(n_threads=1)
    free = model._close
    del model
    gc.collect()
    assert not free.alive


def test_several_models_in_one_process(model: phx.Model) -> None:
    expected = model.generate(PROMPT, temperature=0, max_tokens=10).tokens
    with phx.Model(n_threads=1) as second:
        stream = model.stream(PROMPT, temperature=0, max_tokens=10)
        next(stream)
        assert second.generate(PROMPT, temperature=0, max_tokens=10).tokens == expected
        list(stream)
        assert stream.result.tokens == expected


def test_one_line_says_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pyhotexperts"), phx.Model(n_threads=1):
        pass
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 1
    assert "offload" in lines[0]
    assert "GiB" in lines[0]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
