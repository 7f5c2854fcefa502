"""`Model`: a loaded GGUF model with one context."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from pyhotexperts import _ffi, batch, generation, hub, loading, machine, placement, scoring, shards
from pyhotexperts import cache as hot_cache
from pyhotexperts.async_stream import AsyncStream
from pyhotexperts.cache import Cache
from pyhotexperts.chat import ChatPrompts
from pyhotexperts.chat_template import Message, check_template
from pyhotexperts.context import Context
from pyhotexperts.errors import (
    ClosedError,
    ConfigError,
    ContextFullError,
    OutOfMemoryError,
    PromptError,
    UnavailableError,
)
from pyhotexperts.exclusive import Claim, Exclusive
from pyhotexperts.offload import HotExperts, Offload
from pyhotexperts.results import DeviceMemory, Generation, ModelInfo, Perplexity, Routing, Score
from pyhotexperts.sampling import MAX_SEED, Sampling
from pyhotexperts.validation import boolean, choice, integer
from pyhotexperts.vocab import Batch, Prompt, Vocab, is_batch

MAX_N_CTX = 2**31 - 1
MAX_N_SEQ = 256  # upstream's limit
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
EXACT_TYPES = ("f32", "f16", "bf16")  # of a KV cache, not quantised


class Model:
    """A language model in GGUF format, loaded and ready to generate.

    One caller at a time: a call while another one runs, or while a stream is open, raises `BusyError`.

    Parameters
    ----------
    path
        The GGUF file (any one of them if there are several), None = the small model that is part of the package.
    offload
        Where the weights go: `cpu_experts()`, `layers(n_cpu_moe)`, `full_gpu()`, `hot_experts(...)`, the name of one
        that needs no number, or "auto": everything on the GPU if it fits, else hot experts when available, else CPU
        experts. `Model.offload` is the mode in effect.
    n_gpu_layers
        Layers that use the GPU at all, None or -1 = all.
    n_ctx
        Tokens of context, None = 4096 or what the model was trained for, if that is less.
    n_batch
        Most tokens handed over at a time; limits `n_ubatch`.
    n_ubatch
        Most tokens in one pass of the prompt. Larger is faster and takes more memory; Ctrl-C waits for a pass.
    n_threads
        CPU threads, None = physical cores.
    type_k, type_v
        Types of the KV cache, such as "f16", "q8_0". A quantised `type_v` needs flash attention.
    flash_attn
        "auto", "on" or "off"; True and False mean "on" and "off".
    n_seq_max
        Prompts that `generate` continues at the same time, which share the context. None = 8, or 1 for a model with
        recurrent layers, whose state would take memory for each of them.
    seed
        Default seed of `generate` and `stream`, None or -1 = a new one each time.
    load_mode
        "mmap" maps the file, which must not be changed or truncated meanwhile; "copy" reads it into memory (pinned when
        there is a GPU, which makes prompts with experts on the CPU much faster); "direct_io" reads it past the page
        cache; "repack" reads it into memory and gives the weights that the CPU computes the form of its fastest kernels
        (not pinned; without a GPU every mode does so), for `cpu_experts()` and `layers(n)`.
    chat_template
        A Jinja template for `chat`, None = the one in the file.
    progress
        Called with the loaded fraction, 0..1; True = a bar on stderr, False = nothing, None = a bar if stderr is a
        terminal or a notebook. An exception that it raises stops the load.

    Raises
    ------
    ModelLoadError
        If the file is not a model that can be loaded.
    OutOfMemoryError
        If VRAM or RAM cannot hold what the parameters ask for.
    ConfigError
        If a parameter has a value that cannot be used.
    UnavailableError
        If the offload mode needs something this machine or build does not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        offload: Offload | str = "auto",
        n_gpu_layers: int | None = None,
        n_ctx: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str | bool = "auto",
        n_seq_max: int | None = None,
        seed: int | None = None,
        load_mode: str = "mmap",
        chat_template: str | None = None,
        progress: Callable[[float], object] | bool | None = None,
    ) -> None:
        if seed is not None:
            integer("seed", seed, -1, MAX_SEED)
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress must be a function, True, False or None, not {progress!r}")
        if chat_template is not None:
            check_template(chat_template)
        request = load_request(
            path,
            n_gpu_layers=n_gpu_layers,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            type_k=type_k,
            type_v=type_v,
            flash_attn=flash_attn,
            n_seq_max=n_seq_max,
            load_mode=load_mode,
        )
        _ffi.init()
        self._seed = seed
        self._exclusive = Exclusive()
        self._open_stream: Callable[[], generation.Stream | None] = lambda: None

        decided = placement.decide(request, offload, n_gpu_layers_given=n_gpu_layers not in (None, -1))
        _ffi.logger.info("%s: %s", decided.request.path, placement.describe(decided))
        model, self._info = loading.load(decided, progress)
        self._placement = decided
        self._model = model
        self._vocab = Vocab(model, self._info)
        self._chat = ChatPrompts(self.path, self._info, self._vocab, chat_template)
        resources: list[Callable[[], object]] = [lambda: _ffi.lib.phx_model_free(model), self._vocab.close]
        self._close = weakref.finalize(self, _free, resources)
        self._close.atexit = False  # a daemon thread may still compute; the system frees what a process held
        try:
            self._cache = self._start_cache()
            resources.append(self._cache._close)
            self._context = Context(model, self._info.n_vocab, decided.request)
        except BaseException:
            self._close()
            raise
        resources.append(self._context.close)
        _ffi.drain_log()

    @classmethod
    def from_pretrained(
        cls,
        repo: str,
        *,
        filename: str | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **parameters: Any,
    ) -> Model:
        """Load a model of the Hugging Face Hub, downloaded into its cache if it is not there yet (extra ``hf``).

        Parameters
        ----------
        repo
            "user/model", or "user/model:quant", such as "user/model-GGUF:Q4_K_M". Without a quantisation: Q4_K_M, else
            Q8_0, else the first model.
        filename
            A file of the repository instead (of a model in several files, any one of them).
        revision
            Branch, tag or commit, None = the newest state.
        cache_dir, token
            As of huggingface_hub, None = its own settings.
        local_files_only
            Look into the cache alone. That is done too when there is no network.
        **parameters
            As of `Model`.

        Raises
        ------
        UnavailableError
            If huggingface_hub is not installed, or the Hub cannot be reached and the cache does not have the model.
        ModelNotFoundError
            If there is no such repository, revision, quantisation or file.
        """
        path = hub.download(
            repo,
            filename=filename,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        return cls(path, **parameters)

    # ------------------------------------------------------------ facts

    @property
    def path(self) -> str:
        """The file."""
        return self._placement.request.path

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self._info

    @property
    def offload(self) -> Offload:
        """The offload mode in use."""
        return self._placement.offload

    @property
    def n_gpu_layers(self) -> int:
        """Layers that use the GPU, -1 = all."""
        return self._placement.request.n_gpu_layers

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """What the model and its context take on each device, RAM last, as planned before loading."""
        return self._placement.memory

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""
        return self._context.n_ctx

    @property
    def n_past(self) -> int:
        """Tokens in the context now."""
        self._check_open()
        return self._context.n_past

    @property
    def n_seq_max(self) -> int:
        """Prompts that `generate` continues at the same time."""
        return self._context.n_sequences

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text, None if there is none of that key."""
        return self._vocab.metadata(key)

    @property
    def cache(self) -> Cache:
        """State, counters and residency of the hot-expert cache."""
        return self._cache

    # ------------------------------------------------------------ tokens

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        text
            Text, or its UTF-8 bytes.
        add_special
            Add the tokens that the model wants at the beginning (BOS).
        parse_special
            Take the names of special tokens in the text as those tokens.

        Raises
        ------
        PromptError
            If the bytes are not UTF-8 or the text has lone surrogates.
        UnavailableError
            If the model has no tokenizer.
        """
        return self._vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD.

        Parameters
        ----------
        special
            Show special tokens by their names instead of leaving them out.
        """
        return self._vocab.detokenize(tokens, special)

    # ------------------------------------------------------------ generation

    @overload
    def generate(self, prompt: Prompt, *, reuse_prefix: bool = False, **sampling: Any) -> Generation: ...

    @overload
    def generate(self, prompt: Batch, **sampling: Any) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Batch, *, reuse_prefix: bool = False, **sampling: Any
    ) -> Generation | list[Generation]:
        """Continue a prompt, or several at once.

        Parameters
        ----------
        prompt
            Text, UTF-8 bytes, or token ids. An empty text starts from the model's BOS token. A list of those: each is
            continued on its own, `n_seq_max` of them at a time, and the result is a list in the same order; the i-th of
            them has the seed `seed` + i, and without `max_tokens` an equal share of the context. No prompts, []: [].
        reuse_prefix
            Do not process again what the prompt has in common with what was evaluated before. Rounding may differ, and
            with it a token now and then. Not for several prompts.
        **sampling
            Parameters of `Sampling`: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
            frequency_penalty, repeat_last_n, seed, stop, max_tokens, grammar, json_schema, logit_bias, logprobs.

        Raises
        ------
        ContextFullError
            If the prompt leaves no room in the context.
        GrammarError
            If the grammar or the JSON schema cannot be used.
        PromptError, ConfigError, BusyError, ClosedError
            See there.
        """
        if is_batch(prompt):
            if reuse_prefix:
                raise ConfigError("reuse_prefix is not for several prompts: they begin with an empty context")
            return self._batch(prompt, sampling)
        return _whole(self.stream(cast(Prompt, prompt), reuse_prefix=reuse_prefix, **sampling))

    def stream(self, prompt: Prompt, *, reuse_prefix: bool = False, **sampling: Any) -> generation.Stream:
        """Continue a prompt, chunk by chunk. Parameters and errors as of `generate`.

        The model is busy until the stream is read to its end, closed or dropped.
        """
        return self._stream(lambda: self._vocab.prompt(prompt), reuse_prefix, sampling)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        reuse_prefix: bool = True,
        **sampling: Any,
    ) -> Generation:
        """Answer the last message of a conversation.

        Append the answer's text to the messages, then the next question, and call it again: what was processed before
        is not processed again.

        Parameters
        ----------
        messages
            Dicts with "role" ("system", "user", "assistant", ...) and "content", oldest first. Names of special tokens
            in them are taken as those tokens, as in the template.
        tools
            Descriptions of tools, for templates that know them.
        template_options
            More variables of the template, such as {"enable_thinking": False}.
        reuse_prefix, **sampling
            As of `generate`.

        Raises
        ------
        UnavailableError
            If the model has no chat template, and none was given to `Model`.
        TemplateError
            If the template is wrong, or takes more than 10 seconds, 1 GiB, or 16 million characters.
        PromptError
            If the messages are not of this form, or the template refuses them.
        """
        return _whole(
            self.stream_chat(
                messages, tools=tools, template_options=template_options, reuse_prefix=reuse_prefix, **sampling
            )
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        reuse_prefix: bool = True,
        **sampling: Any,
    ) -> generation.Stream:
        """Answer the last message of a conversation, chunk by chunk. Parameters and errors as of `chat`."""
        text = self.chat_prompt(messages, tools=tools, template_options=template_options)
        return self._stream(lambda: self._chat.ids(text, self._context.tokens), reuse_prefix, sampling)

    def astream(self, prompt: Prompt, *, reuse_prefix: bool = False, **sampling: Any) -> AsyncStream:
        """Continue a prompt, for ``async for``. As `stream`, but errors come with the first chunk."""
        return AsyncStream(lambda: self.stream(prompt, reuse_prefix=reuse_prefix, **sampling))

    def astream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        reuse_prefix: bool = True,
        **sampling: Any,
    ) -> AsyncStream:
        """Answer the last message, for ``async for``. As `stream_chat`, but errors come with the first chunk."""
        return AsyncStream(
            lambda: self.stream_chat(
                messages, tools=tools, template_options=template_options, reuse_prefix=reuse_prefix, **sampling
            )
        )

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that `chat` uses, None = there is none."""
        return self._chat.template

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `chat` gives to the model. Parameters and errors as of `chat`."""
        self._check_open()
        return self._chat.text(messages, tools, template_options)

    # ------------------------------------------------------------ evaluation

    def reset(self) -> None:
        """Forget everything that was evaluated."""
        with self._claim():
            self._context.clear()

    def eval(self, tokens: Prompt) -> None:
        """Evaluate tokens (or a text) after those evaluated before; `logits` has the outcome.

        `generate`, `stream`, `score` and `perplexity` begin with an empty context, `eval` does not: call `reset`.
        """
        with self._claim():
            self._context.decode(self._vocab.prompt(tokens), _ffi.lib.PHX_OUTPUTS_LAST)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the token after the last evaluated one, float32[n_vocab].

        Raises
        ------
        ConfigError
            If nothing was evaluated.
        """
        with self._claim():
            row: npt.NDArray[np.float32] = self._context.logits(1)[0]
            return row

    def score(self, text: Prompt) -> Score:
        """How likely the model finds a text: the negative log-likelihood of each token after the first.

        Raises
        ------
        ContextFullError
            If the text has more tokens than the context; `perplexity` takes longer texts.
        PromptError
            If it has fewer than two tokens.
        """
        with self._claim():
            ids = self._vocab.prompt(text)
            if len(ids) < 2:
                raise PromptError("a text of at least two tokens is needed: the first one is not scored")
            if len(ids) > self.n_ctx:
                raise ContextFullError(
                    f"the text has {len(ids)} tokens, more than the context of {self.n_ctx}: "
                    "use perplexity(), or load the model with a larger n_ctx"
                )
            return Score(tokens=tuple(ids), nll=self._context.nll(ids, 0))

    def perplexity(self, text: Prompt, *, n_ctx: int | None = None, max_chunks: int | None = None) -> Perplexity:
        """Perplexity of a long text by the protocol of ``llama-perplexity -c n_ctx``.

        Parameters
        ----------
        n_ctx
            Tokens per chunk, None = 1024 or the context, if that is less. The second half of a chunk is scored.
        max_chunks
            Use only the first ones, None = all.
        """
        n_ctx = min(1024, self.n_ctx) if n_ctx is None else integer("n_ctx", n_ctx, 4, self.n_ctx)
        if max_chunks is not None:
            integer("max_chunks", max_chunks, 1, 2**31 - 1)
        with self._claim():
            ids = self._vocab.prompt(text)
            bos = self._info.token_bos if self._info.add_bos else -1
            return scoring.perplexity(ids, n_ctx, max_chunks, bos, lambda chunk: self._context.nll(chunk, n_ctx // 2))

    def embed(self, text: Prompt) -> npt.NDArray[np.float32]:
        """Embedding of a text, of a model that was made for it, in a context of its own.

        Returns
        -------
        float32[n_embd_out], not normalised.

        Raises
        ------
        UnavailableError
            If the model was made to generate text alone: its file names no pooling.
        """
        with self._claim():
            ids = self._vocab.prompt(text)
            with self._own_context(len(ids), len(ids), embeddings=True) as context:
                context.decode(ids, _ffi.lib.PHX_OUTPUTS_ALL)
                return context.embedding(self._info.n_embd_out)

    def record_routing(self, text: Prompt) -> Routing:
        """Which experts each token of a text selects, on whatever device the layers run.

        Evaluates the text once more in a context of its own: slower than generation.

        Raises
        ------
        UnavailableError
            If the model has no routed experts.
        """
        if not self._info.n_expert:
            raise UnavailableError(f"{self._info.architecture} is a dense model: it has no routed experts")
        with self._claim():
            ids = self._vocab.prompt(text)
            n_ubatch = min(self._placement.request.n_ubatch, len(ids))
            with self._own_context(len(ids), n_ubatch, record_routing=True) as context:
                context.decode(ids, _ffi.lib.PHX_OUTPUTS_ALL)
                return context.routing(self._info.n_expert)

    # ------------------------------------------------------------ lifetime

    def close(self) -> None:
        """Free the model's memory. May be called twice. Ends an open stream.

        Raises
        ------
        BusyError
            If a call runs in another thread.
        """
        if not self._close.alive:
            return
        stream = self._open_stream()
        if stream is not None:
            stream.close()
        with self._exclusive.claim("the model is in use by another thread: let its call finish before close()"):
            self._vocab.close()
            self._close()

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._close.alive else " (closed)"
        return f"<Model {self.path!r}: {self._info.architecture}, offload {self.offload}, n_ctx {self.n_ctx}{state}>"

    def __reduce__(self) -> str:
        raise TypeError("a model cannot be copied or pickled: load it again, or hand over its path")

    # ------------------------------------------------------------ internals

    def _start_cache(self) -> Cache:
        decided = self._placement
        if not isinstance(decided.offload, HotExperts):
            reason = decided.cache_reason or f"{decided.offload} does not use it ({decided.reason})"
            return Cache(self._model, None, bool(decided.cache_reason), reason)
        n_threads = machine.lane_threads(decided.request.n_threads)
        hot_cache.start(self._model, decided.offload, decided.slots, n_threads)
        cache = Cache(self._model, decided.offload, requested=True, reason=decided.cache_reason)
        status = cache.status
        if decided.offload.strict and status.slots < decided.slots:
            raise OutOfMemoryError(
                f"the hot-expert cache cannot be set up as requested: {status.reason}. {placement.LESS_VRAM}"
            )
        _ffi.logger.log(logging.INFO if status.active and not status.reason else logging.WARNING, "%s", status)
        return cache

    def _own_context(self, n_ctx: int, n_ubatch: int, **purpose: bool) -> closing[Context]:
        """A context of its own for one text, closed at the end of its block."""
        request = replace(self._placement.request, n_ctx=n_ctx, n_batch=n_ubatch, n_ubatch=n_ubatch, n_sequences=1)
        return closing(Context(self._model, self._info.n_vocab, request, **purpose))

    def _stream(
        self, ids_of: Callable[[], list[int]], reuse_prefix: bool, sampling: dict[str, Any]
    ) -> generation.Stream:
        """A stream over the continuation of a prompt."""
        boolean("reuse_prefix", reuse_prefix)
        options = self._options(sampling)
        claim = self._claim()
        try:
            ids = self._fitting(ids_of())
            sampler = generation.Sampler(self._model, options)
        except BaseException:
            claim.release()  # the exception's traceback keeps this frame, and so the claim
            raise

        def evaluate() -> int:
            if not reuse_prefix:
                self._context.clear()
            n_reused = self._context.keep(ids)
            self._context.decode(ids[n_reused:], _ffi.lib.PHX_OUTPUTS_LAST)
            sampler.accept(ids)
            return n_reused

        writing = self._writing(options, self.n_ctx - len(ids))
        chunks = generation.run(self._context, sampler, writing, evaluate, len(ids), options.logprobs)
        stream = generation.Stream(chunks, _Release(self, sampler, claim))
        self._open_stream = weakref.ref(stream)
        return stream

    def _fitting(self, ids: list[int]) -> list[int]:
        """The tokens of a prompt, if the context can hold them and one more."""
        if len(ids) + 1 > self.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens, and the context of {self.n_ctx} must hold it and one more: "
                "shorten the prompt or load the model with a larger n_ctx"
            )
        return ids

    def _writing(self, options: Sampling, n_room: int) -> generation.Writing:
        """A generation that begins; n_room: tokens that the context can still take after its prompt."""
        # The last token needs no place in the context: it is not evaluated.
        limit = n_room + 1 if options.max_tokens is None else min(options.max_tokens, n_room + 1)
        return generation.Writing(options, limit, self._vocab.piece, self._vocab.is_end)

    def _batch(self, prompts: Sequence[Prompt], sampling: dict[str, Any]) -> list[Generation]:
        """The continuations of several prompts."""
        options = self._options(sampling)
        jobs: list[batch.Job] = []
        with self._claim():
            try:
                all_ids = [self._fitting(self._vocab.prompt(prompt)) for prompt in prompts]
                share = self.n_ctx // max(1, min(self._context.n_sequences, len(prompts)))
                for i, ids in enumerate(all_ids):
                    # without max_tokens, each has an equal share of the context
                    room = (share if options.max_tokens is None else self.n_ctx) - len(ids)
                    seed = None if options.seed in (None, -1) else (options.seed + i) % (MAX_SEED + 1)
                    one = replace(options, seed=seed)
                    writing = self._writing(one, max(0, room))
                    sampler = generation.Sampler(self._model, one)
                    jobs.append(batch.Job(ids, sampler, writing, options.logprobs))
                return batch.run(self._context, jobs)
            finally:
                for job in jobs:
                    job.sampler.close()

    def _options(self, sampling: dict[str, Any]) -> Sampling:
        """The sampling parameters, with this model's seed as the default."""
        options = _sampling(sampling)
        return replace(options, seed=self._seed) if options.seed is None else options

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ClosedError("the model was closed: load it again")

    def _claim(self) -> Claim:
        """The right to use the model, to be released."""
        _ffi.refuse_fork()
        self._check_open()
        claim = self._exclusive.claim(
            "the model is in use: one caller at a time; let the other call finish, or close the open stream"
        )
        if not self._close.alive:  # closed by another thread just now
            claim.release()
            self._check_open()
        return claim


class _Release:
    """What the end of a stream does: free the sampler, then let others use the model, which stays alive until then."""

    def __init__(self, model: Model, sampler: generation.Sampler, claim: Claim) -> None:
        self._model = model
        self._sampler = sampler
        self._claim = claim

    def __call__(self) -> None:
        self._sampler.close()
        self._claim.release()


def _whole(stream: generation.Stream) -> Generation:
    """Read a stream to its end."""
    with stream:
        for _ in stream:
            pass
        return stream.result


def _free(resources: list[Callable[[], object]]) -> None:
    """Free what a model holds, the last made first."""
    for free in reversed(resources):
        free()


def _sampling(options: dict[str, Any]) -> Sampling:
    known = Sampling.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"unknown parameter {', '.join(unknown)}: there are {', '.join(known)}")
    return Sampling(**options)


def load_request(
    path: str | os.PathLike[str] | None,
    *,
    n_gpu_layers: int | None = None,
    n_ctx: int | None = None,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    n_threads: int | None = None,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attn: str | bool = "auto",
    n_seq_max: int | None = None,
    load_mode: str = "mmap",
) -> placement.LoadRequest:
    """The checked parameters of a load, as of `Model`.

    Raises
    ------
    ConfigError, ModelLoadError
        If a parameter has a value that cannot be used, or the file is no GGUF.
    """
    n_batch = integer("n_batch", n_batch, 1, MAX_N_CTX)
    request = placement.LoadRequest(
        path="",
        n_gpu_layers=-1 if n_gpu_layers is None else integer("n_gpu_layers", n_gpu_layers, -1, 1_000_000),
        load_mode=choice("load_mode", load_mode, placement.LOAD_MODES),
        n_ctx=0 if n_ctx is None else integer("n_ctx", n_ctx, 1, MAX_N_CTX),
        n_batch=n_batch,
        n_ubatch=min(n_batch, integer("n_ubatch", n_ubatch, 1, MAX_N_CTX)),
        n_threads=machine.default_threads()
        if n_threads is None
        else integer("n_threads", n_threads, 1, machine.MAX_THREADS),
        type_k=_kv_type("type_k", type_k),
        type_v=_kv_type("type_v", type_v),
        flash_attn=_flash_attn(flash_attn),
        n_sequences=0 if n_seq_max is None else integer("n_seq_max", n_seq_max, 1, MAX_N_SEQ),
    )
    if type_v not in EXACT_TYPES and request.flash_attn == FLASH_ATTN["off"]:
        raise ConfigError(
            f'type_v="{type_v}" needs flash attention, which flash_attn="off" forbids: leave flash_attn at "auto", or '
            f'type_v at "f16"'
        )
    return replace(request, path=shards.first_shard(loading.check_file(path)))


def kv_types() -> list[str]:
    """Names of the types that a KV cache can have."""
    _ffi.refuse_foreign_ggml()
    names: list[str] = []
    while (name := _ffi.lib.phx_kv_type_name(len(names))) != _ffi.ffi.NULL:
        names.append(_ffi.text_of(name))
    return names


def _kv_type(parameter: str, name: object) -> int:
    return int(_ffi.lib.phx_kv_type(choice(parameter, name, kv_types()).encode()))


def _flash_attn(value: str | bool) -> int:
    if isinstance(value, bool):
        return int(value)
    return FLASH_ATTN[choice("flash_attn", value, FLASH_ATTN)]
