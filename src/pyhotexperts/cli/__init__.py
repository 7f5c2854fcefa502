"""The command ``pyhotexperts``: demo, generate, chat, bench, info."""

from __future__ import annotations

import argparse
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from pyhotexperts import __version__
from pyhotexperts.cli import bench, chat, demo, generate, info
from pyhotexperts.cli.options import with_flag
from pyhotexperts.errors import ConfigError, PyHotExpertsError

logger = logging.getLogger("pyhotexperts")

# Flags of llama.cpp that are not ours, and what to do instead.
INSTEAD = {
    "-ot": ": --offload and -ncmoe say where experts go",
    "-cnv": ": `pyhotexperts chat` is for conversations",
    "-no-cnv": ": `pyhotexperts generate` continues a prompt without a template",
    "-sys": ": `pyhotexperts chat` takes it",
}

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


class Parser(argparse.ArgumentParser):
    """As argparse's, but a mistake is told in one line, which names the help of the command that it is about."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what a command does not know is an error of this command."""
        self.refuse_unknown_words(sys.argv[1:] if args is None else args)
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments, unknown

    def refuse_unknown_words(self, args: Sequence[str]) -> None:
        """Say that there is no flag such as -sm, which argparse would take for -s with the value m."""
        for word in args:
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break  # what follows are no flags, or another command's
            name = word.split("=")[0]
            if not re.match(r"-[A-Za-z][A-Za-z-]", word) or name in self._option_string_actions:
                continue
            short = self._option_string_actions.get(word[:2])
            if short is None or short.nargs != 0:  # -vv is -v -v
                apart = f"; is it {word[:2]} {word[2:]}?" if short and name not in INSTEAD else ""
                self.error(f"there is no flag {name}{INSTEAD.get(name, '')}{apart}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


class NoRepository(argparse.Action):
    """A flag of other commands that argparse would take for -h."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        """Say what to give instead."""
        instead = "give the file of a model with -m" if "-m" in parser._option_string_actions else "it needs no model"
        parser.error(f"{parser.prog.split()[-1]} takes no {flag}: {instead}")


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = Parser(prog="pyhotexperts", description="Run mixture-of-experts language models larger than VRAM.")
    top.add_argument("--version", action="version", version=f"pyhotexperts {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, generate, chat, bench, info):
        module.add_parser(commands)
    for command in commands.choices.values():
        if "-hf" not in command._option_string_actions:
            hub_flags = ("-hf", "--hf-repo", "-hff", "--hf-file")
            command.add_argument(*hub_flags, nargs="?", action=NoRepository, help=argparse.SUPPRESS)
    return top


class Messages(logging.Handler):
    """Shows the package's log as lines of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to stderr."""
        if sys.stderr is not None:
            with suppress(OSError):
                print(f"pyhotexperts: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


@contextmanager
def shown_log(verbose: int) -> Iterator[None]:
    """Show warnings and errors while a command runs; verbose: 1 = what was decided too, 2 = what llama.cpp says too."""
    handler = Messages((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        prepare_streams()
        arguments = parser().parse_args(argv)
        with shown_log(getattr(arguments, "verbose", 0)):
            arguments.run(arguments)
        sys.stdout.flush()
    except ConfigError as e:
        return complain(with_flag(str(e)), 1)
    except PyHotExpertsError as e:
        return complain(str(e), 1)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None  # nothing more to flush at exit
        return 0
    except OSError as e:  # the disk is full, say
        sys.stdout = None
        return complain(f"cannot write: {e.strerror}", 1)
    return 0


def prepare_streams() -> None:
    """Make sure that there is a standard output, and that it takes any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdout is None:
        raise ConfigError("standard output is closed: there is nowhere to write to")


def complain(message: str, status: int) -> int:
    """Say what went wrong, if there is anywhere to say it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"pyhotexperts: {message}", file=sys.stderr)
    return status
