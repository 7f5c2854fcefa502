"""The commands, as a user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyhotexperts as phx

PROMPT = "The harbour lay quiet"


def command(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
    return subprocess.run(
        [sys.executable, "-m", "pyhotexperts", *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        env={**clean, **(env or {})},
    )


def test_generate_prints_what_the_api_gives(model: phx.Model) -> None:
    expected = model.generate(PROMPT, temperature=0, max_tokens=12).text
    run = command("generate", "-p", PROMPT, "--temp", "0", "-n", "12", "-t", "1")
    assert run.returncode == 0, run.stderr
    assert run.stdout.decode() == PROMPT + expected + "\n"
    assert b"generated 12 tokens" in run.stderr


def test_the_prompt_may_come_from_a_file_or_from_standard_input(tmp_path: Path, model: phx.Model) -> None:
    expected = model.generate("Größe\n", temperature=0, max_tokens=6).text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text("Größe\n", encoding="utf-8")
    flags = ("--temp", "0", "-n", "6", "--no-display-prompt", "-t", "1")
    assert command("generate", "-f", str(file), *flags).stdout.decode() == expected
    assert command("generate", *flags, stdin="Größe\n".encode()).stdout.decode() == expected


def test_environment_variables_take_effect() -> None:
    run = command("generate", "-p", PROMPT, env={"LLAMA_ARG_N_PREDICT": "3", "LLAMA_ARG_THREADS": "1"})
    assert b"generated 3 tokens" in run.stderr


def test_the_reverse_prompt_stops() -> None:
    run = command("generate", "-p", PROMPT, "--temp", "0", "-n", "40", "-t", "1", "-r", " the")
    assert run.returncode == 0
    assert b" the" not in run.stdout[len(PROMPT) :]
    assert b"stopped by ' the'" in run.stderr


def test_demo_writes_text_and_tables() -> None:
    run = command("demo", "-t", "1")
    assert run.returncode == 0, run.stderr
    text = run.stdout.decode()
    assert "GPU is used" in text
    assert "written tokens" in text
    rows = [line for line in text.splitlines() if line[:1].isdigit() and "%" in line]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]


def test_demo_with_a_live_view() -> None:
    run = command("demo", "-t", "1", "--watch", env={"COLUMNS": "100", "LINES": "60"})
    assert run.returncode == 0, run.stderr
    text = run.stdout.decode()
    plain, watched = command("demo", "-t", "1").stdout.decode(), text.split("\n" + "-" * 72 + "\n")[0]
    assert re.search(r"\d+ tokens \| \d+\.\d tokens/s", watched)
    for layer in range(6):
        assert re.search(rf"layer   {layer} (?=[ ░▒▓]*█)[ ░▒▓█]{{64}}\n", watched)
    last = plain.split("-" * 72)[-2]  # the same text, in a frame
    assert last.split("«")[1].split()[0] in watched
    assert "written tokens" in text.split("\n" + "-" * 72 + "\n")[1]


def test_info_as_json_and_as_text() -> None:
    run = command("info", "--json")
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["version"] == phx.__version__
    assert facts | phx.build_info() == facts
    assert facts["llama_cpp_commit"] == "0c1e57098"
    assert len(facts["patch_hash"]) == 64
    assert "CPU" in facts["backends"]
    assert facts["devices"]
    assert Path(facts["embedded_model"]).is_file()
    text = command("info").stdout.decode()
    assert facts["llama_cpp_commit"] in text
    assert "this build has no CUDA backend" in text or facts["cuda_built"] in text
    assert all(d["memory_free"] < d["memory_total"] for d in facts["devices"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "-m", "missing.gguf", "-p", "a"), "no file missing.gguf"),
        (("generate", "-p", "a", "-c", "none"), "--ctx-size has the value 'none'"),
        (("generate", "-p", "a", "-c", "0"), "--ctx-size (n_ctx) must be an integer from 1"),
        (("generate", "-p", "a", "--temp", "-1"), "--temp (temperature) must be a number from 0"),
        (("generate", "-p", "a", "-ctk", "q9"), "--cache-type-k (type_k) must be one of f32, f16"),
        (("generate", "-p", "a", "-f", "b"), "contradict"),
        (("generate", "-f", "missing.txt"), "cannot read the prompt from missing.txt"),
        (("generate", "-p", "a" * 30_000), "must hold it and one more"),
        (("demo", "--moe-hot-k", "many"), 'neither a whole number nor "auto"'),
        (("demo", "--moe-hot-k", "8", "-cmoe"), "contradict each other"),
        (("demo", "--vram-budget", "1 banana"), "1 banana"),
        (("demo", "--vram-budget", "12"), "is a unit missing"),
        (("demo", "--vram-budget", "9" * 400), "must be a size"),
        (("demo", "--offload", "cpu_experts", "--moe-hot-policy", "lru"), "contradict each other"),
        (("bench", "--modes", "warp"), "none of the offload modes"),
        (("bench", "--modes", "layers:x"), "after the colon comes a whole number"),
        (("bench", "--text", "missing.txt"), "cannot read the text missing.txt"),
        (("bench", "--text", "a", "--consecutive"), "contradict"),
        (("bench", "-m", "missing.gguf"), "no file missing.gguf"),
        (("bench", "-p", "0", "-n", "0"), "nothing to measure"),
        (("bench", "-r", "0"), "--repetitions must be"),
        (("bench", "-t", "0"), "--threads must be"),
        (("bench", "-ctk", "f17"), "--cache-type-k must be one of"),
        (("bench", "--vram-budget", "much"), "VRAM budget must be a size"),
        (("demo", "--moe-hot-policy", "magic"), "--moe-hot-policy (policy) must be one of decay, markov, lru, window"),
    ],
)
def test_mistakes_end_with_one_line_and_status_1(arguments: tuple[str, ...], message: str) -> None:
    run = command(*arguments)
    error = run.stderr.decode()
    assert run.returncode == 1
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert run.stdout == b""


def test_a_prompt_that_is_no_utf8_is_refused() -> None:
    run = command("generate", stdin=b"\xff\xfe")
    assert run.returncode == 1
    assert b"not valid UTF-8" in run.stderr


def test_an_empty_prompt_is_refused_unless_given(tmp_path: Path) -> None:
    run = command("generate", "-n", "1", "-t", "1")
    assert run.returncode == 1
    assert b"standard input is empty: give a prompt" in run.stderr
    assert run.stdout == b""
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert b"empty.txt is empty" in command("generate", "-f", str(empty), "-n", "1", "-t", "1").stderr
    assert command("generate", "-p", "", "-n", "1", "-t", "1").returncode == 0


def test_a_bad_environment_variable_is_named() -> None:
    run = command("demo", env={"LLAMA_ARG_THREADS": "all"})
    assert run.returncode == 1
    assert b"LLAMA_ARG_THREADS has the value 'all'" in run.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    run = subprocess.run(
        f"{sys.executable} -m pyhotexperts generate -p x -t 1 -n 400 --temp 1.2 | head -c 1",
        shell=True,
        capture_output=True,
        timeout=60,
    )
    assert b"Traceback" not in run.stderr
    assert b"Exception" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND; see `pyhotexperts --help`"),
        (("--no-such-flag",), "see `pyhotexperts --help`"),
        (("generate", "--no-such-flag"), "unrecognized arguments: --no-such-flag; see `pyhotexperts generate --help`"),
        (("chat", "more"), "unrecognized arguments: more; see `pyhotexperts chat --help`"),
        (("generate", "-s", "x"), "invalid int value: 'x'; see `pyhotexperts generate --help`"),
        (("bench", "-hf", "a/b"), "bench takes no -hf: give the file of a model with -m"),
        (("bench", "--hf-repo=a/b"), "bench takes no --hf-repo: give the file of a model with -m"),
        (("bench", "-hff", "a"), "bench takes no -hff: give the file of a model with -m"),
        (("info", "-hf", "a/b"), "info takes no -hf: it needs no model"),
        (("generate", "-sm", "row"), "there is no flag -sm; is it -s m?; see `pyhotexperts generate --help`"),
        (("generate", "-sm=row"), "there is no flag -sm"),
        (("generate", "-ctkf16"), "there is no flag -ctkf16"),
        (("bench", "-ojsonl"), "there is no flag -ojsonl; is it -o jsonl?"),
        (("generate", "-p", "a", "-no-cnv"), "there is no flag -no-cnv: `pyhotexperts generate` continues"),
        (("chat", "-ot", "exps=CPU"), "there is no flag -ot: --offload and -ncmoe say where experts go"),
        (("generate", "-pOnce"), "there is no flag -pOnce"),
        (("-V",), "see `pyhotexperts --help`"),
    ],
)
def test_wrong_usage_names_the_commands_help(arguments: tuple[str, ...], message: str) -> None:
    run = command(*arguments)
    assert run.returncode == 2
    assert message in run.stderr.decode()
    assert len(run.stderr.splitlines()) == 1


def test_help_lists_the_commands() -> None:
    assert b"demo" in command("--help").stdout


@pytest.mark.parametrize("extra", [(), ("--consecutive",)], ids=["text", "consecutive"])
def test_bench_measures_real_runs(extra: tuple[str, ...]) -> None:
    flags = "--modes cpu_experts -lm mmap -p 32 -n 70 -r 2 -t 1 -o jsonl"
    run = command("bench", *flags.split(), *extra)
    assert run.returncode == 0, run.stderr.decode()
    rows = [json.loads(line) for line in run.stdout.decode().splitlines()]
    assert [(row["test"], row["warm"], row["repetitions"]) for row in rows] == [
        ("pp32", None, 2),
        ("tg64 cold", False, 2),
        ("tg6 warm", True, 2),
    ]
    assert all(row["median_ts"] > 1 for row in rows)
    assert {row["n_ctx"] for row in rows} == {256}  # room for 102 tokens, rounded up
    assert b"repetition 2 of 2" in run.stderr


def test_bench_says_which_runs_failed() -> None:
    run = command("bench", "-p", "30000", "-r", "1", "-t", "1", "--modes", "cpu_experts", "-lm", "mmap")
    assert run.returncode == 1
    assert run.stdout == b""
    assert b"some runs failed" in run.stderr
    assert b"give a longer text" in run.stderr


def test_a_cache_that_cannot_be_had_is_said_on_stderr() -> None:
    if any(d.is_gpu for d in phx.devices()):
        pytest.skip("for a machine without a GPU")
    run = command("generate", "-p", "a", "-n", "2", "--moe-hot-k", "4", env={"LLAMA_ARG_CPU_MOE": "1"})
    assert run.returncode == 0
    assert b"warning: hot-expert cache: it needs a GPU" in run.stderr
    assert b"| no hot-expert cache]" in run.stderr


def test_verbose_says_what_was_decided() -> None:
    run = command("generate", "-p", "a", "-n", "2", "-t", "1", "-v")
    assert b"info: " in run.stderr
    assert b"offload " in run.stderr
    assert b"debug: " not in run.stderr
    assert b"info: " not in command("generate", "-p", "a", "-n", "2").stderr
    assert run.stderr.splitlines()[0] in (more := command("generate", "-p", "a", "-n", "2", "-t", "1", "-vv").stderr)
    assert more.count(b"debug: ") > 20
