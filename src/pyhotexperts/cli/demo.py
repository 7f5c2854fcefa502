"""``pyhotexperts demo``: the embedded model writes, then a table of speed and of the experts that were used."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from pyhotexperts import competition, machine
from pyhotexperts.cli import generate, options
from pyhotexperts.cli.watch import Watch
from pyhotexperts.model import Model
from pyhotexperts.results import Generation, Routing

# Our own sentences, one for each kind of text that the embedded model knows.
PROMPTS = (
    "And the shepherds of the valley said unto the king,",
    "static int lamp_probe(struct platform_device *pdev)\n{\n",
    "NOM\n       copier - copier des fichiers\n\nDESCRIPTION\n",
)
MAX_TOKENS = 96
SAMPLING: dict[str, Any] = {"temperature": 0.4, "repeat_penalty": 1.08, "repeat_last_n": 128, "seed": 3}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="let the embedded model write, and show which experts it used",
        description="Let a model write three short texts, then show its speed and which experts it used.",
    )
    parser.add_argument("--watch", action="store_true", help="a live view, with a map of the experts that are used")
    options.add_model_flags(parser)
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the command."""
    options.resolve(parser, arguments)
    view = Watch() if arguments.watch else None
    with options.load_model(arguments) as model:
        info = model.info
        where = "the GPU is used" if any(m.is_gpu and m.needed for m in model.memory) else "no GPU is used"
        if not machine.has_gpu():
            where += f": {machine.no_gpu_reason()}"
        print(f"{model.path}\n{info.architecture}, {info.n_params / 1e6:.1f} million parameters, {where}")
        print(f"Each text begins with a prompt, between » and «, and stops after {MAX_TOKENS} tokens at the latest.")
        model.generate([0], max_tokens=2)  # the first pass is slower: it is not measured
        before = competition.times()
        results, routings = watched(model, view) if view else printed(model)
        word = competition.hint(before, competition.times(), options.busy_threads(model, arguments))
        print("-" * 72)
        print("\n".join(speed_table(results)))
        if word:
            print(f"({word})")
        if routings:
            print()
            print("\n".join(expert_table(routings)))
            print("The fewer experts a text needs, the more of its work a cache of hot experts can keep on the GPU.")


def printed(model: Model) -> tuple[list[Generation], list[Routing]]:
    """Let the model write, one text below the other."""
    results: list[Generation] = []
    routings: list[Routing] = []
    for prompt in PROMPTS:
        print("-" * 72)
        print(f"»{prompt}«", end="", flush=True)
        results.append(generate.show(model.stream(prompt, max_tokens=MAX_TOKENS, **SAMPLING)))
        routings += routing_of(model, prompt, results[-1])
    return results, routings


def watched(model: Model, view: Watch) -> tuple[list[Generation], list[Routing]]:
    """Let the model write in a live view."""
    results: list[Generation] = []
    routings: list[Routing] = []
    with view:
        for prompt in PROMPTS:
            results.append(view.show(prompt, model.stream(prompt, max_tokens=MAX_TOKENS, **SAMPLING), model.cache))
            for routing in routing_of(model, prompt, results[-1]):
                view.add_routing(routing)
                routings.append(routing)
    return results, routings


def routing_of(model: Model, prompt: str, result: Generation) -> list[Routing]:
    """The routing of a text and its continuation, nothing for a dense model."""
    if not model.info.n_expert:
        return []
    tokens = model.tokenize(prompt) + list(result.tokens)
    return [model.record_routing(tokens[: model.n_ctx])]


def speed_table(results: list[Generation]) -> list[str]:
    """Lines of a table: speed of each text."""
    lines = [f"{'text':<6}{'prompt tokens':>14}{'per second':>12}{'written tokens':>16}{'per second':>12}"]
    for i, r in enumerate(results, 1):
        lines.append(
            f"{i:<6}{r.n_prompt_tokens:>14}{r.prompt_speed:>12.0f}{len(r.tokens):>16}{r.generation_speed:>12.0f}"
        )
    return lines


def expert_table(routings: list[Routing]) -> list[str]:
    """Lines of a table: for each layer, how unevenly the experts were used in each text."""
    n_expert = routings[0].n_expert
    quarter = max(1, n_expert // 4)
    lines = [
        f"Experts used, of {n_expert} in each layer; in brackets the share of uses that go to the {quarter} busiest:",
        "layer "
        + "".join(f"{'text ' + str(i):>14}" for i in range(1, len(routings) + 1))
        + f"{'busiest in each text':>26}",
    ]
    counts = [r.counts() for r in routings]
    for row, layer in enumerate(routings[0].layers):
        cells = ""
        for c in counts:
            ordered = np.sort(c[row])[::-1]
            cells += f"{np.count_nonzero(ordered):>7} ({ordered[:quarter].sum() / ordered.sum():>4.0%})"
        busiest = ", ".join(f"{int(c[row].argmax())}" for c in counts)
        lines.append(f"{layer:<6}{cells}{busiest:>26}")
    return lines
