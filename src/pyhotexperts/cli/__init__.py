"""The command ``pyhotexperts``: demo, generate, info."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyhotexperts import __version__
from pyhotexperts.cli import demo, generate, info
from pyhotexperts.errors import PyHotExpertsError

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="pyhotexperts", description="Run mixture-of-experts language models larger than VRAM."
    )
    top.add_argument("--version", action="version", version=f"pyhotexperts {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, generate, info):
        module.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        arguments = parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except PyHotExpertsError as e:
        print(f"pyhotexperts: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npyhotexperts: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None  # nothing more to flush at exit
        return 0
    return 0
