"""From messages to a prompt: the chat template of a model, rendered where it can do no harm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyhotexperts.errors import ConfigError, PromptError, PyHotExpertsError, TemplateError

Message = Mapping[str, Any]

# The limits of one rendering. The longest contexts (a million tokens) are some 5 million characters of text.
MAX_SECONDS = 10
MAX_BYTES = 1 << 30  # of address space, of which Python itself takes some 50 MB
MAX_CHARS = 16 << 20

PROGRAM = Path(__file__).with_name("_template_process.py")


def check_template(template: object) -> str:
    """A template given by the user."""
    if not isinstance(template, str) or not template.strip():
        raise ConfigError(f"chat_template must be the text of a Jinja template, not {template!r:.80}")
    return template


def render(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The prompt that a template makes of messages.

    A process of its own renders it, in jinja2's sandbox, within 10 seconds, 1 GiB and 16 million characters.

    Parameters
    ----------
    variables
        What the template sees beside `messages`: values that JSON can hold.

    Raises
    ------
    PromptError
        If the messages have not the form that the API or this template wants.
    TemplateError
        If the template is wrong, or takes too much time or memory.
    """
    request = {
        "template": template,
        "variables": {**variables, "messages": checked(messages)},
        "sys_path": [path for path in sys.path if path],
        "max_seconds": MAX_SECONDS,
        "max_bytes": MAX_BYTES,
        "max_chars": MAX_CHARS,
    }
    try:
        text = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as e:
        raise PromptError(f"messages, tools and template_options must hold only what JSON can hold: {e}") from None
    answer = _answer(text)
    if "text" in answer:
        return answer["text"]
    if "refused" in answer:
        raise PromptError(f"the chat template does not take these messages: {answer['refused']}")
    if "wrong" in answer:
        raise TemplateError(f"the chat template cannot be rendered: {answer['wrong'].rstrip('.')}. {_OTHER}")
    raise TemplateError(f"the chat template takes too much memory or makes too long a text. {_OTHER}")


_OTHER = "Give another one: Model(chat_template=...) or --chat-template-file"


def _answer(request: str) -> dict[str, str]:
    if not sys.executable or getattr(sys, "frozen", False):
        raise PyHotExpertsError("chat templates are rendered by a second Python, and this program has none to start")
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-S", str(PROGRAM)],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_SECONDS,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
    except subprocess.TimeoutExpired:
        raise TemplateError(f"the chat template ran for more than {MAX_SECONDS} seconds. {_OTHER}") from None
    except OSError as e:
        raise PyHotExpertsError(f"cannot start Python to render the chat template: {e}") from e
    try:
        answer: dict[str, str] = json.loads(run.stdout)
    except ValueError:  # ended by its limits
        return {"too_large": ""}
    return answer


def checked(messages: object) -> list[dict[str, Any]]:
    """The messages, if they have the form of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise PromptError(f"messages must be a list of at least one message, not {messages!r:.80}")
    result = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise PromptError(
                f'a message is a dict such as {{"role": "user", "content": "Hello"}}, not {message!r:.80}'
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise PromptError(f'a message needs a "role" such as "user", not {role!r:.80}')
        # A list has parts such as {"type": "text", "text": ...}; a message with tool calls may have no content.
        if not isinstance(content, str | list) and not (content is None and len(message) > 1):
            raise PromptError(f'the "content" of a message must be text, not {content!r:.80}')
        result.append(dict(message))
    return result
