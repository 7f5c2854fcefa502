"""``pyhotexperts bench``: offload modes side by side, at equal VRAM, one process for each measurement."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pyhotexperts import loading, machine, picture
from pyhotexperts.bench import bound, config, output, plot, runner, summary
from pyhotexperts.bench.config import Mode, Run
from pyhotexperts.cli.options import add, add_model_file, resolve
from pyhotexperts.errors import ConfigError, PyHotExpertsError
from pyhotexperts.model import MAX_N_CTX, kv_types
from pyhotexperts.offload import vram_budget_of
from pyhotexperts.placement import LOAD_MODES
from pyhotexperts.validation import choice, integer

logger = logging.getLogger("pyhotexperts")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="compare the speed of offload modes",
        description="Compare the speed of offload modes at equal VRAM. Each measurement runs in a process of its own; "
        "each mode is first tried with each load mode, then with the other numbers of threads, and what is fastest "
        "by its median is repeated.",
    )
    g = parser.add_argument_group("what")
    add_model_file(g)
    g.add_argument(
        "--modes",
        nargs="+",
        default=list(runner.MODES),
        metavar="MODE",
        help="cpu_experts, layers (as many on the GPU as the budget holds), layers:N, hot_experts (as many slots as "
        "the VRAM of the layers row holds), hot_experts:SLOTS, full_gpu; default: all that can be had",
    )
    g.add_argument("--slots", type=int, metavar="N", help="slots per layer, in place of hot_experts fitted to layers")
    g.add_argument(
        "--vram-budget",
        nargs="+",
        metavar="SIZE",
        help="all VRAM of a process, such as 12GiB; several give rows for each; default: what is free",
    )
    g.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="prompt tokens; default: 512")
    g.add_argument("-n", "--n-gen", type=int, default=128, metavar="N", help="generated tokens; default: 128")
    g.add_argument("-d", "--n-depth", type=int, default=0, metavar="N", help="tokens of context before; default: 0")
    g.add_argument("-r", "--repetitions", type=int, default=3, metavar="N", help="of the fastest; default: 3")
    g = parser.add_argument_group("tokens")
    g.add_argument("--text", metavar="FNAME", help="real text; default: the package's own, of several kinds")
    g.add_argument("--consecutive", action="store_true", help="consecutive token ids, for geometry models")
    g = parser.add_argument_group("how")
    add(
        g,
        "-t",
        "--threads",
        env="LLAMA_ARG_THREADS",
        convert=whole_numbers,
        nargs="+",
        metavar="N",
        help="CPU threads, each is tried, load modes with the first; default: all physical cores and, of more "
        "than two, one fewer",
    )
    add(
        g,
        "-lm",
        "--load-mode",
        env="LLAMA_ARG_LOAD_MODE",
        convert=words,
        nargs="+",
        metavar="MODE",
        help="mmap, copy, direct_io, repack (experts on the CPU only); each is tried; default: all but direct_io, "
        "without a GPU mmap",
    )
    add(
        g,
        "-c",
        "--ctx-size",
        env="LLAMA_ARG_CTX_SIZE",
        convert=int,
        default=0,
        metavar="N",
        help="context to make room for, in tokens; default, and at least: what the test needs",
    )
    for flags, env, default in (
        (("-b", "--batch-size"), "LLAMA_ARG_BATCH", 2048),
        (("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", 512),
    ):
        add(g, *flags, env=env, convert=int, default=default, metavar="N", help=f"default: {default}")
    for flags, env in (
        (("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K"),
        (("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V"),
    ):
        add(g, *flags, env=env, default="f16", metavar="TYPE", help="default: f16")
    g.add_argument("--no-warmup", action="store_true", help="time the first pass of each process too")
    g.add_argument("-o", "--output", choices=output.FORMATS, default="md", help="format of the results; default: md")
    g.add_argument("--plot", metavar="PNG", help="draw speed against VRAM, and hit rate against slots, into this file")
    g.add_argument(
        "--machine",
        metavar="JSONL",
        help="figures of this machine, printed by benchmarks/microbench/machine.py: the results then say how far a "
        "token of hot experts is from what the machine allows",
    )
    parser.set_defaults(run=run, parser=parser)


def words(given: str | list[str]) -> list[str]:
    """The values of a flag that takes several, or those of its variable, with spaces or commas between them."""
    return given.replace(",", " ").split() if isinstance(given, str) else given


def whole_numbers(given: str | list[str]) -> list[int]:
    """The same, as whole numbers."""
    wrong = [word for word in words(given) if not word.lstrip("-").isdecimal()]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no whole number")
    return [int(word) for word in words(given)]


def mode_of(text: str) -> Mode | str:
    """A mode that a user wrote: with a number, or one that is fitted."""
    name, colon, number = text.partition(":")
    if name in ("layers", "hot_experts") and colon:
        if not number.isdecimal():
            raise ConfigError(f"{text!r} is no offload mode: after the colon comes a whole number")
        return Mode(name, int(number))
    if text not in runner.MODES:
        raise ConfigError(f"{text!r} is none of the offload modes {', '.join(runner.MODES)}")
    return text


def options_of(a: argparse.Namespace) -> runner.Options:
    """The checked options."""
    resolve(a.parser, a)
    if a.text is not None and a.consecutive:
        raise ConfigError("--text and --consecutive contradict each other: give one of them")
    modes = [mode_of(text) for text in a.modes]
    if a.slots is not None:
        explicit = Mode("hot_experts", integer("--slots", a.slots, 1, 65_535))
        modes = [explicit if m == "hot_experts" else m for m in modes]
    if not machine.has_gpu():
        wanted = [m for m in modes if m != "cpu_experts"]
        if a.modes != list(runner.MODES) and wanted:
            raise ConfigError(f"{wanted[0]} needs a GPU, and this process can use none: {machine.no_gpu_reason()}")
        modes = ["cpu_experts"]
    model = loading.check_file(a.model)
    text = None if a.consecutive else a.text or str(config.default_text())
    if text is not None:
        config.read_text(text)
    n_prompt = integer("--n-prompt", a.n_prompt, 0, 2**20)
    n_gen = integer("--n-gen", a.n_gen, 0, 2**20)
    if n_prompt + n_gen == 0:
        raise ConfigError("--n-prompt and --n-gen are both 0: there is nothing to measure")
    base = Run(
        model=model,
        mode=Mode("cpu_experts"),
        n_prompt=n_prompt,
        n_gen=n_gen,
        n_depth=integer("--n-depth", a.n_depth, 0, 2**20),
        n_batch=integer("--batch-size", a.batch_size, 1, 2**20),
        n_ubatch=min(a.batch_size, integer("--ubatch-size", a.ubatch_size, 1, 2**20)),
        n_threads=1,
        load_mode="mmap",
        type_k=choice("--cache-type-k", a.cache_type_k, kv_types()),
        type_v=choice("--cache-type-v", a.cache_type_v, kv_types()),
        flash_attn="on",
        text=text,
        repetition=0,
        warm_up=not a.no_warmup,
        n_ctx=integer("--ctx-size", a.ctx_size, 0, MAX_N_CTX),
    )
    threads = dict.fromkeys(a.threads or runner.default_threads())  # each once
    load_modes = dict.fromkeys(a.load_mode or (["mmap", "copy", "repack"] if machine.has_gpu() else ["mmap"]))
    return runner.Options(
        base=base,
        modes=tuple(dict.fromkeys(modes)),
        threads=tuple(integer("--threads", t, 1, machine.MAX_THREADS) for t in threads),
        load_modes=tuple(choice("--load-mode", lm, LOAD_MODES) for lm in load_modes),
        repetitions=integer("--repetitions", a.repetitions, 1, 1000),
        vram_budgets=(None,) if a.vram_budget is None else tuple(dict.fromkeys(map(vram_budget_of, a.vram_budget))),
    )


def run(
    arguments: argparse.Namespace, execute: runner.Execute = runner.execute, more: output.Row | None = None
) -> None:
    """Run the command. more: further fields of every row."""
    options = options_of(arguments)
    if arguments.plot is not None:
        picture.check(arguments.plot, "--plot")
    gb_per_second = None if arguments.machine is None else bound.cold_bandwidth(arguments.machine)
    if not machine.has_gpu():
        logger.warning("only cpu_experts is measured: %s", machine.no_gpu_reason())
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    with tqdm(file=sys.stderr, unit=" runs", disable=not is_terminal, bar_format="{desc}") as bar:

        def report(line: str) -> None:
            line = f"[{Path(options.base.model).name}] {line}"
            if is_terminal:
                bar.set_description_str(line)
            elif sys.stderr is not None:
                print(line, file=sys.stderr)

        benchmark = runner.Benchmark(options, execute, report)
        try:
            benchmark.run()
        finally:
            bar.set_description_str("")
            rows = rows_of(benchmark.outcome, gb_per_second)
            show(rows, arguments.output, more or {})
            warn_of_competition(benchmark.outcome)
            if arguments.plot is not None and rows:
                plot.draw(rows, arguments.plot)
    if benchmark.outcome.failures:
        raise PyHotExpertsError("some runs failed:\n  " + "\n  ".join(benchmark.outcome.failures))


def rows_of(outcome: runner.Outcome, gb_per_second: float | None) -> list[output.Row]:
    """The rows of what has finished."""
    return summary.rows(outcome.measured, {run.label for run in outcome.winners.values()}, gb_per_second)


def warn_of_competition(outcome: runner.Outcome) -> None:
    """Say which figures are not the machine's own."""
    disturbed = [(run, result["disturbance"]) for run, result in outcome.measured if result.get("disturbance")]
    if disturbed:
        run, word = disturbed[0]
        n = f"{len(disturbed)} of {len(outcome.measured)} measurements"
        logger.warning("%s were disturbed; measure again. %s: %s", n, run.label, word)


def show(rows: list[output.Row], kind: str, more: output.Row) -> None:
    """Print the rows, with further fields in each."""
    if rows:
        sys.stdout.write(output.FORMATS[kind]([{**row, **more} for row in rows]))
        sys.stdout.flush()
