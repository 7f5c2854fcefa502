"""Flags with llama.cpp's names, their ``LLAMA_ARG_*`` twins, and the model they describe.

A flag given on the command line wins over its environment variable, which wins over the default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyhotexperts import competition, hub, machine
from pyhotexperts.errors import ConfigError
from pyhotexperts.model import FLASH_ATTN, Model, kv_types
from pyhotexperts.offload import (
    CACHE_POLICIES,
    ENVIRONMENT,
    Offload,
    cpu_experts,
    full_gpu,
    hot_experts,
    layers,
    slot_count,
    truth,
    vram_budget_of,
)
from pyhotexperts.placement import LOAD_MODES
from pyhotexperts.sampling import Sampling

OFFLOAD_MODES: dict[str, Callable[[], Offload | str]] = {
    "auto": lambda: "auto",
    "cpu_experts": cpu_experts,
    "full_gpu": full_gpu,
    "hot_experts": hot_experts,
}

# Flags of the hot-expert cache -> parameters of `hot_experts`, which reads the environment itself.
HOT_FLAGS = {
    "moe_hot_k": "slots",
    "moe_hot_rebalance_interval": "rebalance_interval",
    "moe_hot_pp_bypass": "prefill_bypass",
    "moe_hot_policy": "policy",
    "moe_hot_uploads": "uploads_per_step",
    "moe_hot_fetches": "fetches_per_step",
    "vram_budget": "vram_budget",
    "strict": "strict",
}


def flash_attn(text: str) -> str:
    """A mode of flash attention, or a truth value."""
    if text in FLASH_ATTN:
        return text
    return "on" if truth(text) else "off"


def load_mode(text: str) -> str:
    """A load mode, by our name or llama.cpp's."""
    return {"none": "copy", "dio": "direct_io"}.get(text, text)


def gpu_layers(text: str) -> int:
    """A number of layers, or llama.cpp's words for all of them."""
    return -1 if text in ("all", "auto") else int(text)


