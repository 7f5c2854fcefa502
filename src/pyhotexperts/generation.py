"""Generation, one token per native call, as an iterator that can be stopped at any time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyhotexperts import _ffi
from pyhotexperts.context import Context
from pyhotexperts.errors import PyHotExpertsError
from pyhotexperts.exclusive import Claim, Exclusive
from pyhotexperts.results import Chunk, FinishReason, Generation, TokenLogprob
from pyhotexperts.sampling import Sampling, seed_value
from pyhotexperts.scoring import token_logprob
from pyhotexperts.text import TextAssembler


class Sampler:
    """A native sampler, freed by `close()` or with this object."""

    def __init__(self, model: Any, sampling: Sampling) -> None:
        ffi, lib = _ffi.ffi, _ffi.lib
        params = ffi.new("phx_sampler_params *")
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "repeat_last_n",
        ):
            setattr(params, name, getattr(sampling, name))
        params.seed = seed_value(sampling.seed)
        biases = sampling.logit_bias or {}
        tokens = ffi.new("int32_t[]", list(biases))  # native memory that lives until the call is over
        values = ffi.new("float[]", list(biases.values()))
        params.bias_tokens, params.biases, params.n_bias = tokens, values, len(biases)
        grammar = ffi.NULL if sampling.gbnf is None else ffi.new("char[]", sampling.gbnf.encode())
        params.grammar = grammar
        out = ffi.new("phx_sampler **")
        status = lib.phx_sampler_new(model, params, out)
        _ffi.check(status, "cannot generate")
        self.handle = out[0]
        self._free = weakref.finalize(self, lib.phx_sampler_free, self.handle)
        self._free.atexit = False

    def accept(self, ids: Sequence[int]) -> None:
        """Tell it of the prompt, for the penalties."""
        _ffi.check(_ffi.lib.phx_sampler_accept(self.handle, ids, len(ids)), "handing over the prompt")

    def choose(self, context: Context, row: int) -> int:
        """The token after an output row of the last evaluation, -1 = the last row."""
        token = _ffi.ffi.new("int32_t *")
        _ffi.check(_ffi.lib.phx_sample(context.handle, self.handle, row, token), "choosing a token")
        return int(token[0])

    def close(self) -> None:
        """Free the native sampler, once."""
        self._free()


NOT_PICKLED = "a stream cannot be copied or pickled: its `result` can"


def finished(result: Generation | None) -> Generation:
    """The result of a stream that was read to its end."""
    if result is None:
        raise PyHotExpertsError("the generation is not finished: read the stream to its end first")
    return result


class Stream(Iterator[Chunk]):
    """A running generation: iterate over it for `Chunk`s; then `result` has the whole.

    The model is busy until the stream is exhausted, closed or dropped. `close()` may be called twice; the stream
    is also a context manager.
    """

    def __init__(self, chunks: Iterator[Chunk | Generation], release: Callable[[], None]) -> None:
        self._chunks = chunks
        self._release = weakref.finalize(self, release)
        self._release.atexit = False
        self._exclusive = Exclusive(same_thread=True)  # for the thread that is in __next__ or close
        self._result: Generation | None = None

    def __next__(self) -> Chunk:
        with self._claim():
            if not self._release.alive:
                raise StopIteration
            try:
                item = next(self._chunks)
            except BaseException:
                self._release()
                raise
            if isinstance(item, Generation):
                self._result = item
                self._release()
                raise StopIteration
            return item

    @property
    def result(self) -> Generation:
        """The finished generation.

        Raises
        ------
        PyHotExpertsError
            If the stream was not read to its end.
        """
        return finished(self._result)

    def close(self) -> None:
        """Stop generating and free the model for other calls.

        Raises
        ------
        BusyError
            If another thread is waiting for the next chunk.
        """
        with self._claim():
            self._release()

    def __reduce__(self) -> str:
        raise TypeError(NOT_PICKLED)

    def _claim(self) -> Claim:
        return self._exclusive.claim("the stream is in use by another thread: stop it there")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Writing:
    """A generation that grows token by token.

    Parameters
    ----------
    limit
        Most tokens to take.
    piece_of
        The bytes of a token's text.
    is_end
        Whether a token ends the generation.
    """

    def __init__(
        self, sampling: Sampling, limit: int, piece_of: Callable[[int], bytes], is_end: Callable[[int], bool]
    ) -> None:
        self.limit = limit
        self._piece_of = piece_of
        self._is_end = is_end
        self._text = TextAssembler(sampling.stop_strings)
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self._n_shown = 0  # tokens whose text was given
        self.finish_reason: FinishReason | None = None  # None = not finished

    def add(self, token: int, logprob: TokenLogprob | None = None) -> Chunk | None:
        """Take the next token; returns what can be shown now, and at the end all that is left."""
        self._tokens.append(token)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        piece = b""
        if self._is_end(token):
            self.finish_reason = "stop"
            ready = self._text.finish()
        else:
            piece = self._piece_of(token)
            ready = self._text.push(piece)
            if self._text.stop_string is not None:
                self.finish_reason = "stop"
            elif len(self._tokens) == self.limit:
                self.finish_reason = "length"
                ready += self._text.finish()
        if piece and not ready and self.finish_reason is None:
            return None
        self._parts.append(ready)
        new = slice(self._n_shown, len(self._tokens))
        self._n_shown = len(self._tokens)
        logprobs = None if self._logprobs is None else tuple(self._logprobs[new])
        return Chunk(ready, tuple(self._tokens[new]), logprobs)

    def result(self, n_prompt: int, n_reused: int, prompt_seconds: float, generation_seconds: float) -> Generation:
        """The whole, when it is finished."""
        return Generation(
            text="".join(self._parts),
            tokens=tuple(self._tokens),
            finish_reason=self.finish_reason or "length",
            stop_string=self._text.stop_string,
            n_prompt_tokens=n_prompt,
            n_reused_tokens=n_reused,
            prompt_seconds=prompt_seconds,
            generation_seconds=generation_seconds,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


def run(
    context: Context,
    sampler: Sampler,
    writing: Writing,
    evaluate: Callable[[], int],
    n_prompt: int,
    n_logprobs: int | None,
) -> Iterator[Chunk | Generation]:
    """Evaluate the prompt, then yield chunks, and at last the `Generation`.

    Parameters
    ----------
    evaluate
        Puts the prompt into the context; returns how many of its tokens were there already.
    n_logprobs
        The most likely tokens to tell beside each chosen one, None = no log-probabilities.
    """
    lib, clock = _ffi.lib, time.perf_counter
    handle = context.handle
    token = _ffi.ffi.new("int32_t *")
    mark = clock()
    n_reused = evaluate()
    token[0] = sampler.choose(context, -1)
    prompt_seconds = clock() - mark
    mark = clock()  # stopped while the caller has a chunk
    generation_seconds = 0.0
    while True:
        logprob = None if n_logprobs is None else token_logprob(context.logits(1)[0], token[0], n_logprobs)
        chunk = writing.add(token[0], logprob)
        if chunk is not None:
            generation_seconds += clock() - mark
            yield chunk
            mark = clock()
        if writing.finish_reason is not None:
            break
        _ffi.check(lib.phx_step(handle, sampler.handle, token[0], token), "generating a token")
    _ffi.drain_log()
    yield writing.result(n_prompt, n_reused, prompt_seconds, generation_seconds)
