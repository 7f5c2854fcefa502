"""Renders one chat template, in a process of its own: a template comes with a model file, and may loop or allocate.

Run by `pyhotexperts.chat_template`, request and answer are JSON on standard input and output.
Imports nothing of the package.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any


class RefusalError(Exception):
    """The template itself called raise_exception: these messages are not for it."""


def environment() -> Any:
    """The sandbox that chat templates are written for: the settings and names of Hugging Face's transformers."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block ``generation`` marks what a model wrote, for training: here it is its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise RefusalError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def render(request: dict[str, Any]) -> str:
    """The rendered text, at most `max_chars` of it."""
    parts = []
    n_chars = 0
    for part in environment().from_string(request["template"]).generate(request["variables"]):
        n_chars += len(part)
        if n_chars > request["max_chars"]:
            raise MemoryError
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The text, or what went wrong: refused, too large, or wrong."""
    try:
        return {"text": render(request)}
    except RefusalError as e:
        return {"refused": str(e)}
    except (MemoryError, OverflowError):
        return {"too_large": ""}
    except Exception as e:
        line = getattr(e, "lineno", None)
        return {"wrong": f"{type(e).__name__}: {e}" + (f" (line {line})" if line else "")}


def main() -> None:
    """Read the request, obey its limits, write the answer."""
    request = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    for kind, limit in (
        (resource.RLIMIT_AS, request["max_bytes"]),
        (resource.RLIMIT_CPU, request["max_seconds"] + 1),  # should nobody be left to end this process
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or hard > limit:
            resource.setrlimit(kind, (limit, limit))
    json.dump(answer(request), sys.stdout)


if __name__ == "__main__":
    main()
