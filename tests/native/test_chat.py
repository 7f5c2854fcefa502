"""Chat: templates in their sandbox, the messages' form, and the beginning of a prompt that is not processed again."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_commands import command
from test_generation import softmax
from test_other_models import write_dense

import pyhotexperts as phx
from pyhotexperts import chat_template
from pyhotexperts.chat_template import render
from pyhotexperts.cli.chat import Conversation

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
HELLO = [{"role": "user", "content": "Where does the ship lie?"}]


@pytest.fixture(scope="module")
def chatty() -> Iterator[phx.Model]:
    with phx.Model(n_threads=1, n_ctx=2048, chat_template=TEMPLATE) as model:
        yield model


# ---------------------------------------------------------------- templates


def test_a_template_has_what_those_of_transformers_use() -> None:
    template = """{{- bos_token }}
{%- for m in messages if m.role != 'system' %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {% generation %}[{{ m.content | trim }}]{% endgeneration %}

{%- endfor %}{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ missing }}{{ {'a': 'ü'} | tojson }}"""
    messages = [{"role": r, "content": f" {r} "} for r in ("system", "user", "assistant", "user")]
    text = render(template, messages, {"bos_token": "<s>", "tools": [{"name": "f"}]})
    assert text == '<s>[user][assistant][{"name": "f"}]4{"a": "ü"}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**10 }}", "too much memory"),
        ("{% set n = namespace(x='01') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "memory"),
        ("{% for i in range(99999) %}{{ '%200d' % i }}{% endfor %}", "too long a text"),
        ("{{ '%2000000000d' % 1 }}", "too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% for m in messages %}", r"line 1"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_hostile_or_wrong_template_is_refused(template: str, message: str) -> None:
    with pytest.raises(phx.TemplateError, match=message):
        render(template, HELLO, {})


def test_a_template_that_loops_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(phx.TemplateError, match="more than 1 seconds"):
        render(loop, HELLO, {})
    with pytest.raises(phx.TemplateError, match="more than 1 seconds"):
        render("{{ 9 ** (9 ** 9) }}", HELLO, {})


def test_a_program_without_a_python_to_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(phx.PyHotExpertsError, match="second Python"):
        render("x", HELLO, {})
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(phx.PyHotExpertsError, match="cannot start Python"):
        render("x", HELLO, {})


def test_a_template_that_refuses_the_messages_says_why() -> None:
    with pytest.raises(phx.PromptError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HELLO, {})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hello", "list of at least one"),
        (["Hello"], "a message is a dict"),
        ([{"content": "Hello"}], '"role"'),
        ([{"role": "user"}], '"content"'),
        ([{"role": "user", "content": 7}], '"content"'),
        ([{"role": "user", "content": "x", "more": object()}], "JSON"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_messages_of_another_form_are_refused(chatty: phx.Model, messages: Any, message: str) -> None:
    with pytest.raises(phx.PromptError, match=message):
        chatty.chat(messages)


@pytest.mark.parametrize("template", ["", "  ", 5, b"{{ messages }}"])
def test_a_template_is_text(template: Any) -> None:
    with pytest.raises(phx.ConfigError, match="chat_template"):
        phx.Model(chat_template=template)


def test_a_model_without_a_template_says_so(model: phx.Model) -> None:
    assert model.chat_template is None
    with pytest.raises(phx.UnavailableError, match=r"has no chat template.*chat_template="):
        model.chat(HELLO)


def test_the_template_of_the_file_is_used(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "chat.gguf", lambda writer: writer.add_chat_template("of the file"))
    with phx.Model(path, n_threads=1) as model:
        assert model.chat_template == "of the file"
        assert model.chat_prompt(HELLO) == "of the file"
    with phx.Model(path, n_threads=1, chat_template="another") as model:
        assert model.chat_prompt(HELLO) == "another"


# ---------------------------------------------------------------- conversations


def test_an_answer_is_the_continuation_of_the_rendered_messages(chatty: phx.Model) -> None:
    prompt = "user:Where does the ship lie?\nassistant:"
    assert chatty.chat_prompt(HELLO) == prompt
    answer = chatty.chat(HELLO, temperature=0, max_tokens=12, reuse_prefix=False)
    assert answer.tokens == chatty.generate(prompt, temperature=0, max_tokens=12).tokens
    with chatty.stream_chat(HELLO, temperature=0, max_tokens=12, reuse_prefix=False) as stream:
        assert "".join(chunk.text for chunk in stream) == answer.text


def test_special_tokens_of_a_template_are_tokens_and_bos_comes_once() -> None:
    with phx.Model(n_threads=1, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") as model:
        prompt = model.chat_prompt([{"role": "user", "content": "Hello"}])
        assert prompt == "<|endoftext|>Hello<|endoftext|>"
        ids = model._vocab.chat_prompt(prompt)
        assert ids == [0, *model.tokenize("Hello", add_special=False), 0]
        assert model._vocab.chat_prompt("Hello") == ids[:-1]


def test_variables_reach_the_template() -> None:
    with phx.Model(n_threads=1, chat_template="{{ tools[0].name }} {{ think }}") as model:
        assert model.chat_prompt(HELLO, tools=[{"name": "clock"}], template_options={"think": False}) == "clock False"


def test_the_second_turn_processes_only_the_new_tokens(chatty: phx.Model) -> None:
    chatty.reset()
    messages = [{"role": "user", "content": "The harbour lay quiet under the snow. " * 140}]
    # so hot that it writes words with tokens that the tokenizer would not choose
    first = chatty.chat(messages, temperature=3, top_k=0, top_p=1, min_p=0, seed=1, max_tokens=30)
    assert list(first.tokens) != chatty.tokenize(first.text, add_special=False)
    assert first.n_prompt_tokens > 1500
    assert first.n_reused_tokens == 0
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the captain?"}]
    assert chatty.n_past == first.n_prompt_tokens + 29  # the last token needed no place
    second = chatty.chat(messages, temperature=0, max_tokens=1)
    new = chatty.detokenize(first.tokens[-1:]) + "\nuser:And the captain?\nassistant:"
    assert second.n_reused_tokens == first.n_prompt_tokens + 29
    assert second.n_prompt_tokens - second.n_reused_tokens == len(chatty.tokenize(new, add_special=False))
    # what was reused was right: processing all of it gives the same distribution, but for rounding
    after_reuse = softmax(chatty.logits)
    tokens = chatty._context.tokens
    assert len(tokens) == second.n_prompt_tokens
    chatty.reset()
    chatty.eval(tokens)
    np.testing.assert_allclose(after_reuse, softmax(chatty.logits), atol=0.02)


def test_an_answer_that_was_edited_is_processed_from_there(chatty: phx.Model) -> None:
    chatty.reset()
    first = chatty.chat(HELLO, temperature=0, max_tokens=20)
    messages = [*HELLO, {"role": "assistant", "content": first.text[:20] + "XYZ"}, *HELLO]
    second = chatty.chat(messages, temperature=0, max_tokens=2)
    assert first.n_prompt_tokens < second.n_reused_tokens < first.n_prompt_tokens + 19
    assert chatty.detokenize(chatty._context.tokens[:-1]) == chatty.chat_prompt(messages)


def test_a_character_made_of_several_tokens_is_not_torn_apart(chatty: phx.Model) -> None:
    tokens = chatty.tokenize("größer 🚢", add_special=False)
    pieces = [chatty._vocab.piece(t) for t in tokens]
    assert any(len(p) < 4 and p[:1] >= b"\x80" for p in pieces)  # the ship takes several tokens
    for n in range(len(tokens) + 1):
        ids = chatty._vocab.continued(tokens[:n], "größer 🚢 liegt")
        assert b"".join(chatty._vocab.piece(t) for t in ids).decode() == "größer 🚢 liegt"


def test_what_differs_is_processed_again(chatty: phx.Model) -> None:
    prompt = chatty.tokenize("The harbour lay quiet under the snow, and the old captain")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "reuse_prefix": True}
    chatty.reset()
    assert chatty.generate(prompt, **options).n_reused_tokens == 0
    same = chatty.generate(prompt, **options)
    assert same.n_reused_tokens == len(prompt) - 1
    other = chatty.generate([*prompt[:5], 300, *prompt[6:]], **options)
    assert other.n_reused_tokens == 5
    after_reuse = softmax(chatty.logits)
    chatty.reset()
    chatty.eval([*prompt[:5], 300, *prompt[6:]])
    np.testing.assert_allclose(after_reuse, softmax(chatty.logits), atol=0.02)
    assert chatty.generate(prompt, temperature=0, max_tokens=1).n_reused_tokens == 0


def test_a_failure_forgets_what_is_not_known_to_be_there(chatty: phx.Model) -> None:
    prompt = chatty.tokenize("The harbour lay quiet under the snow, and the old captain")
    chatty.generate(prompt, max_tokens=4, temperature=0)
    with pytest.raises(phx.ContextFullError):
        chatty.eval([5] * 2048)
    assert chatty.generate(prompt, max_tokens=1, reuse_prefix=True).n_reused_tokens == len(prompt) - 1


# ---------------------------------------------------------------- the command


@pytest.fixture
def template_file(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return str(path)


def test_the_command_keeps_the_history(template_file: str, chatty: phx.Model) -> None:
    lines = "Who is there?\n/stats\nAnd now?\n/stats\n/reset\nWho is there?\n/what\n/help\n/exit\nnot read\n"
    flags = ("--temp", "0", "-n", "8", "-t", "1", "-sys", "Be brief.", "-r", "\n")
    run = command("chat", "--chat-template-file", template_file, *flags, stdin=lines.encode())
    error = run.stderr.decode()
    assert run.returncode == 0, error
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "stop": "\n"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
    chatty.reset()
    first = chatty.chat(messages, **sampling).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    second = chatty.chat(messages, **sampling)
    assert run.stdout.decode() == f"{first}\n{second.text}\n{first}\n"
    assert f"{second.n_reused_tokens} of the prompt's tokens were there already" in error
    assert "there is no command /what" in error
    assert "/reset  forget" in error


def test_the_command_survives_a_question_that_is_too_long(template_file: str) -> None:
    lines = f"{'Hello ' * 400}\nHello\n"
    flags = ("--temp", "0", "-n", "4", "-t", "1", "-c", "256")
    run = command("chat", "--chat-template-file", template_file, *flags, stdin=lines.encode())
    assert run.returncode == 0, run.stderr
    assert b"This question is left out" in run.stderr
    assert len(run.stdout) > 1


class InterruptedScreen(io.StringIO):
    """A standard output; Ctrl-C comes while a given piece is written, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().write(text)


