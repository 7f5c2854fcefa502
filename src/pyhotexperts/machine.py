"""What this machine has: processor cores, memory, compute devices."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyhotexperts import _ffi

MAX_THREADS = 512  # ggml's limit


@dataclass(frozen=True)
class Device:
    """A compute device as llama.cpp sees it; memory in bytes."""

    name: str
    description: str
    backend: str
    is_gpu: bool
    memory_free: int
    memory_total: int


def devices() -> list[Device]:
    """The compute devices of this process, the CPU among them."""
    _ffi.init()
    result = []
    for i in range(_ffi.lib.phx_device_count()):
        d = _ffi.ffi.new("phx_device *")
        _ffi.check(_ffi.lib.phx_device_get(i, d), "asking for a device")
        result.append(
            Device(
                name=_ffi.text_of(d.name),
                description=_ffi.text_of(d.description),
                backend=_ffi.text_of(d.backend),
                is_gpu=bool(d.is_gpu),
                memory_free=d.memory_free if d.is_gpu else available_ram() or d.memory_free,
                memory_total=d.memory_total,
            )
        )
    return result


def build_info() -> dict[str, Any]:
    """What this package was built from and how, and which compute backends were loaded: values that JSON can hold.

    Keys: version, python, platform, llama_cpp_commit, llama_cpp_version, llama_cpp_origin, patch_hash (sha256 of the
    patch queue), build_type, compiler, cpu_built, cuda_built ("" = without CUDA), cuda_left_out_because,
    cuda_inactive_reason ("" = it is active), system_info, backends.
    """
    return {
        "version": version("pyhotexperts"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_ffi.build_info(),
    }


def has_gpu() -> bool:
    """Whether a GPU can be used by this process."""
    return any(d.is_gpu for d in devices())


def no_gpu_reason() -> str:
    """Why this process can use no GPU."""
    build = _ffi.build_info()
    if not build["cuda_built"]:
        why = build["cuda_left_out_because"]
        return f"this build has no CUDA backend, {why} (to build one: pip install with -C cmake.define.GGML_CUDA=ON)"
    return str(build["cuda_inactive_reason"]) or "no device was found"


def default_threads() -> int:
    """Physical cores that this process may run on (a second hardware thread of a core seldom helps)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            return min(len(allowed), MAX_THREADS)
    return min(max(1, len(cores)), MAX_THREADS)


def lane_threads(n_threads: int) -> int:
    """Threads for the CPU lane: one processor is left to the thread that waits for the GPU."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(n_threads, allowed - 1))


def available_ram() -> int | None:
    """Bytes of RAM that can be taken without swapping, None if unknown. Minds the limit of a container."""
    values = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                values.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        values.append(max(0, limit - used))
    except (OSError, ValueError):
        pass  # no container limit ("max" is no number)
    return min(values, default=None)
