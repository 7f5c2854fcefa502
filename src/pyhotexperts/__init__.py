"""Run mixture-of-experts language models larger than VRAM on one GPU and one CPU::

    import pyhotexperts as phx

    with phx.Model() as model:  # the small model that is part of the package
        print(model.generate("The harbour lay quiet", max_tokens=40).text)

`Model` is where everything begins.
"""

from __future__ import annotations

from importlib.metadata import version as _version

from pyhotexperts.async_stream import AsyncStream
from pyhotexperts.cache import Cache, CacheStatus
from pyhotexperts.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    ContextFullError,
    DecodeError,
    GrammarError,
    InternalError,
    LoadCancelledError,
    ModelLoadError,
    ModelNotFoundError,
    NativeLibraryError,
    OutOfMemoryError,
    PromptError,
    PyHotExpertsError,
    TemplateError,
    UnavailableError,
)
from pyhotexperts.generation import Stream
from pyhotexperts.loading import embedded_model
from pyhotexperts.machine import Device, build_info, devices
from pyhotexperts.model import Model, kv_types
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
from pyhotexperts.results import (
    Chunk,
    DeviceMemory,
    Generation,
    ModelInfo,
    Perplexity,
    Routing,
    Score,
    TokenLogprob,
)
from pyhotexperts.sampling import Sampling
from pyhotexperts.simulation import CacheSimulation, simulate_cache

__version__ = _version("pyhotexperts")

__all__ = [
    "AsyncStream",
    "BusyError",
    "Cache",
    "CacheSimulation",
    "CacheStatus",
    "Chunk",
    "ClosedError",
    "ConfigError",
    "ContextFullError",
    "CpuExperts",
    "DecodeError",
    "Device",
    "DeviceMemory",
    "FullGpu",
    "Generation",
    "GrammarError",
    "HotExperts",
    "InternalError",
    "Layers",
    "LoadCancelledError",
    "Model",
    "ModelInfo",
    "ModelLoadError",
    "ModelNotFoundError",
    "NativeLibraryError",
    "Offload",
    "OutOfMemoryError",
    "Perplexity",
    "PromptError",
    "PyHotExpertsError",
    "Routing",
    "Sampling",
    "Score",
    "Stream",
    "TemplateError",
    "TokenLogprob",
    "UnavailableError",
    "__version__",
    "build_info",
    "cpu_experts",
    "devices",
    "embedded_model",
    "full_gpu",
    "hot_experts",
    "kv_types",
    "layers",
    "simulate_cache",
]
