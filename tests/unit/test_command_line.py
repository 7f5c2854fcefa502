"""Flags, their LLAMA_ARG_* twins, and their defaults."""

from __future__ import annotations

import argparse
import inspect
import math
from typing import Any

import pytest

import pyhotexperts as phx
from pyhotexperts.cli import options


def model_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    options.add_model_flags(parser)
    options.add_sampling_flags(parser)
    return parser


def parse(*argv: str) -> argparse.Namespace:
    parser = model_parser()
    arguments = parser.parse_args(argv)
    options.resolve(parser, arguments)
    return arguments


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in model_parser()._actions:
        if hasattr(action, "twin"):
            monkeypatch.delenv(action.twin[0], raising=False)


def test_model_defaults_agree_with_the_python_api() -> None:
    arguments = parse()
    defaults = {p.name: p.default for p in inspect.signature(phx.Model).parameters.values()}
    names = {
        "model": "path",
        "gpu_layers": "n_gpu_layers",
        "ctx_size": "n_ctx",
        "batch_size": "n_batch",
        "ubatch_size": "n_ubatch",
        "threads": "n_threads",
        "cache_type_k": "type_k",
        "cache_type_v": "type_v",
        "flash_attn": "flash_attn",
        "load_mode": "load_mode",
        "offload": "offload",
    }
    assert {p: getattr(arguments, f) for f, p in names.items()} == {p: defaults[p] for p in names.values()}


def test_sampling_defaults_agree_with_the_python_api() -> None:
    assert phx.Sampling(**options.sampling_of(parse())) == phx.Sampling()


@pytest.mark.parametrize(
    ("env", "text", "flag", "name", "value"),
    [
        ("LLAMA_ARG_CTX_SIZE", "2048", "-c", "ctx_size", 2048),
        ("LLAMA_ARG_THREADS", "3", "-t", "threads", 3),
        ("LLAMA_ARG_N_GPU_LAYERS", "all", "-ngl", "gpu_layers", -1),
        ("LLAMA_ARG_N_CPU_MOE", "8", "-ncmoe", "n_cpu_moe", 8),
        ("LLAMA_ARG_CACHE_TYPE_K", "q8_0", "-ctk", "cache_type_k", "q8_0"),
        ("LLAMA_ARG_LOAD_MODE", "none", "-lm", "load_mode", "copy"),
        ("LLAMA_ARG_LOAD_MODE", "dio", "-lm", "load_mode", "direct_io"),
        ("LLAMA_ARG_TEMPERATURE", "0.5", "--temp", "temp", 0.5),
        ("LLAMA_ARG_N_PREDICT", "12", "-n", "predict", 12),
        ("LLAMA_ARG_MODEL", "some.gguf", "-m", "model", "some.gguf"),
    ],
)
def test_a_flag_and_its_variable_mean_the_same(
    monkeypatch: pytest.MonkeyPatch, env: str, text: str, flag: str, name: str, value: Any
) -> None:
    assert getattr(parse(flag, text), name) == value
    monkeypatch.setenv(env, text)
    assert getattr(parse(), name) == value


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "2048")
    assert parse("-c", "512").ctx_size == 512


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("LLAMA_ARG_CTX_SIZE", "many"),
        ("LLAMA_ARG_CTX_SIZE", ""),
        ("LLAMA_ARG_N_GPU_LAYERS", "some"),
        ("LLAMA_ARG_TOP_P", "half"),
        ("LLAMA_ARG_CPU_MOE", "perhaps"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, env: str, text: str) -> None:
    monkeypatch.setenv(env, text)
    with pytest.raises(phx.ConfigError, match=env) as failure:
        parse()
    assert repr(text) in str(failure.value)


def test_every_flag_that_a_message_may_name_exists() -> None:
    flags = {flag for action in model_parser()._actions for flag in action.option_strings}
    assert set(options.PARAMETERS.values()) <= flags
    assert options.with_flag("n_ctx must be 1 or more, not 0") == "--ctx-size (n_ctx) must be 1 or more, not 0"
    for message in ("half_life must be positive", "the model has no tokenizer", "must be"):
        assert options.with_flag(message) == message


def test_a_bad_flag_is_named() -> None:
    with pytest.raises(phx.ConfigError, match=r"--ctx-size.*'many'"):
        parse("-c", "many")


def test_no_mmap_is_a_load_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_LOAD_MODE", "dio")
    assert parse().load_mode == "direct_io"
    assert parse("--no-mmap").load_mode == "copy"


def test_escapes_are_llama_cpps() -> None:
    flags = ("-r", r"\n", "-r", r"\\n\x41\t\q", "-r", r"\xc3\xa9")
    assert options.sampling_of(parse(*flags))["stop"] == ("\n", "\\nA\t\\q", "é")
    assert options.sampling_of(parse(*flags, "--no-escape"))["stop"] == flags[1::2]
    with pytest.raises(phx.ConfigError, match="not valid UTF-8"):
        options.sampling_of(parse("-r", r"\xff"))


def test_biases_of_tokens() -> None:
    sampling = options.sampling_of(parse("-l", "15+1.5", "--logit-bias", "16-inf", "-l", "15+1e-1"))
    assert phx.Sampling(**sampling).logit_bias == {15: 1.6, 16: -math.inf}


@pytest.mark.parametrize("text", ["15", "x+1", "15+", "15+x", "+1", "15 1"])
def test_a_bad_bias_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("-l", text)
    assert "-l/--logit-bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        ((), "auto"),
        (("-cmoe",), phx.cpu_experts()),
        (("-ncmoe", "8"), phx.layers(8)),
        (("--offload", "full_gpu"), phx.full_gpu()),
        (("--offload", "cpu_experts"), phx.cpu_experts()),
    ],
)
def test_offload_flags(argv: tuple[str, ...], mode: Any) -> None:
    assert options.offload_of(parse(*argv)) == mode


def test_contradicting_offload_flags_are_refused() -> None:
    with pytest.raises(phx.ConfigError, match="--cpu-moe and --n-cpu-moe contradict"):
        options.offload_of(parse("-cmoe", "-ncmoe", "8"))


def test_a_mode_given_by_flag_wins_over_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CPU_MOE", "1")
    assert options.offload_of(parse("-ncmoe", "3")) == phx.layers(3)
    assert options.offload_of(parse("--offload", "full_gpu")) == phx.full_gpu()
    monkeypatch.setenv("LLAMA_ARG_N_CPU_MOE", "5")
    assert options.offload_of(parse("-cmoe")) == phx.cpu_experts()
    with pytest.raises(phx.ConfigError, match="contradict"):
        options.offload_of(parse())


@pytest.mark.parametrize(("text", "mode"), [("1", "on"), ("off", "off"), ("auto", "auto"), ("False", "off")])
def test_flash_attention_takes_truth_values(monkeypatch: pytest.MonkeyPatch, text: str, mode: str) -> None:
    monkeypatch.setenv("LLAMA_ARG_FLASH_ATTN", text)
    assert parse().flash_attn == mode


def test_the_switch_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CPU_MOE", "1")
    assert options.offload_of(parse()) == phx.cpu_experts()
    monkeypatch.setenv("LLAMA_ARG_CPU_MOE", "off")
    assert options.offload_of(parse()) == "auto"
