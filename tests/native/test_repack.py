"""The load mode that gives weights the form of the CPU's fastest kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from moe_models import N_EMBD, N_EXPERT, N_FF, N_LAYER, TOP_K, write

import pyhotexperts as phx

TOKENS = list(range(1, 41))
EXPERT_BYTES = 3 * N_EMBD * N_FF // 32 * 18  # one expert of one layer in Q4_0


def logits(path: Path, load_mode: str) -> np.ndarray:
    with phx.Model(path, offload=phx.cpu_experts(), n_threads=1, load_mode=load_mode) as model:
        model.eval(TOKENS[:-1])
        model.eval(TOKENS[-1:])
        return model.logits


def test_repacked_experts_compute_the_same_model(tmp_path: Path) -> None:
    stored = write(tmp_path / "q4_0.gguf", "llama", Type.Q4_0)
    exact = write(tmp_path / "exact.gguf", "llama", Type.Q4_0, exact=True)
    try:
        repacked = logits(stored, "repack")
    except phx.UnavailableError as e:
        pytest.skip(str(e))
    reference = logits(exact, "mmap")
    assert float(np.mean((repacked - reference) ** 2) / np.mean(reference**2)) < 2e-3


def test_the_memory_report_shows_what_is_repacked(tmp_path: Path) -> None:
    path = write(tmp_path / "q4_0.gguf", "llama", Type.Q4_0)
    try:
        with phx.Model(path, offload=phx.cpu_experts(), load_mode="repack") as model:
            memory, info = model.memory, model.info
    except phx.UnavailableError as e:
        pytest.skip(str(e))
    assert [m.repacked for m in memory] == [0] * (len(memory) - 1) + [N_LAYER * N_EXPERT * EXPERT_BYTES]
    assert memory[-1].model >= memory[-1].repacked
    assert info.expert_bytes == info.expert_bytes_in_ram == N_LAYER * TOP_K * EXPERT_BYTES


def test_a_model_that_cannot_be_repacked_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "f32.gguf", "llama", Type.Q4_0, exact=True)
    with pytest.raises(phx.UnavailableError, match="no form of their own"):
        phx.Model(path, offload=phx.cpu_experts(), load_mode="repack")


@pytest.mark.parametrize("offload", ["hot_experts", "full_gpu"])
def test_what_the_gpu_computes_is_not_repacked(offload: str) -> None:
    with pytest.raises(phx.ConfigError, match=r"for experts that the CPU computes, not for offload="):
        phx.Model(offload=offload, load_mode="repack")
