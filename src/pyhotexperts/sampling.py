"""How the next token is chosen from the model's distribution."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pyhotexperts import json_schema
from pyhotexperts.errors import ConfigError, GrammarError
from pyhotexperts.validation import integer, real

MAX_SEED = 2**32 - 1


def seed_value(seed: int | None) -> int:
    """A seed for the native sampler; None or -1 draws one."""
    if seed is None or seed == -1:
        return secrets.randbelow(MAX_SEED)
    return integer("seed", seed, 0, MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, applied in this order: logit_bias, penalties, top_k, top_p, min_p, temperature.

    With a grammar, a token that does not follow it is chosen again, from those that do.

    The defaults are llama.cpp's.

    Parameters
    ----------
    temperature
        Divides the logits; 0 = always the most likely token (greedy).
    top_k
        Keep this many most likely tokens, 0 = all.
    top_p
        Keep the most likely tokens that together have this probability, 1 = off.
    min_p
        Keep tokens with at least this share of the most likely one's probability, 0 = off.
    repeat_penalty
        Divides the logits of tokens seen in the last `repeat_last_n` ones, 1 = off.
    presence_penalty, frequency_penalty
        Subtracted from those tokens' logits, once and per occurrence, 0 = off.
    repeat_last_n
        Tokens that the penalties look back over, prompt included, 0 = off.
    seed
        Seed of the random choice, None or -1 = a new one each time.
    stop
        Strings that end the generation; they are not part of the text.
    max_tokens
        Most tokens to generate, None = as many as the context holds.
    grammar
        GBNF, with a rule named root, that the text must follow, None = any text.
    json_schema
        JSON schema (a dict, or JSON text) that the text must be valid for, True = any JSON, None = any text. Give
        `max_tokens` enough of them: a text that is cut off is no JSON.
    logit_bias
        Token ids, and what is added to their logits: from -10000 to 10000, or -inf = never.
    logprobs
        Log-probabilities of each chosen token and of so many most likely ones, None = none. They are the model's,
        before all that is described here.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = field(default=())
    max_tokens: int | None = None
    grammar: str | None = None
    json_schema: Mapping[str, Any] | str | bool | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        real("temperature", self.temperature, 0, 1000)
        integer("top_k", self.top_k, 0, 2**31 - 1)
        real("top_p", self.top_p, 0, 1)
        real("min_p", self.min_p, 0, 1)
        real("repeat_penalty", self.repeat_penalty, 0.01, 100)
        real("presence_penalty", self.presence_penalty, -100, 100)
        real("frequency_penalty", self.frequency_penalty, -100, 100)
        integer("repeat_last_n", self.repeat_last_n, 0, 1_000_000)
        if self.seed is not None:
            integer("seed", self.seed, -1, MAX_SEED)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0, 1000)
        if self.grammar is not None and self.json_schema is not None:
            raise ConfigError("grammar and json_schema contradict each other: give one of them")
        _ = self.gbnf  # raises if it cannot be had
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        try:
            stop: tuple[object, ...] = (self.stop,) if isinstance(self.stop, str | bytes) else tuple(self.stop)
        except TypeError:
            stop = (None,)
        if not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop must be a non-empty string or a list of such, not {self.stop!r}")
        object.__setattr__(self, "stop", stop)  # once: it may be an iterator

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop)

    @cached_property
    def gbnf(self) -> str | None:
        """The grammar that the text must follow, None = any text."""
        grammar = self.grammar
        if self.json_schema is not None:
            grammar = json_schema.to_grammar(self.json_schema)
        if grammar is None:
            return None
        if not isinstance(grammar, str) or not grammar.strip() or "\0" in grammar:
            raise GrammarError(f"grammar must be text without zero bytes in GBNF, not {grammar!r:.80}")
        try:
            grammar.encode()
        except UnicodeError as e:
            raise GrammarError(f"the grammar is not valid Unicode: {e}") from None
        return grammar


def _biases(logit_bias: object) -> dict[int, float]:
    """What is added to logits, checked."""
    if not isinstance(logit_bias, Mapping):
        raise ConfigError(f"logit_bias must be a dict from token ids to numbers, not {logit_bias!r:.80}")
    return {
        integer("a token of logit_bias", token, 0, 2**31 - 1): bias
        if isinstance(bias, float) and bias == -math.inf
        else real("a value of logit_bias", bias, -10000, 10000)
        for token, bias in logit_bias.items()
    }
