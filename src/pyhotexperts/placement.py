"""Before loading: what would a model take on each device, does it fit, and which offload mode is best."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyhotexperts import _ffi, machine
from pyhotexperts.errors import ConfigError, OutOfMemoryError, UnavailableError
from pyhotexperts.offload import (
    CpuExperts,
    FullGpu,
    HotExperts,
    Layers,
    Offload,
    cpu_experts,
    full_gpu,
    hot_experts,
    layers,
)
from pyhotexperts.results import DeviceMemory

# VRAM left free beside what the plan counts: CUDA's own context and memory pools. llama.cpp's --fit leaves as much.
VRAM_MARGIN = 1 << 30

# VRAM that CUDA and the kernels' own buffers take in a process beside what the plan counts (docs/design-notes.md).
CUDA_OVERHEAD = 768 << 20

# Upstream keeps some bytes per token of context in RAM even in a plan, so a plan of an absurd context would take all
# of it. Beyond this many tokens the plan is scaled instead.
MAX_PLANNED_N_CTX = 1 << 20
BYTES_PER_CELL = 64

LESS_VRAM = "Ask for fewer slots, take a smaller n_ctx or n_ubatch, another offload mode, or leave strict out"
BY_NAME: dict[str, Callable[[], Offload]] = {
    "cpu_experts": cpu_experts,
    "full_gpu": full_gpu,
    "hot_experts": hot_experts,
}

LOAD_MODES = {
    "mmap": "PHX_LOAD_MMAP",
    "copy": "PHX_LOAD_COPY",
    "direct_io": "PHX_LOAD_DIRECT_IO",
    "repack": "PHX_LOAD_REPACK",
}


@dataclass(frozen=True)
class LoadRequest:
    """Everything that decides what a load allocates. Validated by its maker (`Model`)."""

    path: str
    n_gpu_layers: int  # -1 = all
    load_mode: str
    n_ctx: int  # 0 = default
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: int
    type_v: int
    flash_attn: int
    n_sequences: int = 0  # 0 = default

    def model_params(self, offload: Offload) -> Any:
        """The native model parameters."""
        params = _ffi.ffi.new("phx_model_params *")
        params.n_gpu_layers = self.n_gpu_layers
        params.n_cpu_moe = offload.n_cpu_moe if machine.has_gpu() else 0  # without a GPU all is in RAM anyway
        params.load_mode = getattr(_ffi.lib, LOAD_MODES[self.load_mode])
        params.hot_experts = isinstance(offload, HotExperts)
        return params

    def context_params(self, record_routing: bool = False, embeddings: bool = False) -> Any:
        """The native context parameters."""
        params = _ffi.ffi.new("phx_context_params *")
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "flash_attn", "n_sequences"):
            setattr(params, name, getattr(self, name))
        params.record_routing = record_routing
        params.embeddings = embeddings
        return params


@dataclass(frozen=True)
class Placement:
    """A decision: the request as it will be loaded, the offload mode, and the memory it takes."""

    request: LoadRequest
    offload: Offload
    memory: tuple[DeviceMemory, ...]
    reason: str
    slots: int = 0  # of the hot-expert cache, per layer
    cache_reason: str = ""  # why there is no cache, or a smaller one, although it was asked for


def plan(request: LoadRequest, offload: Offload) -> tuple[DeviceMemory, ...]:
    """What the model and its context would take on each device, RAM last. Reads metadata only."""
    if request.n_ctx > MAX_PLANNED_N_CTX:
        return _scaled(plan(replace(request, n_ctx=MAX_PLANNED_N_CTX), offload), request.n_ctx)
    rows = _ffi.ffi.new("phx_memory[]", 32)
    n = _ffi.ffi.new("int32_t *")
    status = _ffi.lib.phx_memory_plan(
        os.fsencode(request.path), request.model_params(offload), request.context_params(), rows, len(rows), n
    )
    _ffi.check(status, f"cannot load {request.path}")
    return tuple(
        DeviceMemory(
            name=_ffi.text_of(r.name),
            is_gpu=bool(r.is_gpu),
            model=r.model,
            context=r.context,
            compute=r.compute,
            slot=r.slot,
            n_expert=r.n_expert,
            repacked=r.repacked,
            free=r.memory_free if r.is_gpu else machine.available_ram() or r.memory_free,
            total=r.memory_total,
        )
        for r in rows[0 : n[0]]
    )


def _scaled(memory: tuple[DeviceMemory, ...], n_ctx: int) -> tuple[DeviceMemory, ...]:
    """A plan for `n_ctx` tokens from one for `MAX_PLANNED_N_CTX`: KV cache and attention buffers grow in proportion."""
    factor = n_ctx / MAX_PLANNED_N_CTX
    return tuple(
        replace(
            m,
            context=int(m.context * factor) + (0 if m.is_gpu else BYTES_PER_CELL * n_ctx),
            compute=int(m.compute * factor),
        )
        for m in memory
    )


def slots_that_fit(memory: tuple[DeviceMemory, ...], offload: HotExperts) -> int:
    """Expert slots per layer for which every GPU has room beside all else, within the budget."""
    counts = []
    for m in memory:
        if m.slot:
            room = m.free - VRAM_MARGIN - m.needed
            if offload.vram_budget is not None:
                room = min(room, offload.vram_budget - CUDA_OVERHEAD - m.needed)
            counts.append(min(m.n_expert, max(0, room // m.slot)))
    return min(counts, default=0)


def _within(memory: tuple[DeviceMemory, ...], budget: int) -> bool:
    """Whether every GPU's part stays within a budget, with what CUDA takes."""
    return all(m.needed + CUDA_OVERHEAD <= budget for m in memory if m.is_gpu and m.needed)


