"""The documents are true: their examples and commands run, their files, flags and messages exist."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pyhotexperts as phx
from pyhotexperts import embedded_model, machine
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
        if name == "chat.md":
            assert output.getvalue().splitlines()[0].strip()  # the answer is not empty


def test_every_command_of_the_readme_parses(root: Path) -> None:
    lines = "".join(blocks(root / "README.md", "sh")).splitlines()
    commands = [line for line in lines if line.startswith("pyhotexperts ")]
    assert len(commands) >= 2
    for command in commands:
        words = [w.strip('"') for w in re.findall(r'"[^"]*"|\S+', command)[1:]]
        assert parser().parse_args(words).run


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model as model.gguf, with a chat template."""
    folder = tmp_path_factory.mktemp("commands")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    copy = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template]
    subprocess.run([*copy, str(embedded_model()), str(folder / "model.gguf")], check=True, capture_output=True)
    return folder


def test_every_command_of_the_documents_runs(root: Path, chat_model: Path) -> None:
    shell = [block for path in documents(root) for block in blocks(path, "sh")]
    commands = {line for block in shell for line in block.splitlines() if line.startswith("pyhotexperts ")}
    assert len(commands) >= 6
    for block in shell:  # the files that they need
        for written in re.findall(r"^echo '[^']*' > [\w.]+$", block, re.MULTILINE):
            subprocess.run(["sh", "-c", written], cwd=chat_model, check=True)
    for line in sorted(commands):
        words = shlex.split(line)[1:]
        if words[0] == "bench" or "-hf" in words:
            continue  # takes minutes; needs a network
        if words[0] == "generate":
            words += ["-t", "1"]
        run = subprocess.run(
            [sys.executable, "-m", "pyhotexperts", *words],
            cwd=chat_model, input="Who is there?\n/stats\n", capture_output=True, text=True, timeout=120,
            env={**os.environ, "LLAMA_ARG_THREADS": "1", "LLAMA_ARG_N_PREDICT": "20"},
        )  # fmt: skip
        if "needs a GPU" in run.stderr and not machine.has_gpu():
            continue  # as the README says
        assert run.returncode == 0, f"{line}: {run.stderr}"
        assert run.stdout, line


def messages_of_the_sources(root: Path) -> str:
    """All texts in the package's sources, literals that stand beside each other joined."""
    texts = []
    for path in (root / "src" / "pyhotexperts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for path in (root / "src" / "hotexperts").glob("*.cpp"):
        texts.append(re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8")))
    return "\n".join(texts)


def test_every_message_of_the_troubleshooting_table_exists(root: Path) -> None:
    table = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    fragments = [f for row in rows for f in re.findall(r"`([^`]+)`", row)]
    assert len(fragments) > 20
    sources = messages_of_the_sources(root)
    missing = [f for f in fragments if f not in sources]
    assert not missing


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason='needs pip install ".[docs]"')
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", str(root / "docs"), str(tmp_path)], check=True)
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in phx.__all__:
        if name not in ("__version__", "Offload"):
            assert f'id="pyhotexperts.{name}"' in api or re.search(rf'id="pyhotexperts\.\w+\.{name}"', api), name


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
