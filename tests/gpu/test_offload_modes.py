"""The offload modes on a GPU, with the embedded model: same text model everywhere, VRAM as planned."""

from __future__ import annotations

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts import _ffi

pytestmark = pytest.mark.gpu

MODES = [phx.cpu_experts(), phx.layers(3), phx.full_gpu()]
TEXT = "The harbour lay quiet under the snow, and the old captain counted the lights along the quay. " * 12


def gpu_model_bytes(model: phx.Model) -> int:
    return sum(m.model for m in model.memory if m.is_gpu)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """Negative log-likelihoods with everything on the CPU."""
    with phx.Model(offload=phx.cpu_experts(), n_gpu_layers=0) as model:
        return model.score(TEXT).nll


def test_cuda_is_active() -> None:
    facts = _ffi.build_info()
    assert facts["cuda_built"]
    assert facts["cuda_inactive_reason"] == ""
    assert "CUDA" in facts["backends"]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("load_mode", ["mmap", "copy"])
def test_every_mode_computes_the_same_model(mode: phx.Offload, load_mode: str, reference: np.ndarray) -> None:
    with phx.Model(offload=mode, load_mode=load_mode) as model:
        nll = model.score(TEXT).nll
        assert model.offload == mode
        assert model.generate("The harbour", max_tokens=20, seed=1).text
    assert nll.mean() == pytest.approx(reference.mean(), abs=0.02)
    assert np.abs(nll - reference).mean() < 0.1


def test_each_mode_takes_the_vram_it_plans() -> None:
    planned = []
    for mode in MODES:
        before = next(d for d in phx.devices() if d.is_gpu).memory_free
        with phx.Model(offload=mode) as model:
            used = before - next(d for d in phx.devices() if d.is_gpu).memory_free
            plan = sum(m.needed for m in model.memory if m.is_gpu)
            assert used >= 0.9 * plan - (8 << 20)
            planned.append(gpu_model_bytes(model))
    assert planned[0] < planned[1] < planned[2]
    experts = 6 * 64 * 59_392  # models/README.md: bytes of all routed experts
    assert planned[2] - planned[0] == pytest.approx(experts, rel=0.02)
    assert planned[2] - planned[1] == pytest.approx(experts / 2, rel=0.02)


def test_auto_takes_the_whole_gpu_when_the_model_fits() -> None:
    with phx.Model() as model:
        assert model.offload == phx.full_gpu()


def test_auto_leaves_the_experts_in_ram_when_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhotexperts.placement.VRAM_MARGIN", 1 << 60)
    with phx.Model() as model:
        assert model.offload == phx.cpu_experts()


def test_routing_is_the_same_on_cpu_and_gpu() -> None:
    with phx.Model(offload=phx.full_gpu()) as gpu, phx.Model(offload=phx.cpu_experts(), n_gpu_layers=0) as cpu:
        a, b = gpu.record_routing(TEXT).experts, cpu.record_routing(TEXT).experts
    same = np.mean([len(set(x) & set(y)) / 8 for x, y in zip(a.reshape(-1, 8), b.reshape(-1, 8), strict=True)])
    assert same > 0.97


def test_a_model_larger_than_vram_is_refused_with_advice() -> None:
    with pytest.raises(phx.OutOfMemoryError, match="VRAM of CUDA0"):
        phx.Model(offload=phx.full_gpu(), n_ctx=200_000_000, type_k="f32", type_v="f32")
