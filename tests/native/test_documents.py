"""The documents are true: their Python examples run, their files and flags exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from pyhotexperts import machine
from pyhotexperts.cli import parser

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(path: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(path.read_text(encoding="utf-8")) if kind == language]


def documents(root: Path) -> list[Path]:
    return [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").glob("*.md"))]


def test_every_python_example_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # one thread: where something else runs on the machine, two that wait for each other take minutes instead of seconds
    monkeypatch.setattr(machine, "default_threads", lambda: 1)
    examples = [(path.name, code) for path in documents(root) for code in blocks(path, "python")]
    assert len(examples) >= 4
    for name, code in examples:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), {})
        assert output.getvalue()


def test_every_command_of_the_readme_parses(root: Path) -> None:
    lines = "".join(blocks(root / "README.md", "sh")).splitlines()
    commands = [line for line in lines if line.startswith("pyhotexperts ")]
    assert len(commands) >= 2
    for command in commands:
        words = [w.strip('"') for w in re.findall(r'"[^"]*"|\S+', command)[1:]]
        assert parser().parse_args(words).run


def test_every_flag_and_variable_of_the_table_exists(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
    help_text = capsys.readouterr().out
    tables = "".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/knobs.md"))
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    flags = {f for row in rows for f in re.findall(r"`(--?[a-z][a-z-]*)`", row)}
    variables = {v for row in rows for v in re.findall(r"`(LLAMA_ARG_\w+)`", row)}
    assert len(flags) > 15
    assert len(variables) >= 15
    for name in flags | variables:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", help_text), name


def test_every_link_leads_somewhere(root: Path) -> None:
    for document in documents(root):
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