def fits_gpu(memory: tuple[DeviceMemory, ...]) -> bool:
    """Whether every GPU has room for its part, with the margin."""
    return all(m.needed + VRAM_MARGIN <= m.free for m in memory if m.is_gpu and m.needed)


def decide(request: LoadRequest, offload: Offload | str, n_gpu_layers_given: bool) -> Placement:
    """Settle the offload mode and check that it fits.

    Raises
    ------
    ConfigError
        If weights are to be repacked for the CPU in a mode that gives the GPU the work.
    UnavailableError
        If a mode that needs a GPU is asked for where there is none, or nothing of the model can be repacked.
    OutOfMemoryError
        If VRAM or RAM cannot hold what the mode needs.
    """
    gpu = machine.has_gpu()
    if isinstance(offload, str) and offload in BY_NAME:
        offload = BY_NAME[offload]()
    if offload != "auto" and not isinstance(offload, CpuExperts | Layers | FullGpu | HotExperts):
        raise ConfigError(
            f'offload must be "auto", cpu_experts(), layers(n), full_gpu(), hot_experts(...) or a name, not {offload!r}'
        )
    if request.load_mode == "repack" and (isinstance(offload, HotExperts | FullGpu) or (gpu and offload == "auto")):
        raise ConfigError(
            f"load_mode='repack' is for experts that the CPU computes, not for offload={offload!s}: "
            f"take cpu_experts(){' or layers(n)' if gpu else ''}, or another load mode"
        )
    if isinstance(offload, str):
        placement = _automatic(request, gpu, n_gpu_layers_given, cache=hot_experts())
    elif isinstance(offload, HotExperts):
        if offload.slots == 0:
            placement = _automatic(request, gpu, n_gpu_layers_given, cache=None)
        else:
            placement = _hot(request, offload, gpu)
    else:
        if not gpu and isinstance(offload, FullGpu | Layers):
            raise UnavailableError(
                f"{offload} needs a GPU, and this process can use none: {machine.no_gpu_reason()}. "
                "Without a GPU leave the mode out, or take cpu_experts() (-cmoe)"
            )
        placement = Placement(request, offload, plan(request, offload), "as asked for")
    if request.load_mode == "repack" and not repacked(placement.memory):
        raise UnavailableError(
            f"load_mode='repack': this processor's kernels have no form of their own for the weights of {request.path} "
            "that are in RAM: take load_mode='copy'"
        )
    _check_memory(placement)
    return placement


def repacked(memory: tuple[DeviceMemory, ...]) -> int:
    """Bytes of weights in the forms of the CPU's fastest kernels."""
    return sum(m.repacked for m in memory)


def _automatic(request: LoadRequest, gpu: bool, n_gpu_layers_given: bool, cache: HotExperts | None) -> Placement:
    """Everything on the GPU if it fits, else hot experts, else CPU experts; fewer layers of a dense model."""
    if not gpu:
        return Placement(request, cpu_experts(), plan(request, cpu_experts()), f"no GPU: {machine.no_gpu_reason()}")
    everything = plan(request, full_gpu())
    budget = cache.vram_budget if cache else None
    if fits_gpu(everything) and (budget is None or _within(everything, budget)):
        return Placement(request, full_gpu(), everything, "everything fits on the GPU")
    without_experts = plan(request, cpu_experts())
    moves_experts = _vram(without_experts) < _vram(everything)
    if moves_experts:
        why = "not everything fits on the GPU"
        if cache is None or cache.slots == 0:
            return Placement(request, cpu_experts(), without_experts, f"{why}; slots=0 switches the cache off")
        return replace(_hot(request, cache, gpu), reason=why)
    if n_gpu_layers_given:
        return Placement(request, full_gpu(), everything, "not everything fits on the GPU")
    return _fewer_layers(request)