def token_bias(text: str) -> tuple[int, float]:
    """A token's id and what is added to its logit, as one word."""
    match = re.fullmatch(r"([0-9]+)([+-](?:inf|[0-9.]+(?:e[+-]?[0-9]+)?))", text)
    try:
        return int(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a token's id, a sign and a number, such as 15+1") from None


def add(
    group: argparse._ArgumentGroup,
    *flags: str,
    env: str,
    convert: Callable[[str], Any] = str,
    default: Any = None,
    **more: Any,
) -> None:
    """Add a flag with a twin in the environment; `resolve` converts its text, so that both are checked alike."""
    more["help"] = f"{more['help']} (env {env})"
    action = group.add_argument(*flags, default=None, **more)
    action.twin = (env, convert, default)  # type: ignore[attr-defined]


def resolve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in flags that were not given from the environment, and check all values.

    Raises
    ------
    ConfigError
        Naming the flag or variable whose value cannot be used.
    """
    arguments.on_command_line = set()
    for action in parser._actions:
        if getattr(arguments, action.dest, None) != action.default:
            arguments.on_command_line.add(action.dest)
        twin = getattr(action, "twin", None)
        if twin is None:
            continue
        env, convert, default = twin
        text, origin = getattr(arguments, action.dest), action.option_strings[-1]
        if text is None and env in os.environ:
            text, origin = os.environ[env], f"the environment variable {env}"
        if text is None or isinstance(text, bool):
            value = default if text is None else text
        else:
            try:
                value = convert(text)
            except ConfigError as e:
                raise ConfigError(f"{origin}: {e}") from None
            except ValueError:
                raise ConfigError(f"{origin} has the value {text!r}, which is {_expected(convert)}") from None
        setattr(arguments, action.dest, value)


def _expected(convert: Callable[[str], Any]) -> str:
    if convert in (int, gpu_layers):
        return "no whole number"
    if convert is float:
        return "no number"
    if convert is slot_count:
        return 'neither a whole number nor "auto"'
    return f"none of {', '.join(FLASH_ATTN)}" if convert is flash_attn else "neither on nor off"


def add_model_file(g: argparse._ArgumentGroup) -> None:
    """The flag that names a model's file."""
    add(
        g,
        "-m",
        "--model",
        env="LLAMA_ARG_MODEL",
        metavar="FNAME",
        help="GGUF file; default: the small model of the package",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model to load, and how."""
    g = parser.add_argument_group("model")
    add_model_file(g)
    add(
        g,
        "-hf",
        "--hf-repo",
        env="LLAMA_ARG_HF_REPO",
        metavar="REPO",
        help="a model of the Hugging Face Hub instead: user/model, or user/model:quant; default quant: Q4_K_M",
    )
    add(
        g,
        "-hff",
        "--hf-file",
        env="LLAMA_ARG_HF_FILE",
        metavar="FNAME",
        help="the file of that repository",
    )
    add(
        g,
        "-c",
        "--ctx-size",
        env="LLAMA_ARG_CTX_SIZE",
        convert=int,
        metavar="N",
        help="tokens of context; default: 4096, or the model's own if less",
    )
    add(
        g,
        "-b",
        "--batch-size",
        env="LLAMA_ARG_BATCH",
        convert=int,
        default=2048,
        metavar="N",
        help="tokens handed over at a time; default: 2048",
    )
    add(
        g,
        "-ub",
        "--ubatch-size",
        env="LLAMA_ARG_UBATCH",
        convert=int,
        default=512,
        metavar="N",
        help="tokens in one pass of the prompt; default: 512",
    )
    add(
        g,
        "-t",
        "--threads",
        env="LLAMA_ARG_THREADS",
        convert=int,
        metavar="N",
        help="CPU threads; default: physical cores",
    )
    add(
        g,
        "-fa",
        "--flash-attn",
        env="LLAMA_ARG_FLASH_ATTN",
        convert=flash_attn,
        default="auto",
        metavar="|".join(FLASH_ATTN),
        help="flash attention; default: auto",
    )
    add(
        g,
        "-ctk",
        "--cache-type-k",
        env="LLAMA_ARG_CACHE_TYPE_K",
        default="f16",
        metavar="TYPE",
        help=f"type of the KV cache's keys, one of {', '.join(kv_types())}; default: f16",
    )
    add(
        g,
        "-ctv",
        "--cache-type-v",
        env="LLAMA_ARG_CACHE_TYPE_V",
        default="f16",
        metavar="TYPE",
        help="type of the KV cache's values; default: f16",
    )
    add(
        g,
        "-lm",
        "--load-mode",
        env="LLAMA_ARG_LOAD_MODE",
        convert=load_mode,
        default="mmap",
        metavar="|".join(LOAD_MODES),
        help="how weights reach RAM; default: mmap",
    )
    g.add_argument(
        "--no-mmap",
        dest="load_mode",
        action="store_const",
        const="copy",
        default=argparse.SUPPRESS,
        help="the same as --load-mode copy",
    )

    g.add_argument(
        "-v", "--verbose", action="count", default=0, help="say what is decided while loading; -vv: llama.cpp's log too"
    )

    g = parser.add_argument_group("offload")
    add(
        g,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        env="LLAMA_ARG_N_GPU_LAYERS",
        convert=gpu_layers,
        metavar="N",
        help="layers that use the GPU; default: all",
    )
    add(
        g,
        "-cmoe",
        "--cpu-moe",
        env="LLAMA_ARG_CPU_MOE",
        convert=truth,
        default=False,
        action="store_true",
        help="keep the experts of all layers in RAM",
    )
    add(
        g,
        "-ncmoe",
        "--n-cpu-moe",
        env="LLAMA_ARG_N_CPU_MOE",
        convert=int,
        metavar="N",
        help="keep the experts of the first N layers in RAM",
    )
    g.add_argument(
        "--offload",
        choices=OFFLOAD_MODES,
        default="auto",
        help="offload mode; default: auto (-cmoe and -ncmoe choose one too)",
    )

    g = parser.add_argument_group("hot-expert cache (any of these chooses --offload hot_experts)")

    def add_hot(flag: str, convert: Callable[[str], Any], metavar: str | None, text: str, **more: Any) -> None:
        env = ENVIRONMENT[HOT_FLAGS[flag.removeprefix("--").replace("-", "_")]][0]
        add(g, flag, env=env, convert=convert, help=text, **more | ({"metavar": metavar} if metavar else {}))

    add_hot("--moe-hot-k", slot_count, "N", "expert slots per layer, 0 = off, auto = as many as fit; default: auto")
    add_hot(
        "--vram-budget",
        vram_budget_of,
        "SIZE",
        "all VRAM of this process, such as 12GiB; a bare number is MiB; default: what is free",
    )
    add_hot("--moe-hot-policy", str, "|".join(CACHE_POLICIES), "which experts get the slots; default: decay")
    add_hot("--moe-hot-rebalance-interval", int, "N", "tokens between rebalances of the policy window; default: 60")
    add_hot("--moe-hot-pp-bypass", int, "N", "batches of N tokens or more stream the experts; default: 64")
    add_hot("--moe-hot-uploads", int, "N", "most experts to copy per layer and token, -1 = no limit; default: 2")
    add_hot(
        "--moe-hot-fetches", int, "N", "most missed experts that the GPU computes itself, per layer and token; 0 = off"
    )
    add_hot("--strict", truth, None, "fail if the cache cannot be active as asked for", action="store_true")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say how tokens are chosen. Their defaults are those of `Sampling`."""
    g = parser.add_argument_group("sampling")
    d = Sampling()
    add(
        g,
        "-n",
        "--predict",
        "--n-predict",
        env="LLAMA_ARG_N_PREDICT",
        convert=int,
        metavar="N",
        help="most tokens to generate; default: what fits, -1 = the same",
    )
    add(
        g,
        "--temp",
        "--temperature",
        env="LLAMA_ARG_TEMPERATURE",
        convert=float,
        default=d.temperature,
        metavar="N",
        help=f"temperature, 0 = greedy; default: {d.temperature}",
    )
    add(
        g,
        "--top-k",
        env="LLAMA_ARG_TOP_K",
        convert=int,
        default=d.top_k,
        metavar="N",
        help=f"0 = off; default: {d.top_k}",
    )
    add(
        g,
        "--top-p",
        env="LLAMA_ARG_TOP_P",
        convert=float,
        default=d.top_p,
        metavar="N",
        help=f"1 = off; default: {d.top_p}",
    )
    add(
        g,
        "--min-p",
        env="LLAMA_ARG_MIN_P",
        convert=float,
        default=d.min_p,
        metavar="N",
        help=f"0 = off; default: {d.min_p}",
    )
    add(
        g,
        "--repeat-penalty",
        env="LLAMA_ARG_REPEAT_PENALTY",
        convert=float,
        default=d.repeat_penalty,
        metavar="N",
        help=f"1 = off; default: {d.repeat_penalty}",
    )
    add(
        g,
        "--presence-penalty",
        env="LLAMA_ARG_PRESENCE_PENALTY",
        convert=float,
        default=d.presence_penalty,
        metavar="N",
        help=f"0 = off; default: {d.presence_penalty}",
    )
    add(
        g,
        "--frequency-penalty",
        env="LLAMA_ARG_FREQUENCY_PENALTY",
        convert=float,
        default=d.frequency_penalty,
        metavar="N",
        help=f"0 = off; default: {d.frequency_penalty}",
    )
    g.add_argument(
        "--repeat-last-n",
        type=int,
        default=d.repeat_last_n,
        metavar="N",
        help=f"tokens that the penalties look back; default: {d.repeat_last_n}",
    )
    g.add_argument(
        "-l",
        "--logit-bias",
        type=token_bias,
        action="append",
        default=[],
        metavar="TOKEN_ID(+/-)BIAS",
        help="make a token likelier or less likely, such as 15+1 or 15-inf; may be repeated",
    )
    g.add_argument("-s", "--seed", type=int, default=None, metavar="SEED", help="seed; default, and -1: a new one")
    g.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take \\n, \\t, \\r, \\', \\\", \\\\ and \\xHH in texts of flags for what they stand for (on by default)",
    )
    g.add_argument(
        "-r", "--reverse-prompt", action="append", default=[], metavar="TEXT", help="stop at this text; may be repeated"
    )


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands in which a model writes what the user asks for."""
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_structure_flags(parser)


def add_structure_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say what form the text must have."""
    g = parser.add_argument_group("form of the text").add_mutually_exclusive_group()
    g.add_argument("--grammar", metavar="GBNF", help="a grammar with a rule named root")
    g.add_argument("--grammar-file", metavar="FNAME", help="a file that holds the grammar")
    g.add_argument("-j", "--json-schema", metavar="SCHEMA", help="a JSON schema; {} = any JSON")
    g.add_argument("-jf", "--json-schema-file", metavar="FNAME", help="a file that holds the schema")


def structure_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Model.stream` that the flags of `add_structure_flags` describe."""
    grammar, schema = arguments.grammar, arguments.json_schema
    if arguments.grammar_file is not None:
        grammar = read_file(arguments.grammar_file, "the grammar")
    if arguments.json_schema_file is not None:
        schema = read_file(arguments.json_schema_file, "the JSON schema")
    return {"grammar": grammar, "json_schema": schema}


ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def text_of(flag: str, arguments: argparse.Namespace) -> str:
    """A flag's text with its escapes replaced, as llama.cpp does it, unless --no-escape is given."""
    if not arguments.escape:
        return flag
    pattern = rb"\\(?:([ntr'\"\\])|x([0-9A-Fa-f]{2}))"
    data = re.sub(pattern, lambda m: ESCAPES[m[1]] if m[1] else bytes([int(m[2], 16)]), os.fsencode(flag))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{flag!r:.80} is not valid UTF-8: {e}") from None


def read_file(name: str, what: str) -> str:
    """The text of a file that a flag names."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {what} {name}: {e}") from None


# The flags that set parameters of the Python functions.
PARAMETERS = {
    "n_ctx": "--ctx-size",
    "n_batch": "--batch-size",
    "n_ubatch": "--ubatch-size",
    "n_threads": "--threads",
    "n_gpu_layers": "--gpu-layers",
    "type_k": "--cache-type-k",
    "type_v": "--cache-type-v",
    "max_tokens": "--predict",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repeat_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "repeat_last_n": "--repeat-last-n",
    "seed": "--seed",
    **{name: "--" + flag.replace("_", "-") for flag, name in HOT_FLAGS.items()},
}


def with_flag(message: str) -> str:
    """A message about a parameter's value, with the flag that sets it."""
    name, _, rest = message.partition(" must be ")
    return f"{PARAMETERS[name]} ({name}) must be {rest}" if name in PARAMETERS else message


def offload_of(arguments: argparse.Namespace) -> Offload | str:
    """The offload mode that the flags describe."""
    given = arguments.on_command_line
    hot = {name: getattr(arguments, flag) for flag, name in HOT_FLAGS.items() if getattr(arguments, flag) is not None}
    hot_flags = ["--" + flag.replace("_", "-") for flag in sorted(HOT_FLAGS.keys() & given)]
    other = "-cmoe" if "cpu_moe" in given else ""
    if arguments.offload not in ("auto", "hot_experts"):
        other = f"--offload {arguments.offload}"
    if other and (hot_flags or arguments.offload == "hot_experts"):
        asking = ", ".join(hot_flags or ["--offload hot_experts"])
        raise ConfigError(f"{asking} and {other} contradict each other: the former is about hot experts")
    by_variable = "slots" in hot and not (arguments.cpu_moe or other)
    if hot_flags or arguments.offload == "hot_experts" or by_variable:
        n_cpu_moe = -1 if arguments.n_cpu_moe is None else arguments.n_cpu_moe
        return hot_experts(n_cpu_moe=n_cpu_moe, **hot)
    modes: dict[str, Callable[[], Offload | str]] = {}
    if arguments.offload != "auto":
        modes["offload"] = OFFLOAD_MODES[arguments.offload]
    if arguments.cpu_moe:
        modes["cpu_moe"] = cpu_experts
    if arguments.n_cpu_moe is not None:
        modes["n_cpu_moe"] = lambda: layers(arguments.n_cpu_moe)
    chosen = [name for name in modes if name in given] or list(modes)  # a flag wins over a variable
    if len(chosen) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in chosen)
        raise ConfigError(f"{names} contradict each other: give one of them")
    return modes[chosen[0]]() if chosen else "auto"


def model_path(arguments: argparse.Namespace) -> str | os.PathLike[str] | None:
    """The file that -m names, or the one that -hf stands for, downloaded; a flag wins over a variable."""
    given = arguments.on_command_line
    if {"model", "hf_repo"} <= given:
        raise ConfigError("--model and --hf-repo contradict each other: give one of them")
    if arguments.hf_repo is not None and "model" not in given:
        return hub.download(arguments.hf_repo, filename=arguments.hf_file)
    if arguments.hf_file is not None and "hf_file" in given:
        raise ConfigError("--hf-file names a file of a repository: give --hf-repo too")
    path: str | None = arguments.model
    return path


def load_model(arguments: argparse.Namespace, **more: Any) -> Model:
    """The model that the flags describe; `more` are further parameters of `Model`."""
    return Model(
        model_path(arguments),
        offload=offload_of(arguments),
        n_gpu_layers=arguments.gpu_layers,
        n_ctx=arguments.ctx_size,
        n_batch=arguments.batch_size,
        n_ubatch=arguments.ubatch_size,
        n_threads=arguments.threads,
        type_k=arguments.cache_type_k,
        type_v=arguments.cache_type_v,
        flash_attn=arguments.flash_attn,
        load_mode=arguments.load_mode,
        **more,
    )


def busy_threads(model: Model, arguments: argparse.Namespace) -> int:
    """CPU threads that a model keeps busy while it generates."""
    return competition.busy_threads(model.offload, arguments.threads or machine.default_threads())


def sum_of(biases: list[tuple[int, float]]) -> dict[int, float]:
    """What is added to each token in all."""
    total: dict[int, float] = {}
    for token, bias in biases:
        total[token] = total.get(token, 0) + bias
    return total


def text_options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Model.stream` that the flags of `add_text_flags` describe."""
    return sampling_of(arguments) | structure_of(arguments)


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `Model.stream` that the flags describe."""
    return {
        "max_tokens": None if arguments.predict in (None, -1) else arguments.predict,
        "temperature": arguments.temp,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repeat_penalty": arguments.repeat_penalty,
        "presence_penalty": arguments.presence_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "repeat_last_n": arguments.repeat_last_n,
        "seed": arguments.seed,
        "stop": tuple(text_of(stop, arguments) for stop in arguments.reverse_prompt),
        "logit_bias": sum_of(arguments.logit_bias) or None,
    }