def test_a_stopped_answer_stays_as_far_as_it_came_and_has_stats(
    chatty: phx.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chatty.reset()
    conversation = Conversation(chatty, None, {"temperature": 0, "max_tokens": 30})
    monkeypatch.setattr(sys, "stdout", InterruptedScreen(4))
    conversation.take("Who is there?")
    assert "[stopped]" in capsys.readouterr().err
    assert re.match(r"\[4 tokens \| [\d.]+ tokens/s \| stopped by Ctrl-C\]\n", conversation.stats())
    assert f"the context holds {chatty.n_past} of 2048 tokens" in conversation.stats()
    messages = [{"role": "user", "content": "Who is there?"}]
    words = chatty.chat(messages, temperature=0, max_tokens=4).text
    conversation.take("And now?")
    answered = chatty.chat_prompt([*messages, {"role": "assistant", "content": words}])
    assert chatty.detokenize(chatty._context.tokens).startswith(answered.removesuffix("assistant:"))
    assert "generated" in conversation.stats()


def test_a_question_that_is_stopped_before_its_answer_is_left_out(
    chatty: phx.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(chatty, None, {"temperature": 0, "max_tokens": 4})

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chatty, "stream_chat", interrupt)
        conversation.take("Who is there?")
    assert "this question is left out" in capsys.readouterr().err
    conversation.take("And now?")
    assert chatty.detokenize(chatty._context.tokens).startswith("user:And now?\nassistant:")


def test_a_reset_forgets_the_answer_and_empties_the_context(
    chatty: phx.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(chatty, None, {"temperature": 0, "max_tokens": 4})
    conversation.take("Who is there?")
    assert "generated 4 tokens" in conversation.stats()
    conversation.take("/reset")
    assert conversation.stats() == "nothing was answered yet; the context holds 0 of 2048 tokens"


def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_leaves(template_file: str) -> None:
    pytest.importorskip("readline")
    in_a_terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    chat = [sys.executable, "-m", "pyhotexperts", "chat", "--chat-template-file", template_file, "-t", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", in_a_terminal, *chat], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdin
        assert run.stdout
        seen = b""
        guard = threading.Timer(60, run.kill)  # then there is nothing more to read
        guard.start()

        def type_after(end: bytes, keys: bytes) -> None:
            nonlocal seen
            begin = len(seen)
            while not (len(seen) > begin and end in seen[begin:]):
                piece = run.stdout.read1()  # type: ignore[union-attr]
                assert piece, seen
                seen += piece
            time.sleep(0.15)  # what shows the prompt is not yet waiting for keys
            run.stdin.write(keys)  # type: ignore[union-attr]
            run.stdin.flush()  # type: ignore[union-attr]

        type_after(b"> ", b"/sta")
        type_after(b"/sta", b"\x03")  # drops the line
        type_after(b"> ", b"\x03")  # the first one at an empty prompt
        type_after(b"> ", b"/stats\n")
        type_after(b"> ", b"\x03")
        type_after(b"> ", b"\x03")
        rest, _ = run.communicate(timeout=60)
        seen += rest
        guard.cancel()
    assert run.returncode == 0, seen
    assert seen.count(b"once more at an empty prompt leaves") == 1
    assert b"nothing was answered yet" in seen
    assert b"there is no command" not in seen


def test_the_command_without_a_template_says_so() -> None:
    run = command("chat", "-t", "1")
    assert run.returncode == 1
    assert b"has no chat template" in run.stderr
    assert b"--chat-template-file" in run.stderr
    assert b"cannot read the chat template" in command("chat", "--chat-template-file", "missing.jinja").stderr
