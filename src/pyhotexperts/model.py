"""`Model`: a loaded GGUF model with one context."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhotexperts import _ffi, generation, loading, machine, placement, scoring
from pyhotexperts.errors import BusyError, ClosedError, ConfigError, ContextFullError, PromptError, UnavailableError
from pyhotexperts.offload import Offload
from pyhotexperts.results import DeviceMemory, Generation, ModelInfo, Perplexity, Routing, Score
from pyhotexperts.sampling import MAX_SEED, Sampling
from pyhotexperts.validation import choice, integer

Prompt = str | bytes | Sequence[int]

MAX_N_CTX = 2**31 - 1
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


class Model:
    """A language model in GGUF format, loaded and ready to generate.

    One caller at a time: a call while another one runs, or while a stream is open, raises `BusyError`.

    Parameters
    ----------
    path
        The GGUF file, None = the small model that is part of the package.
    offload
        Where the weights go: `cpu_experts()`, `layers(n_cpu_moe)`, `full_gpu()`, `hot_experts(...)`, or "auto":
        everything on the GPU if it fits, else hot experts when available, else CPU experts.
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
    seed
        Default seed of `generate` and `stream`, None or -1 = a new one each time.
    load_mode
        "mmap" maps the file, "copy" reads it into memory (pinned when there is a GPU, which makes prompts with
        experts on the CPU much faster), "direct_io" reads it past the page cache.
    progress
        Called with the loaded fraction, 0..1; True = a bar on stderr, False = nothing, None = a bar if stderr is a
        terminal. An exception that it raises stops the load.

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
        seed: int | None = None,
        load_mode: str = "mmap",
        progress: Callable[[float], object] | bool | None = None,
    ) -> None:
        if seed is not None:
            integer("seed", seed, -1, MAX_SEED)
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress must be a function, True, False or None, not {progress!r}")
        n_batch = integer("n_batch", n_batch, 1, MAX_N_CTX)
        request = placement.LoadRequest(
            path="",
            n_gpu_layers=-1 if n_gpu_layers is None else integer("n_gpu_layers", n_gpu_layers, -1, 1_000_000),
            load_mode=choice("load_mode", load_mode, placement.LOAD_MODES),
            n_ctx=0 if n_ctx is None else integer("n_ctx", n_ctx, 1, MAX_N_CTX),
            n_batch=n_batch,
            n_ubatch=min(n_batch, integer("n_ubatch", n_ubatch, 1, MAX_N_CTX)),
            n_threads=machine.default_threads() if n_threads is None else integer("n_threads", n_threads, 1, 512),
            type_k=_kv_type("type_k", type_k),
            type_v=_kv_type("type_v", type_v),
            flash_attn=_flash_attn(flash_attn),
        )
        request = replace(request, path=loading.check_file(path))
        _ffi.init()
        self._seed = seed
        self._lock = threading.Lock()
        self._open_stream: Callable[[], generation.Stream | None] = lambda: None

        decided = placement.decide(request, offload, n_gpu_layers_given=n_gpu_layers not in (None, -1))
        _ffi.logger.info("%s: %s", decided.request.path, placement.describe(decided))
        self._model = loading.load(decided, progress)
        self._close = self._finalizer([self._model])
        self._info = _model_info(self._model)
        if not self._info.n_vocab or not _native_info(self._model).has_decoder:
            self.close()
            raise UnavailableError(f"{decided.request.path} ({self._info.architecture}) generates no text")
        self._placement = decided
        try:
            self._context = self._new_context(decided.request)
        except BaseException:
            self.close()
            raise
        self._n_ctx = int(_ffi.lib.phx_context_n_ctx(self._context))
        self._close.detach()
        self._close = self._finalizer([self._model, self._context])
        _ffi.drain_log()

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
        return self._n_ctx

    @property
    def n_past(self) -> int:
        """Tokens in the context now."""
        self._check_open()
        return int(_ffi.lib.phx_context_n_past(self._context))

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text, None if there is none of that key."""
        self._check_open()
        name = key.encode()
        if _ffi.lib.phx_model_meta(self._model, name, _ffi.ffi.NULL, 0) < 0:
            return None
        return _ffi.read_string(lambda buf, cap: int(_ffi.lib.phx_model_meta(self._model, name, buf, cap)))

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
        self._check_open()
        data = _utf8(text)
        ffi, lib = _ffi.ffi, _ffi.lib
        cap = len(data) + 16
        n = ffi.new("int32_t *")
        while True:
            tokens = ffi.new("int32_t[]", cap)
            status = lib.phx_tokenize(self._model, data, len(data), add_special, parse_special, tokens, cap, n)
            if status != lib.PHX_ERR_BUFFER:
                break
            cap = n[0]
        _ffi.check(status, "cannot tokenize the text")
        return list(tokens[0 : n[0]])

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD.

        Parameters
        ----------
        special
            Show special tokens by their names instead of leaving them out.
        """
        self._check_open()
        ids = self._ids(tokens)
        ffi, lib = _ffi.ffi, _ffi.lib
        cap = 16 * len(ids) + 16
        n = ffi.new("int32_t *")
        while True:
            buf = ffi.new("char[]", cap)
            status = lib.phx_detokenize(self._model, ids, len(ids), special, buf, cap, n)
            if status != lib.PHX_ERR_BUFFER:
                break
            cap = n[0]
        _ffi.check(status, "cannot turn tokens into text")
        return bytes(ffi.buffer(buf, n[0])).decode("utf-8", errors="replace")

    # ------------------------------------------------------------ generation

    def generate(self, prompt: Prompt, **sampling: Any) -> Generation:
        """Continue a prompt.

        Parameters
        ----------
        prompt
            Text, UTF-8 bytes, or token ids. An empty text starts from the model's BOS token.
        **sampling
            Parameters of `Sampling`: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
            frequency_penalty, repeat_last_n, seed, stop, max_tokens.

        Raises
        ------
        ContextFullError
            If the prompt leaves no room in the context.
        PromptError, ConfigError, BusyError, ClosedError
            See there.
        """
        with self.stream(prompt, **sampling) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: Prompt, **sampling: Any) -> generation.Stream:
        """Continue a prompt, chunk by chunk. Parameters and errors as of `generate`.

        The model is busy until the stream is read to its end, closed or dropped.
        """
        options = _sampling(sampling)
        if options.seed is None:
            options = replace(options, seed=self._seed)
        self._acquire()
        try:
            ids = self._prompt_ids(prompt)
            if len(ids) + 1 > self.n_ctx:
                raise ContextFullError(
                    f"the prompt has {len(ids)} tokens, and the context of {self.n_ctx} must hold it and one more: "
                    "shorten the prompt or load the model with a larger n_ctx"
                )
            sampler = generation.Sampler(self._model, options)
        except BaseException:
            self._lock.release()
            raise

        def evaluate() -> None:
            _ffi.lib.phx_context_clear(self._context)
            self._decode(ids, _ffi.lib.PHX_OUTPUTS_LAST)
            _ffi.check(_ffi.lib.phx_sampler_accept(sampler.handle, ids, len(ids)), "handing over the prompt")

        chunks = generation.run(
            self._context,
            sampler,
            evaluate,
            n_prompt=len(ids),
            n_room=self.n_ctx - len(ids),
            sampling=options,
            piece_of=self._piece if self._info.has_vocab else lambda token: b"",
            is_end=lambda token: bool(_ffi.lib.phx_token_is_eog(self._model, token)),
        )
        stream = generation.Stream(chunks, _Release(self, sampler))
        self._open_stream = weakref.ref(stream)
        return stream

    # ------------------------------------------------------------ evaluation

    def reset(self) -> None:
        """Forget everything that was evaluated."""
        with self._exclusive():
            _ffi.lib.phx_context_clear(self._context)

    def eval(self, tokens: Prompt) -> None:
        """Evaluate tokens (or a text) after those evaluated before; `logits` has the outcome.

        `generate`, `stream`, `score` and `perplexity` begin with an empty context, `eval` does not: call `reset`.
        """
        with self._exclusive():
            ids = self._prompt_ids(tokens)
            if self.n_past + len(ids) > self.n_ctx:
                raise ContextFullError(
                    f"{len(ids)} tokens after {self.n_past} do not fit into the context of {self.n_ctx}: "
                    "call reset() first, or load the model with a larger n_ctx"
                )
            self._decode(ids, _ffi.lib.PHX_OUTPUTS_LAST)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """float32[n_vocab]: logits of the token after the last evaluated one.

        Raises
        ------
        ConfigError
            If nothing was evaluated.
        """
        with self._exclusive():
            row: npt.NDArray[np.float32] = self._logits(0, 1)[0]
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
        with self._exclusive():
            ids = self._prompt_ids(text)
            if len(ids) < 2:
                raise PromptError("a text of at least two tokens is needed: the first one is not scored")
            if len(ids) > self.n_ctx:
                raise ContextFullError(
                    f"the text has {len(ids)} tokens, more than the context of {self.n_ctx}: "
                    "use perplexity(), or load the model with a larger n_ctx"
                )
            return Score(tokens=tuple(ids), nll=self._nll(ids, 0))

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
        with self._exclusive():
            ids = self._prompt_ids(text)
            bos = self._info.token_bos if self._info.add_bos else -1
            return scoring.perplexity(ids, n_ctx, max_chunks, bos, lambda chunk: self._nll(chunk, n_ctx // 2))

    def routing(self, text: Prompt) -> Routing:
        """Which experts each token of a text selects, on whatever device the layers run.

        Evaluates the text once more in a context of its own: slower than generation.

        Raises
        ------
        UnavailableError
            If the model has no routed experts.
        """
        if not self._info.n_expert:
            raise UnavailableError(f"{self._info.architecture} is a dense model: it has no routed experts")
        ffi, lib = _ffi.ffi, _ffi.lib
        with self._exclusive():
            ids = self._prompt_ids(text)
            n_ubatch = min(self._placement.request.n_ubatch, len(ids))
            request = replace(self._placement.request, n_ctx=len(ids), n_batch=n_ubatch, n_ubatch=n_ubatch)
            context = self._new_context(request, record_routing=True)
            try:
                self._decode(ids, lib.PHX_OUTPUTS_ALL, context, n_ubatch)
                n_tokens, n_layers, top_k = (ffi.new("int32_t *") for _ in range(3))
                _ffi.check(lib.phx_routing_shape(context, n_tokens, n_layers, top_k), "reading the routing")
                layers = np.empty(n_layers[0], np.int32)
                experts = np.empty((n_tokens[0], n_layers[0], top_k[0]), np.uint16)
                _ffi.check(
                    lib.phx_routing_read(
                        context, ffi.from_buffer("int32_t[]", layers), ffi.from_buffer("uint16_t[]", experts)
                    ),
                    "reading the routing",
                )
            finally:
                lib.phx_context_free(context)
        return Routing(layers=tuple(layers.tolist()), experts=experts, n_expert=self._info.n_expert)

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
        if not self._lock.acquire(blocking=False):
            raise BusyError("the model is in use by another thread: let its call finish before close()")
        try:
            self._close()
        finally:
            self._lock.release()

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------ internals

    def _finalizer(self, handles: list[Any]) -> weakref.finalize[Any, Model]:
        finalizer = weakref.finalize(self, _free, handles)
        finalizer.atexit = False  # a daemon thread may still compute; the system frees what a process held
        return finalizer

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ClosedError("the model was closed: load it again")

    def _acquire(self) -> None:
        self._check_open()
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "the model is in use: one caller at a time; let the other call finish, or close the open stream"
            )
        if not self._close.alive:
            self._lock.release()
            self._check_open()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _new_context(self, request: placement.LoadRequest, record_routing: bool = False) -> Any:
        out = _ffi.ffi.new("phx_context **")
        status = _ffi.lib.phx_context_new(self._model, request.context_params(record_routing), out)
        _ffi.check(status, f"cannot make a context of {request.n_ctx or 'the default number of'} tokens")
        return out[0]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, at least one."""
        ids = self.tokenize(prompt) if isinstance(prompt, str | bytes) else self._ids(prompt)
        if not ids:
            raise PromptError("the prompt is empty, and the model has no BOS token to start from: give some text")
        return ids

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        if isinstance(tokens, str | bytes) or not hasattr(tokens, "__iter__"):
            raise PromptError(f"expected token ids, not {type(tokens).__name__}")
        n_vocab = self._info.n_vocab
        ids = []
        for token in tokens:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < n_vocab:
                raise PromptError(
                    f"{token!r} is no token of this model: token ids are integers from 0 to {n_vocab - 1}"
                )
            ids.append(int(token))
        return ids

    def _piece(self, token: int) -> bytes:
        ffi, lib = _ffi.ffi, _ffi.lib
        buf, n = ffi.new("char[]", 256), ffi.new("int32_t *")
        status = lib.phx_token_to_piece(self._model, token, False, buf, len(buf), n)
        if status == lib.PHX_ERR_BUFFER:
            buf = ffi.new("char[]", n[0])
            status = lib.phx_token_to_piece(self._model, token, False, buf, len(buf), n)
        _ffi.check(status, "cannot turn a token into text")
        return bytes(ffi.buffer(buf, n[0]))

    def _decode(self, ids: Sequence[int], outputs: int, context: Any = None, n_ubatch: int | None = None) -> None:
        """Evaluate tokens, one native call per micro-batch, so that Ctrl-C gets through."""
        lib = _ffi.lib
        step = n_ubatch or self._placement.request.n_ubatch
        for at in range(0, len(ids), step):
            part = ids[at : at + step]
            is_last = at + step >= len(ids)
            wanted = lib.PHX_OUTPUTS_NONE if outputs == lib.PHX_OUTPUTS_LAST and not is_last else outputs
            _ffi.check(lib.phx_decode(context or self._context, part, len(part), wanted), "cannot evaluate the tokens")

    def _logits(self, first: int, n_rows: int) -> npt.NDArray[np.float32]:
        out = np.empty((n_rows, self._info.n_vocab), np.float32)
        status = _ffi.lib.phx_logits(self._context, first, n_rows, _ffi.ffi.from_buffer("float[]", out))
        _ffi.check(status, "cannot read logits")
        return out

    def _nll(self, ids: Sequence[int], first: int) -> npt.NDArray[np.float64]:
        """Evaluate tokens in an empty context; negative log-likelihoods of tokens first + 1 ... n - 1."""
        lib = _ffi.lib
        lib.phx_context_clear(self._context)
        if first:
            self._decode(ids[:first], lib.PHX_OUTPUTS_NONE)
        parts = []
        step = self._placement.request.n_ubatch
        for at in range(first, len(ids) - 1, step):
            part = ids[at : min(at + step, len(ids) - 1)]
            _ffi.check(
                lib.phx_decode(self._context, part, len(part), lib.PHX_OUTPUTS_ALL), "cannot evaluate the tokens"
            )
            parts.append(scoring.nll_of(self._logits(0, len(part)), ids[at + 1 : at + 1 + len(part)]))
        return np.concatenate(parts)


class _Release:
    """What the end of a stream does: free the sampler, then the model's lock. Keeps the model alive until then."""

    def __init__(self, model: Model, sampler: generation.Sampler) -> None:
        self._model = model
        self._sampler = sampler

    def __call__(self) -> None:
        self._sampler.close()
        self._model._lock.release()


def _free(handles: list[Any]) -> None:
    """Free a model and its context, in the right order."""
    for handle in reversed(handles):
        if _ffi.ffi.typeof(handle) is _ffi.ffi.typeof("phx_context *"):
            _ffi.lib.phx_context_free(handle)
        else:
            _ffi.lib.phx_model_free(handle)


def _native_info(model: Any) -> Any:
    info = _ffi.ffi.new("phx_model_info *")
    _ffi.check(_ffi.lib.phx_model_get_info(model, info), "cannot read the model's facts")
    return info


def _model_info(model: Any) -> ModelInfo:
    info = _native_info(model)
    return ModelInfo(
        architecture=_ffi.text_of(info.architecture),
        description=_ffi.text_of(info.description),
        n_params=info.n_params,
        size=info.size,
        n_layer=info.n_layer,
        n_embd=info.n_embd,
        n_vocab=info.n_vocab,
        n_ctx_train=info.n_ctx_train,
        n_expert=info.n_expert,
        n_expert_used=info.n_expert_used,
        has_vocab=bool(info.has_vocab),
        add_bos=bool(info.add_bos),
        token_bos=info.token_bos,
        token_eos=info.token_eos,
    )


def _sampling(options: dict[str, Any]) -> Sampling:
    try:
        return Sampling(**options)
    except TypeError:
        unknown = sorted(set(options) - set(Sampling.__dataclass_fields__))
        raise ConfigError(
            f"unknown parameter {', '.join(unknown)}: there are {', '.join(Sampling.__dataclass_fields__)}"
        ) from None


def _utf8(text: str | bytes) -> bytes:
    try:
        if isinstance(text, str):
            return text.encode("utf-8")
        if isinstance(text, bytes):
            text.decode("utf-8")
            return text
    except UnicodeError as e:
        raise PromptError(f"the text is not valid Unicode: {e}") from None
    raise PromptError(f"expected text or UTF-8 bytes, not {type(text).__name__}")


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
