"""``pyhotexperts generate``: continue a prompt; the text goes to stdout, the speeds to stderr."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pyhotexperts import competition
from pyhotexperts.cache import CacheStatus
from pyhotexperts.cli import options
from pyhotexperts.errors import ConfigError
from pyhotexperts.generation import Stream
from pyhotexperts.results import Generation


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate", help="continue a prompt", description="Continue a prompt with a model."
    )
    g = parser.add_argument_group("prompt")
    g.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; default: what comes from standard input")
    g.add_argument("-f", "--file", type=Path, metavar="FNAME", help="a file that holds the prompt")
    g.add_argument("--no-display-prompt", action="store_true", help="print the continuation alone")
    options.add_text_flags(parser)
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the command."""
    options.resolve(parser, arguments)
    prompt = read_prompt(arguments)
    with options.load_model(arguments) as model:
        stream = model.stream(prompt, **options.text_options_of(arguments))
        if not arguments.no_display_prompt:
            sys.stdout.write(prompt)
        before = competition.times()
        result = show(stream)
        word = competition.hint(before, competition.times(), options.busy_threads(model, arguments))
        if sys.stderr is not None:
            print(speeds(result, model.cache.status), file=sys.stderr)
            if word:
                print(f"[{word}]", file=sys.stderr)


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt from -p, -f or standard input."""
    if arguments.prompt is not None and arguments.file is not None:
        raise ConfigError("--prompt and --file contradict each other: give one of them")
    if arguments.prompt is not None:
        return options.text_of(arguments.prompt, arguments)
    if arguments.file is None and sys.stdin is None:
        raise ConfigError("there is no standard input to read the prompt from: give --prompt or --file")
    if arguments.file is None and sys.stdin.isatty():
        print("reading the prompt from standard input; Ctrl-D ends it", file=sys.stderr)
    try:
        data = sys.stdin.buffer.read() if arguments.file is None else arguments.file.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read the prompt from {arguments.file}: {e.strerror}") from e
    try:
        text: str = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"the prompt is not valid UTF-8: {e}") from None
    if not text:
        origin = "standard input" if arguments.file is None else str(arguments.file)
        raise ConfigError(f"{origin} is empty: give a prompt, or -p '' for a text without one")
    return text


def show(stream: Stream) -> Generation:
    """Print a stream as it comes; returns its result."""
    with stream:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return stream.result


def speeds(result: Generation, cache: CacheStatus) -> str:
    """One line about a generation."""
    why: str = result.finish_reason if result.finish_reason == "length" else "the text's end"
    if result.stop_string is not None:
        why = f"{result.stop_string!r}"
    # the first token belongs to the prompt's time
    speed = f", {result.generation_speed:.1f} tokens/s" if len(result.tokens) > 1 else ""
    return (
        f"[prompt {result.n_prompt_tokens} tokens, {result.prompt_speed:.1f} tokens/s | "
        f"generated {len(result.tokens)} tokens{speed} | "
        f"stopped by {why}{about(cache)}]"
    )


def about(cache: CacheStatus) -> str:
    """What the hot-expert cache did, if it was asked for."""
    if not cache.requested:
        return ""
    if not cache.active:
        return " | no hot-expert cache"
    return f" | cache: {cache.slots} slots per layer, {cache.hit_rate:.0%} hits"
