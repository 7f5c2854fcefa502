"""The geometry models of the benchmarks: their routing is what their header says, and llama.cpp computes it."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts.bench import child
from pyhotexperts.bench.config import Mode, Run, default_text

N_TOKENS = 4096
LAYERS = range(4)


def lru_hit_rate(ids: np.ndarray, slots: int) -> float:
    """Share of the selections that an LRU of so many experts holds; its state goes on from prompt to prompt."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token in ids:
        hits += sum(int(e) in resident for e in token)
        for e in token[::-1]:
            resident.pop(int(e), None)
            resident[int(e)] = None
        while len(resident) > slots:
            resident.popitem(last=False)
    return hits / ids.size


def repeats(ids: np.ndarray) -> float:
    """Share of a token's experts that the token before selected too."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairwise(ids)]))


@pytest.mark.parametrize(
    ("routing", "n_expert", "top_k", "repeat", "lru"),
    [
        ("A", 128, 8, 0.44, {24: 0.74, 49: 0.91}),
        ("B", 512, 10, None, {31: 0.435, 62: 0.62, 93: 0.72}),
        ("C", 256, 8, 0.352, {41: 0.55}),
    ],
)
def test_routing_is_as_published(
    make_model: ModuleType, routing: str, n_expert: int, top_k: int, repeat: float | None, lru: dict[int, float]
) -> None:
    g = replace(make_model.QWEN3, n_expert=n_expert, top_k=top_k, n_embd=128, routing=getattr(make_model, routing))
    z = make_model.latents(N_TOKENS, g.routing)
    layers = [make_model.selected(g, layer, z) for layer in LAYERS]
    if repeat is not None:
        assert np.mean([repeats(ids) for ids in layers]) == pytest.approx(repeat, abs=0.04)
    for slots, rate in lru.items():
        assert np.mean([lru_hit_rate(ids, slots) for ids in layers]) == pytest.approx(rate, abs=0.04), slots


def small(make_model: ModuleType, name: str) -> object:
    """The model with few layers, few tokens and narrow experts: same architecture, same types."""
    g = make_model.MODELS[name]
    n_ff = 256 if g.n_ff % 256 == 0 else 128
    return replace(
        g,
        n_layer=4,
        n_embd=g.n_embd if g.n_embd % 256 else 512,
        n_head=16 if g.kv_lora else min(g.n_head, 8),
        n_head_kv=min(g.n_head_kv, 2),
        n_expert=32,
        n_ff=n_ff if g.architecture != "gpt-oss" else 288,
        n_ff_shared=256 if g.n_shared else 0,
        n_ff_dense=512 if g.n_dense else 0,
        n_vocab=640,
        delta=(128, 2, 4) if g.delta else None,
    )


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.5-122b-a10b", "gpt-oss-120b", "glm-4.5-air", "deepseek-v2"])
def test_llama_cpp_routes_as_computed(make_model: ModuleType, name: str, tmp_path: Path) -> None:
    g = small(make_model, name)
    if name in ("glm-4.5-air", "deepseek-v2"):
        g = replace(g, n_ff_shared=g.n_ff * g.n_shared)
    path = tmp_path / "model.gguf"
    make_model.write(name, g, path)
    with phx.Model(path, n_ctx=512, offload=phx.cpu_experts()) as model:
        assert model.info.architecture == g.architecture
        assert model.info.n_expert == 32
        routing = model.record_routing(list(range(100, 300)))
    z = make_model.latents(g.n_vocab, g.routing)[100:300]
    assert routing.layers == tuple(i for i in range(g.n_layer) if g.has_experts(i))
    for row, layer in enumerate(routing.layers):
        expected = make_model.selected(g, layer, z)
        same = [len(set(a) & set(b)) / g.top_k for a, b in zip(expected, routing.experts[:, row].tolist(), strict=True)]
        assert np.mean(same) > 0.9, layer


def test_shards_are_one_model(make_model: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_model.write("qwen3-30b-a3b", small(make_model, "qwen3-30b-a3b"), path, split_max_size=3_000_000)
    shards = list(make_model.written(path))
    assert len(shards) > 2
    with phx.Model(shards[0], n_ctx=256, offload=phx.cpu_experts()) as model:
        assert len(model.generate([1, 2, 3], max_tokens=4).tokens) == 4


def test_the_benchmark_says_how_to_measure_them(make_model: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make_model.write("qwen3-30b-a3b", small(make_model, "qwen3-30b-a3b"), path)
    run = Run(str(path), Mode("cpu_experts"), 8, 8, 0, 64, 64, 1, "mmap", "f16", "f16", "on", str(default_text()), 0)
    with (
        phx.Model(path, n_ctx=256, offload=phx.cpu_experts()) as model,
        pytest.raises(phx.ConfigError, match=r"no tokenizer.*--consecutive"),
    ):
        child.tokens_of(run, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3-30b-a3b", "x.gguf", "--n-layer", "49"), "from 1 to 48"),
        (("deepseek-v2-lite", "x.gguf", "--n-layer", "3"), "by its 26 or 27 layers"),
        (("qwen9", "x.gguf"), "invalid choice"),
        (("qwen3-30b-a3b", "x.gguf", "--split-max-size", "lots"), "no size such as"),
        (("qwen3-30b-a3b", "/no/such/folder/x.gguf", "--n-layer", "1"), "cannot write"),
    ],
)
def test_mistakes_are_said(root: Path, arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, root / "benchmarks" / "make_model.py", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0
    assert message in run.stderr
