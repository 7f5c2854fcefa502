"""Parameters are checked before native code sees them, and the message names parameter and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts.sampling import seed_value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("repeat_penalty", 0),
        ("presence_penalty", 1e9),
        ("frequency_penalty", float("-inf")),
        ("repeat_last_n", -1),
        ("seed", -2),
        ("seed", 2**32),
        ("seed", "one"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", 3),
        ("stop", b"end"),
        ("temperature", 10**400),
        ("top_k", [1, 2]),
    ],
)
def test_sampling_refuses(name: str, value: Any) -> None:
    with pytest.raises(phx.ConfigError, match=name) as failure:
        phx.Sampling(**{name: value})
    assert repr(value) in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", 0),
        ("n_ctx", -5),
        ("n_ctx", 2**31),
        ("n_ctx", "big"),
        ("n_ctx", 10.0),
        ("n_batch", 0),
        ("n_ubatch", -1),
        ("n_gpu_layers", "all of them"),
        ("n_gpu_layers", -2),
        ("n_gpu_layers", 1.0),
        ("n_threads", 0),
        ("n_threads", 100_000),
        ("type_k", "q3_k"),
        ("type_v", "f17"),
        ("type_k", 8),
        ("flash_attn", "maybe"),
        ("flash_attn", None),
        ("seed", -3),
        ("load_mode", "telepathy"),
        ("offload", "gpu"),
        ("offload", None),
        ("offload", phx.cpu_experts),
        ("offload", 3.5),
        ("progress", 3),
    ],
)
def test_model_refuses(name: str, value: Any) -> None:
    with pytest.raises(phx.ConfigError, match=name) as failure:
        phx.Model(**{name: value})
    assert repr(value) in str(failure.value)


def test_quantised_values_need_flash_attention() -> None:
    with pytest.raises(phx.ConfigError, match=r'type_v="q8_0" needs flash attention.*flash_attn="off"'):
        phx.Model(type_v="q8_0", flash_attn=False)
    for parameters in ({"type_v": "bf16", "flash_attn": "off"}, {"type_v": "q8_0"}, {"type_k": "q8_0"}):
        phx.model.load_request(None, **parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 1.5, "8", None, True])
def test_layers_refuses(value: Any) -> None:
    with pytest.raises(phx.ConfigError, match="n_cpu_moe"):
        phx.layers(value)
    with pytest.raises(phx.ConfigError, match="n_cpu_moe"):
        phx.Layers(value)


def test_a_stop_string_may_be_given_alone() -> None:
    assert phx.Sampling(stop="end").stop_strings == ("end",)
    assert phx.Sampling(stop=["a", "b"]).stop_strings == ("a", "b")
    assert phx.Sampling().stop_strings == ()
    assert phx.Sampling(stop=(s for s in "ab")).stop_strings == ("a", "b")


def test_seeds_are_drawn_when_not_given() -> None:
    assert seed_value(7) == 7
    assert len({seed_value(None) for _ in range(8)} | {seed_value(-1) for _ in range(8)}) > 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", -1),
        ("slots", 1.5),
        ("slots", "many"),
        ("slots", True),
        ("vram_budget", 0),
        ("vram_budget", "12 bananas"),
        ("vram_budget", "GiB"),
        ("vram_budget", 1.5),
        ("vram_budget", "12"),
        ("vram_budget", 12),
        ("vram_budget", "9" * 400),
        ("vram_budget", "9" * 400 + "GiB"),
        ("n_cpu_moe", -2),
        ("policy", "belady"),
        ("policy", "frozen"),
        ("rebalance_interval", 0),
        ("half_life", 0),
        ("half_life", float("nan")),
        ("hysteresis", -0.1),
        ("uploads_per_step", -2),
        ("prefill_bypass", 0),
        ("deterministic", 1),
        ("strict", "yes"),
    ],
)
def test_hot_experts_refuses(name: str, value: Any) -> None:
    with pytest.raises(phx.ConfigError, match=name) as failure:
        phx.hot_experts(**{name: value})
    assert repr(value)[:100] in str(failure.value) or "unit missing" in str(failure.value)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("LLAMA_ARG_MOE_HOT_K", "44", "slots", 44),
        ("LLAMA_ARG_MOE_HOT_K", "auto", "slots", None),
        ("LLAMA_ARG_MOE_HOT_REBALANCE_INTERVAL", "30", "rebalance_interval", 30),
        ("LLAMA_MOE_HOT_PP_BYPASS_N_TOKENS", "128", "prefill_bypass", 128),
        ("PYHOTEXPERTS_VRAM_MIB", "12000", "vram_budget", 12000 << 20),
        ("PYHOTEXPERTS_POLICY", "lru", "policy", "lru"),
        ("PYHOTEXPERTS_HALF_LIFE", "8.5", "half_life", 8.5),
        ("PYHOTEXPERTS_HYSTERESIS", "0", "hysteresis", 0.0),
        ("PYHOTEXPERTS_UPLOADS_PER_STEP", "-1", "uploads_per_step", None),
        ("PYHOTEXPERTS_FETCHES_PER_STEP", "2", "fetches_per_step", 2),
        ("PYHOTEXPERTS_DETERMINISTIC", "on", "deterministic", True),
        ("PYHOTEXPERTS_STRICT", "1", "strict", True),
    ],
)
def test_hot_experts_read_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(phx.hot_experts(), name) == value
    monkeypatch.setenv(variable, "no sense")
    with pytest.raises(phx.ConfigError, match=rf"{variable}\b.*no sense"):
        phx.hot_experts()


@pytest.mark.parametrize(
    ("variable", "text"),
    [("LLAMA_ARG_MOE_HOT_K", "-5"), ("PYHOTEXPERTS_FETCHES_PER_STEP", "9"), ("PYHOTEXPERTS_HALF_LIFE", "nan")],
)
def test_a_variable_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(phx.ConfigError, match=rf"the environment variable {variable}: .*{text}"):
        phx.hot_experts()


@pytest.mark.parametrize("name", ["fetches_per_step", "slots"])
def test_words_are_no_numbers(name: str) -> None:
    with pytest.raises(phx.ConfigError, match=rf"{name}.* not 'many'"):
        phx.hot_experts(**{name: "many"})


def test_hot_experts_are_values_whatever_the_numbers_came_as() -> None:
    mode = phx.hot_experts(slots=np.int64(3), uploads_per_step=-1, half_life=np.float32(8))
    assert (type(mode.slots), type(mode.half_life)) == (int, float)
    assert mode.uploads_per_step is None
    assert mode == phx.hot_experts(slots=3, uploads_per_step=-1, half_life=8.0)
    assert hash(mode)


def test_a_parameter_wins_over_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MOE_HOT_K", "44")
    monkeypatch.setenv("PYHOTEXPERTS_VRAM_MIB", "nonsense")
    mode = phx.hot_experts(slots=8, vram_budget="1.5GiB")
    assert (mode.slots, mode.vram_budget) == (8, 3 << 29)
    assert str(mode) == f"hot_experts(slots=8, vram_budget={3 << 29})"
    assert phx.hot_experts(slots="auto", vram_budget="2GB").slots is None


def test_offload_modes_are_values() -> None:
    assert phx.layers(8) == phx.layers(8)
    assert phx.layers(8) != phx.layers(9)
    assert phx.cpu_experts() == phx.cpu_experts()
    assert [str(m) for m in (phx.cpu_experts(), phx.layers(8), phx.full_gpu())] == [
        "cpu_experts()",
        "layers(8)",
        "full_gpu()",
    ]


def test_every_error_is_in_one_tree() -> None:
    kinds = [getattr(phx, name) for name in phx.__all__ if name.endswith("Error")]
    assert len(kinds) > 10
    assert all(issubclass(kind, phx.PyHotExpertsError) for kind in kinds)
    assert issubclass(phx.ModelNotFoundError, FileNotFoundError)
    assert issubclass(phx.OutOfMemoryError, MemoryError)
    assert issubclass(phx.ConfigError, ValueError)
