"""Generation, one token per native call, as an iterator that can be stopped at any time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from pyhotexperts import _ffi
from pyhotexperts.errors import PyHotExpertsError
from pyhotexperts.exclusive import Claim, Exclusive
from pyhotexperts.results import Chunk, FinishReason, Generation
from pyhotexperts.sampling import Sampling, seed_value
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
        out = ffi.new("phx_sampler **")
        _ffi.check(lib.phx_sampler_new(model, params, out), "making a sampler")
        self.handle = out[0]
        self._free = weakref.finalize(self, lib.phx_sampler_free, self.handle)
        self._free.atexit = False

    def close(self) -> None:
        """Free the native sampler, once."""
        self._free()


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
        if self._result is None:
            raise PyHotExpertsError("the generation is not finished: read the stream to its end first")
        return self._result

    def close(self) -> None:
        """Stop generating and free the model for other calls.

        Raises
        ------
        BusyError
            If another thread is waiting for the next chunk.
        """
        with self._claim():
            self._release()

    def _claim(self) -> Claim:
        return self._exclusive.claim("the stream is in use by another thread: stop it there")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run(
    context: Any,
    sampler: Sampler,
    evaluate: Callable[[], int],
    n_prompt: int,
    n_room: int,
    sampling: Sampling,
    piece_of: Callable[[int], bytes],
    is_end: Callable[[int], bool],
) -> Iterator[Chunk | Generation]:
    """Evaluate the prompt, then yield chunks, and at last the `Generation`.

    Parameters
    ----------
    evaluate
        Puts the prompt into the context; returns how many of its tokens were there already.
    n_room
        Tokens that the context can still take after the prompt.
    piece_of
        The bytes of a token's text.
    is_end
        Whether a token ends the generation.
    """
    ffi, lib, clock = _ffi.ffi, _ffi.lib, time.perf_counter
    text = TextAssembler(sampling.stop_strings)
    parts: list[str] = []
    tokens: list[int] = []
    pending: list[int] = []  # tokens whose text is not shown yet
    # The last token needs no place in the context: it is not evaluated.
    limit = n_room + 1 if sampling.max_tokens is None else min(sampling.max_tokens, n_room + 1)
    finish: FinishReason = "length"

    mark = clock()
    n_reused = evaluate()
    token = ffi.new("int32_t *")
    _ffi.check(lib.phx_sample(context, sampler.handle, -1, token), "choosing a token")
    prompt_seconds = clock() - mark
    mark = clock()  # stopped while the caller has a chunk
    generation_seconds = 0.0
    while True:
        chosen = token[0]
        tokens.append(chosen)
        pending.append(chosen)
        if is_end(chosen):
            finish = "stop"
            break
        piece = piece_of(chosen)
        ready = text.push(piece)
        if text.stop_string is None and len(tokens) == limit:
            ready += text.finish()
        if ready or not piece:
            parts.append(ready)
            generation_seconds += clock() - mark
            yield Chunk(ready, tuple(pending))
            mark = clock()
            pending.clear()
        if text.stop_string is not None:
            finish = "stop"
            break
        if len(tokens) == limit:
            break
        _ffi.check(lib.phx_step(context, sampler.handle, chosen, token), "generating a token")
    generation_seconds += clock() - mark
    if pending:
        rest = text.finish()
        parts.append(rest)
        yield Chunk(rest, tuple(pending))
    _ffi.drain_log()
    yield Generation(
        text="".join(parts),
        tokens=tuple(tokens),
        finish_reason=finish,
        stop_string=text.stop_string,
        n_prompt_tokens=n_prompt,
        n_reused_tokens=n_reused,
        prompt_seconds=prompt_seconds,
        generation_seconds=generation_seconds,
    )
