"""The cache on every form of MoE layer: the lanes where they compute it, the staged path where they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from moe_models import ARCHITECTURES, LANES, N_VOCAB, write

import pyhotexperts as phx

pytestmark = pytest.mark.gpu

IDS = [(7 * i * i + 3 * i) % N_VOCAB for i in range(200)]


def logits(model: phx.Model, n_batch: int) -> np.ndarray:
    """float32[len(IDS) / n_batch, n_vocab]: after each batch."""
    model.reset()
    rows = []
    for at in range(0, len(IDS), n_batch):
        model.eval(IDS[at : at + n_batch])
        rows.append(model.logits)
    return np.stack(rows)


# grovemoe selects an expert twice, on which upstream aborts if its weights are floats.
MODELS = [(a, t) for a in ARCHITECTURES for t in (Type.Q8_0, Type.Q4_0, Type.F16) if (a, t) != ("grovemoe", Type.F16)]


@pytest.mark.parametrize(("architecture", "expert_type"), MODELS, ids=lambda p: getattr(p, "name", p))
def test_same_model_with_the_cache(architecture: str, expert_type: Type, tmp_path: Path) -> None:
    batches = (1, 5, 40, 200)
    if architecture == "grovemoe":  # upstream's kernels for larger batches cannot select an expert twice either
        batches = (1, 5)
    path = write(tmp_path / "model.gguf", architecture, expert_type)
    with (
        phx.Model(path, offload=phx.full_gpu()) as gpu,
        phx.Model(path, offload=phx.cpu_experts(), n_gpu_layers=0) as cpu,
        phx.Model(path, offload=phx.hot_experts(slots=6, strict=True)) as hot,
    ):
        for n_batch in batches:
            expected, other, seen = logits(gpu, n_batch), logits(cpu, n_batch), logits(hot, n_batch)
            spread = np.abs(expected).mean()
            difference = np.abs(seen - expected).mean() / spread
            assert difference <= max(2 * np.abs(other - expected).mean() / spread, 1e-3), f"batches of {n_batch}"
        status = hot.cache.status
        lanes = architecture in LANES and expert_type != Type.F16
        assert (status.hits.sum() + status.misses.sum() > 0) == lanes
        assert status.uploads.sum() > 0
        assert (status.bypassed["batch"] > 0) == (lanes and batches[-1] > 8)
        assert (status.bypassed["no_cache"] > 0) == (architecture == "grovemoe")
        assert (status.bypassed["shape"] + status.bypassed["type"] > 0) != lanes
