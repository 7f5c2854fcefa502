"""The tiny MoE models that the GPU tests use are models: they load, generate and route."""

from __future__ import annotations

from pathlib import Path

import pytest
from moe_models import ARCHITECTURES, N_EXPERT, TOP_K, write

import pyhotexperts as phx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_generates(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", architecture)
    with phx.Model(path, offload=phx.cpu_experts(), n_threads=1) as model:
        assert (model.info.architecture, model.info.n_expert) == (architecture, N_EXPERT)
        assert len(model.generate([1, 2, 3], max_tokens=8, temperature=0).tokens) == 8
        routing = model.record_routing([1, 2, 3, 4])
    assert routing.experts.shape == (4, len(routing.layers), TOP_K)
    assert routing.experts.max() < N_EXPERT
