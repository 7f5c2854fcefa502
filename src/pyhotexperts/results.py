"""What the methods of `Model` return: frozen records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token, before penalties, temperature and the like.

    Parameters
    ----------
    token
        Its id.
    logprob
        Its log-probability, in nats.
    top
        (id, log-probability) of the most likely tokens, the most likely one first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Parameters
    ----------
    text
        The generated text, without prompt and without stop string; "" for a model without tokenizer.
    tokens
        The generated token ids, an end-of-generation token included.
    finish_reason
        "stop": an end-of-generation token or a stop string; "length": `max_tokens` or a full context.
    stop_string
        The stop string that was met, if any.
    n_prompt_tokens
        Tokens of the prompt.
    n_reused_tokens
        Those of them that were not processed again, because the context began with them already.
    prompt_seconds
        Time to process the prompt and choose the first token.
    generation_seconds
        Time for the tokens after the first.
    logprobs
        One for each of `tokens` if they were asked for, else None.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    n_prompt_tokens: int
    n_reused_tokens: int
    prompt_seconds: float
    generation_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens processed per second."""
        n = self.n_prompt_tokens - self.n_reused_tokens
        return n / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def generation_speed(self) -> float:
        """Generated tokens per second, after the first one; 0 if there are none."""
        n = len(self.tokens) - 1
        return n / self.generation_seconds if n > 0 and self.generation_seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed generation: text that is ready to show, the tokens generated for it, their logprobs."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Parameters
    ----------
    tokens
        The text's token ids, n of them.
    nll
        float64[n - 1]: negative log-likelihood, in nats, of each token after the first.
    """

    tokens: tuple[int, ...]
    nll: npt.NDArray[np.float64]

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood, nats per token."""
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        """exp(mean_nll)."""
        return math.exp(self.mean_nll)


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a long text by the protocol of ``llama-perplexity``.

    Parameters
    ----------
    mean_nll
        Mean negative log-likelihood of the scored tokens, nats per token.
    n_scored
        Number of scored tokens.
    n_chunks
        Number of chunks of `n_ctx` tokens.
    n_ctx
        Tokens per chunk.
    """

    mean_nll: float
    n_scored: int
    n_chunks: int
    n_ctx: int

    @property
    def perplexity(self) -> float:
        """exp(mean_nll)."""
        return math.exp(self.mean_nll)


@dataclass(frozen=True)
class Routing:
    """Which experts each token of a text selected.

    Parameters
    ----------
    layers
        Numbers of the layers that have routed experts.
    experts
        uint16[n_tokens, len(layers), top_k]: expert numbers, the one with the largest weight first.
    n_expert
        Routed experts per layer.
    """

    layers: tuple[int, ...]
    experts: npt.NDArray[np.uint16]
    n_expert: int

    def counts(self) -> npt.NDArray[np.int64]:
        """int64[len(layers), n_expert]: how often each expert was selected."""
        n_layers = len(self.layers)
        cell = self.experts.astype(np.int64) + np.arange(n_layers)[None, :, None] * self.n_expert
        return np.bincount(cell.ravel(), minlength=n_layers * self.n_expert).reshape(n_layers, self.n_expert)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a loaded model."""

    architecture: str
    description: str
    n_params: int
    size: int  # bytes of all tensors
    n_layer: int
    n_embd: int
    n_embd_out: int  # width of an embedding of a text
    n_vocab: int
    n_ctx_train: int  # tokens
    n_expert: int  # routed experts per layer, 0 = dense model
    n_expert_used: int  # selected per token
    expert_bytes: int  # of the routed experts' weights that one token uses
    expert_bytes_in_ram: int  # those of them that lie in RAM, in use by the CPU or by the cache
    has_vocab: bool
    add_bos: bool
    token_bos: int  # -1 = none
    token_eos: int  # -1 = none


@dataclass(frozen=True)
class DeviceMemory:
    """What a model and its context take of a device, in bytes, as planned before loading."""

    name: str
    is_gpu: bool
    model: int
    context: int
    compute: int
    free: int  # before loading
    total: int
    slot: int = 0  # one expert slot in every layer of the cache on this device
    n_expert: int = 0  # most experts of such a layer
    n_slots: int = 0  # per layer
    repacked: int = 0  # of `model`: weights in the forms of the CPU's fastest kernels

    @property
    def slots(self) -> int:
        """Bytes of the hot-expert cache's slots."""
        return self.slot * self.n_slots

    @property
    def needed(self) -> int:
        """Bytes of weights, context, compute buffers and expert slots together."""
        return self.model + self.context + self.compute + self.slots
