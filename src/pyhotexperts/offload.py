"""Offload modes as values: where a mixture-of-experts model's weights live and compute.

The routed experts are most of such a model, but each token uses few of them. The modes differ in what
happens to them; attention, router, shared experts and the KV cache go to the GPU in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyhotexperts.errors import UnavailableError
from pyhotexperts.validation import integer


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


Offload = CpuExperts | Layers | FullGpu


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


def hot_experts(**options: object) -> Offload:
    """The experts in use in VRAM slots, the others computed by the CPU at the same time.

    Raises
    ------
    UnavailableError
        Always: this version does not have the hot-expert cache yet.
    """
    raise UnavailableError(
        "this version of pyhotexperts has no hot-expert cache yet: use cpu_experts(), layers(n_cpu_moe) or full_gpu()"
    )
