"""Offload modes as values: where a mixture-of-experts model's weights live and compute.

The routed experts are most of such a model, but each token uses few of them. The modes differ in what
happens to them; attention, router, shared experts and the KV cache go to the GPU in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pyhotexperts.errors import ConfigError
from pyhotexperts.validation import boolean, choice, integer, memory_size, real, upload_limit

CACHE_POLICIES = ("decay", "markov", "lru", "window")
MAX_FETCHES = 4  # of lane_share.h
MIN_BUDGET = 256 << 20  # bytes of VRAM: CUDA alone takes as much


@dataclass(frozen=True)
class CpuExperts:
    """All routed experts in RAM, computed by the CPU (llama.cpp's ``--cpu-moe``)."""

    n_cpu_moe = -1

    def __str__(self) -> str:
        return "cpu_experts()"


@dataclass(frozen=True)
class Layers:
    """The routed experts of the first `n_cpu_moe` layers in RAM, the others in VRAM (``--n-cpu-moe``)."""

    n_cpu_moe: int

    def __post_init__(self) -> None:
        integer("n_cpu_moe", self.n_cpu_moe, 0, 1_000_000)

    def __str__(self) -> str:
        return f"layers({self.n_cpu_moe})"


@dataclass(frozen=True)
class FullGpu:
    """Everything in VRAM."""

    n_cpu_moe = 0

    def __str__(self) -> str:
        return "full_gpu()"


@dataclass(frozen=True)
class HotExperts:
    """The experts in use in VRAM slots, the others computed by the CPU at the same time. Made by `hot_experts`."""

    slots: int | None = None  # per layer, None = as many as fit
    vram_budget: int | None = None  # bytes, None = what is free
    n_cpu_moe: int = -1
    policy: str = "decay"
    rebalance_interval: int = 60
    half_life: float = 12.0
    hysteresis: float = 0.25
    uploads_per_step: int | None = 2
    fetches_per_step: int = -1  # by the number of slots
    prefill_bypass: int = 64
    deterministic: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n_cpu_moe": integer("n_cpu_moe", self.n_cpu_moe, -1, 1_000_000),
            "policy": choice("policy", self.policy, CACHE_POLICIES),
            "rebalance_interval": integer("rebalance_interval", self.rebalance_interval, 1, 2**31 - 1),
            "half_life": real("half_life", self.half_life, 0.01, 1e9),
            "hysteresis": real("hysteresis", self.hysteresis, 0, 1e9),
            "uploads_per_step": upload_limit("uploads_per_step", self.uploads_per_step),
            "fetches_per_step": integer("fetches_per_step", self.fetches_per_step, -1, MAX_FETCHES),
            "prefill_bypass": integer("prefill_bypass", self.prefill_bypass, 1, 2**31 - 1),
            "deterministic": boolean("deterministic", self.deterministic),
            "strict": boolean("strict", self.strict),
        }
        if self.slots is not None:
            if isinstance(self.slots, str):
                raise ConfigError(f'slots must be a number from 0 to 65535, or "auto", not {self.slots!r}')
            checked["slots"] = integer('slots ("auto", or a number)', self.slots, 0, 65_535)
        if self.vram_budget is not None:
            checked["vram_budget"] = memory_size("vram_budget", self.vram_budget, MIN_BUDGET)
        for name, value in checked.items():  # as plain numbers, whatever they came as
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"hot_experts({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


Offload = CpuExperts | Layers | FullGpu | HotExperts


def cpu_experts() -> CpuExperts:
    """All routed experts in RAM, computed by the CPU: the least VRAM."""
    return CpuExperts()


def layers(n_cpu_moe: int) -> Layers:
    """The routed experts of the first `n_cpu_moe` layers in RAM, those of the other layers in VRAM.

    Parameters
    ----------
    n_cpu_moe
        Number of layers, 0 = all experts in VRAM; more than the model has = all of them in RAM.

    Raises
    ------
    ConfigError
        If `n_cpu_moe` is no integer or negative.
    """
    return Layers(n_cpu_moe)


def full_gpu() -> FullGpu:
    """Everything in VRAM: the fastest mode for a model that fits."""
    return FullGpu()


