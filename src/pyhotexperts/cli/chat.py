"""``pyhotexperts chat``: a conversation; the answers go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyhotexperts.cli import generate, options
from pyhotexperts.cli.watch import state
from pyhotexperts.errors import ConfigError, PromptError
from pyhotexperts.model import Model
from pyhotexperts.results import Generation

HELP = """/reset  forget the conversation
/stats  speed of the last answer, and how full the context is
/help   these lines
/exit   the end, as Ctrl-D; Ctrl-C stops an answer or drops a line"""
TO_LEAVE = "(Ctrl-D, /exit or Ctrl-C once more at an empty prompt leaves)"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model that has a chat template, a line at a time.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    g = parser.add_argument_group("conversation")
    g.add_argument("-sys", "--system-prompt", metavar="TEXT", help="what the model is told first")
    options.add(
        g,
        "--chat-template-file",
        env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        metavar="FNAME",
        help="a Jinja template instead of the model's own",
    )
    options.add_text_flags(parser)
    parser.set_defaults(run=lambda arguments: run(parser, arguments))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the command."""
    options.resolve(parser, arguments)
    if sys.stdin is None:
        raise ConfigError("there is no standard input to read questions from")
    template = arguments.chat_template_file
    if template is not None:
        template = options.read_file(template, "the chat template")
    with options.load_model(arguments, chat_template=template) as model:
        system = arguments.system_prompt
        system = None if system is None else options.text_of(system, arguments)
        conversation = Conversation(model, system, options.text_options_of(arguments))
        conversation.check()
        with suppress(ImportError):
            __import__("readline")  # arrow keys and history of the lines
        say(f"{Path(model.path).name}; /help says what else can be typed")
        for line in read_lines():
            conversation.take(line)


def read_lines() -> Iterator[str]:
    """The lines that the user types, up to the end, /exit, or a second Ctrl-C in a row at an empty prompt."""
    is_told = is_second = False
    while True:
        try:
            line = read_line()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            is_empty = is_prompt_empty()
            say("")
            if is_empty and is_second:
                return
            if not is_told:
                say(TO_LEAVE)
            is_told, is_second = True, is_empty
            continue
        if line is None or line == "/exit":
            return
        is_second = False
        yield line


def is_prompt_empty() -> bool:
    """Whether nothing was typed when Ctrl-C came; only readline, which needs a terminal on both sides, can tell."""
    readline = sys.modules.get("readline")
    return readline is not None and sys.stdout.isatty() and not readline.get_line_buffer()


def read_line() -> str | None:
    """The next line that the user types, None at the end."""
    is_terminal = sys.stdin.isatty()
    try:
        if is_terminal:
            return input("> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        return None
    except UnicodeDecodeError as e:
        raise ConfigError(f"what was typed is not valid Unicode: {e}") from None


def say(text: str) -> None:
    """Tell the user something that is no answer of the model."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


class Conversation:
    """The messages so far, and what to do with a line."""

    def __init__(self, model: Model, system: str | None, sampling: dict[str, Any]) -> None:
        self._model = model
        self._sampling = sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)
        self._last: Generation | str = ""  # the last answer; of one that was stopped, a line about it

    def check(self) -> None:
        """Raise now what the first question would raise about the template."""
        self._model.chat_prompt([*self._first, {"role": "user", "content": ""}])

    def take(self, line: str) -> None:
        """Answer a line, or obey it."""
        if line == "/reset":
            self._messages = list(self._first)
            self._last = ""
            self._model.reset()
            say("the conversation is forgotten")
        elif line == "/stats":
            say(self.stats())
        elif line == "/help":
            say(HELP)
        elif line.startswith("/"):
            say(f"there is no command {line.split()[0]}; /help lists them")
        elif line:
            self.answer(line)

    def answer(self, question: str) -> None:
        """Print the answer as it comes; an answer that Ctrl-C stops is kept as far as it came."""
        asked = [*self._messages, {"role": "user", "content": question}]
        text = ""
        n_tokens = 0
        begin = time.perf_counter()
        try:
            with self._model.stream_chat(asked, **self._sampling) as stream:
                for chunk in stream:
                    if n_tokens == 0:
                        begin = time.perf_counter()  # the first token belongs to the prompt
                    n_tokens += len(chunk.tokens)
                    text += chunk.text
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                self._last = stream.result
        except PromptError as e:
            say(f"{e}\nThis question is left out; /reset begins anew")
            return
        except KeyboardInterrupt:
            say(" [stopped]" if text else "[stopped before the answer began: this question is left out]")
            if not text:
                return
            self._last = (
                f"[{state(n_tokens, time.perf_counter() - begin, self._model.cache.status)} | stopped by Ctrl-C]"
            )
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._messages = [*asked, {"role": "assistant", "content": text}]

    def stats(self) -> str:
        """A few lines about the last answer and the context."""
        context = f"the context holds {self._model.n_past} of {self._model.n_ctx} tokens"
        if not self._last:
            return f"nothing was answered yet; {context}"
        if isinstance(self._last, str):
            return f"{self._last}\n{context}"
        return (
            f"{generate.speeds(self._last, self._model.cache.status)}\n"
            f"{self._last.n_reused_tokens} of the prompt's tokens were there already; {context}"
        )