def _hot(request: LoadRequest, offload: HotExperts, gpu: bool) -> Placement:
    """The cache with as many slots as were asked for and fit; without any, the experts on the CPU."""
    if not gpu:
        why = f"it needs a GPU, and this process can use none: {machine.no_gpu_reason()}"
        return _without_cache(request, offload, cpu_experts(), why, "Leave strict out, or use a machine with a GPU")
    without: Offload = layers(offload.n_cpu_moe) if offload.n_cpu_moe >= 0 else cpu_experts()
    memory = plan(request, offload)
    if not any(m.slot for m in memory):
        why = "no layer on a GPU has routed experts in RAM"
        return _without_cache(request, offload, without, why, "Take another offload mode, or leave strict out")
    _check_budget(request, offload, without)
    n_expert = max(m.n_expert for m in memory)
    wanted = n_expert if offload.slots is None else min(offload.slots, n_expert)
    slots = min(wanted, slots_that_fit(memory, offload))
    room = "VRAM" if offload.vram_budget is None else f"the budget of {_gib(offload.vram_budget)}"
    why = ""
    if slots < wanted and offload.slots is not None:
        why = f"{offload.slots} slots per layer were asked for, and {room} has room for {slots}"
    elif not slots:
        why = f"{room} has no room for even one slot per layer"
    if not slots or (why and offload.strict):
        return _without_cache(request, offload, without, why, LESS_VRAM, OutOfMemoryError)
    if why:
        _ffi.logger.warning("hot-expert cache: %s", why)
    memory = tuple(replace(m, n_slots=slots) for m in memory)
    return Placement(request, offload, memory, "as asked for", slots=slots, cache_reason=why)


def _without_cache(
    request: LoadRequest,
    offload: HotExperts,
    without: Offload,
    why: str,
    advice: str,
    kind: type[OutOfMemoryError] | type[UnavailableError] = UnavailableError,
) -> Placement:
    """The mode in place of a cache that cannot be had; an error if the caller is strict."""
    if offload.strict:
        raise kind(f"the hot-expert cache cannot be set up as requested: {why}. {advice}")
    _ffi.logger.warning("hot-expert cache: %s", why)
    return Placement(request, without, plan(request, without), f"no hot-expert cache: {why}", cache_reason=why)


def _check_budget(request: LoadRequest, offload: HotExperts, without: Offload) -> None:
    """A budget is a limit: what cannot stay within it even without slots is refused."""
    if offload.vram_budget is None:
        return
    for m in plan(request, without):
        if not _within((m,), offload.vram_budget):
            raise OutOfMemoryError(
                f"{request.path} needs {_gib(m.needed + CUDA_OVERHEAD)} of {m.name} even with all experts in RAM, "
                f"more than the budget of {_gib(offload.vram_budget)}: give a larger one, or take a smaller n_ctx "
                "or n_ubatch"
            )


def _fewer_layers(request: LoadRequest) -> Placement:
    """A dense model that does not fit: as many layers on the GPU as do."""
    low, high = 0, 1024  # low fits, high does not
    best = plan(replace(request, n_gpu_layers=0), full_gpu())
    while high - low > 1:
        middle = (low + high) // 2
        memory = plan(replace(request, n_gpu_layers=middle), full_gpu())
        if fits_gpu(memory):
            low, best = middle, memory
        else:
            high = middle
    reduced = replace(request, n_gpu_layers=low)
    return Placement(reduced, full_gpu(), best, f"{low} layers of this dense model fit on the GPU")


def _vram(memory: tuple[DeviceMemory, ...]) -> int:
    return sum(m.model for m in memory if m.is_gpu)


def _check_memory(placement: Placement) -> None:
    for m in placement.memory:
        if m.is_gpu:
            needed, free, what = m.needed, m.free, f"VRAM of {m.name}"
            advice = "take cpu_experts() or more layers in layers(n), a smaller n_ctx or n_ubatch, or type_k='q8_0'"
        else:
            mapped = placement.request.load_mode == "mmap"  # the page cache may drop mapped weights
            needed = m.needed - (m.model - m.repacked if mapped else 0)
            free = machine.available_ram() or needed
            what = "RAM"
            advice = "take a smaller n_ctx or n_ubatch" + ("" if mapped else ", or load_mode='mmap'")
        if needed > free:
            raise OutOfMemoryError(
                f"{placement.request.path} with {placement.offload} and n_ctx={placement.request.n_ctx or 'default'} "
                f"needs {_gib(needed)} of {what}, and {_gib(free)} are free: {advice}"
            )


def _gib(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB"


def describe(placement: Placement) -> str:
    """One line for the log: what was decided, and the memory it takes."""
    parts = [
        f"{m.name} {_gib(m.needed)}" + (f" ({_gib(m.repacked)} repacked)" if m.repacked else "")
        for m in placement.memory
        if m.needed
    ]
    cache = f"; {placement.slots} expert slots per layer" if placement.slots else ""
    return f"offload {placement.offload} ({placement.reason}){cache}; memory: {', '.join(parts)}"


__all__ = ["LOAD_MODES", "CpuExperts", "LoadRequest", "Placement", "decide", "describe", "plan"]