def hot_experts(
    *,
    slots: int | str | None = None,
    vram_budget: int | str | None = None,
    n_cpu_moe: int = -1,
    policy: str | None = None,
    rebalance_interval: int | None = None,
    half_life: float | None = None,
    hysteresis: float | None = None,
    uploads_per_step: int | None = None,
    fetches_per_step: int | None = None,
    prefill_bypass: int | None = None,
    deterministic: bool | None = None,
    strict: bool | None = None,
) -> HotExperts:
    """The experts in use in VRAM slots, the others computed by the CPU at the same time.

    What is left at None comes from the environment variable in brackets, if it is set, else from the default.

    Parameters
    ----------
    slots
        Expert slots per layer [LLAMA_ARG_MOE_HOT_K]: a number (more than the layer has experts = all of them), "auto"
        (the default) = as many as fit, or 0 = no cache: then the mode is chosen as by offload="auto".
    vram_budget
        All VRAM that this process may use on each GPU: weights, KV cache, buffers, slots and what CUDA itself takes.
        Bytes, or a text such as "12GiB" or "12000MiB" [PYHOTEXPERTS_VRAM_MIB, a bare number is MiB]. 768 MiB of it are
        left to CUDA. Default: what is free, less 1 GiB.
    n_cpu_moe
        Only the experts of the first layers are in RAM and cached, those of the others in VRAM; -1 = of every layer.
    policy
        Which experts get the slots [PYHOTEXPERTS_POLICY]: "decay" (the default: uses, each worth half as much
        `half_life` tokens later), "markov" (the same, and what is likely for the next token, from what followed this
        token's experts before), "lru" (used last), "window" (uses in the last `rebalance_interval` tokens,
        re-examined as often).
    rebalance_interval
        Tokens between rebalances, for "window" [LLAMA_ARG_MOE_HOT_REBALANCE_INTERVAL]. Default: 60.
    half_life
        Tokens, for "decay" and "markov" [PYHOTEXPERTS_HALF_LIFE]. Default: 12.
    hysteresis
        Share by which a newcomer's score must exceed the victim's, for "decay" and "markov"
        [PYHOTEXPERTS_HYSTERESIS]. Default: 0.25.
    uploads_per_step
        Most experts copied into slots, per layer and token, less those that the GPU fetches
        [PYHOTEXPERTS_UPLOADS_PER_STEP]; -1 = no limit. Default: 2.
    fetches_per_step
        Most experts without a slot that the GPU fetches over the bus and computes itself, per layer and token, while
        the CPU computes the others; as many slots of each layer are kept open for them
        [PYHOTEXPERTS_FETCHES_PER_STEP]. How many it is at a time is decided by what is measured while the model runs.
        0..4; -1 (the default) = one for every 16 slots, and one from 8 slots on.
    prefill_bypass
        Batches of this many tokens or more bring experts to the GPU by copies beside the computation: all of them,
        ahead, if they select each twenty times on average, else those that they use, if it is twice or more and they
        lie in pinned memory. Other batches of more than 8 tokens bring what they use by a kernel
        [LLAMA_MOE_HOT_PP_BYPASS_N_TOKENS]. Default: 64.
    deterministic
        Residency depends on the tokens alone, so that the same input gives the same bits; slower
        [PYHOTEXPERTS_DETERMINISTIC]. Default: False.
    strict
        Loading fails if the cache cannot be active as asked for [PYHOTEXPERTS_STRICT]. Default: False: the reason is
        logged and in `Model.cache.status`.

    Raises
    ------
    ConfigError
        If a parameter or an environment variable has a value that cannot be used.
    """
    given = {
        "slots": slots,
        "vram_budget": vram_budget,
        "policy": policy,
        "rebalance_interval": rebalance_interval,
        "half_life": half_life,
        "hysteresis": hysteresis,
        "uploads_per_step": uploads_per_step,
        "fetches_per_step": fetches_per_step,
        "prefill_bypass": prefill_bypass,
        "deterministic": deterministic,
        "strict": strict,
    }
    values: dict[str, Any] = {}
    for name, value in given.items():
        variable, convert = ENVIRONMENT[name]
        if value is not None:
            values[name] = value
        elif variable in os.environ:
            try:
                values[name] = convert(os.environ[variable])
                if values[name] != "auto":
                    HotExperts(**{name: values[name]})  # so that a value out of range is that of the variable
            except ConfigError as e:
                raise ConfigError(f"the environment variable {variable}: {e}") from None
            except ValueError:
                raise ConfigError(
                    f"the environment variable {variable} has the value {os.environ[variable]!r}: {EXPECTED[convert]}"
                ) from None
    if values.get("slots") == "auto":
        del values["slots"]
    return HotExperts(n_cpu_moe=n_cpu_moe, **values)


def slot_count(text: str) -> int | str:
    """A number of slots, or the word for as many as fit."""
    return text if text == "auto" else int(text)


def truth(text: str) -> bool:
    """A truth value as llama.cpp's environment variables spell it."""
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueError(text)


def vram_budget_of(text: str) -> int:
    """Bytes of a VRAM budget in a flag or a variable; a bare number is MiB."""
    return memory_size("the VRAM budget", text, MIN_BUDGET, bare="MiB")


TRUE_WORDS = {"1", "true", "on", "yes", "enabled"}
FALSE_WORDS = {"0", "false", "off", "no", "disabled", ""}

# Parameter of `hot_experts` -> its environment variable, and what turns that into a value.
ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "slots": ("LLAMA_ARG_MOE_HOT_K", slot_count),
    "vram_budget": ("PYHOTEXPERTS_VRAM_MIB", vram_budget_of),
    "policy": ("PYHOTEXPERTS_POLICY", str),
    "rebalance_interval": ("LLAMA_ARG_MOE_HOT_REBALANCE_INTERVAL", int),
    "half_life": ("PYHOTEXPERTS_HALF_LIFE", float),
    "hysteresis": ("PYHOTEXPERTS_HYSTERESIS", float),
    "uploads_per_step": ("PYHOTEXPERTS_UPLOADS_PER_STEP", int),
    "fetches_per_step": ("PYHOTEXPERTS_FETCHES_PER_STEP", int),
    "prefill_bypass": ("LLAMA_MOE_HOT_PP_BYPASS_N_TOKENS", int),
    "deterministic": ("PYHOTEXPERTS_DETERMINISTIC", truth),
    "strict": ("PYHOTEXPERTS_STRICT", truth),
}
EXPECTED: dict[Callable[[str], Any], str] = {
    slot_count: 'give a whole number, or "auto"',
    int: "give a whole number",
    float: "give a number",
    truth: "give on or off",
}
