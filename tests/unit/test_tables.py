"""The tables of benchmarks/README.md: made from results, of made-up ones here, and true of the real ones."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyhotexperts.bench import summary
from pyhotexperts.bench.config import Mode, Run

ORIGIN = {"commit": "abc1234", "gpu": ["NVIDIA X"], "cpus": 16, "processor": "CPU Y", "file": "2026-12-01-a.jsonl"}
GIB = 2**30


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(model: str, mode: Mode, step: float, budget: int | None = None, **cache: float) -> summary.Measured:
    run = Run(model, mode, 64, 80, 0, 512, 512, 16, "mmap", "f16", "f16", "on", None, 0, vram_budget=budget)
    result = {
        "model_type": "test",
        "model_size": 1,
        "model_n_params": 1,
        "n_gpu_layers": -1,
        "expert_bytes_in_ram": 10**9,
        "load_seconds": 1.0,
        "prompt_seconds": 0.5,
        "steps_seconds": [step * 2] * 64 + [step] * 16,
        "vram_peak": 5 * GIB,
        "slots": mode.value if mode.name == "hot_experts" else None,
        "policy": None,
        "cache": {"cold": cache, "warm": cache} if cache else {},
    }
    return run, result


def rows(command: str, *runs: summary.Measured, **origin: Any) -> list[dict[str, Any]]:
    made = summary.rows(list(runs), {run.label for run, _ in runs}, 100.0)
    return [{**row, **ORIGIN, "command": command, **origin} for row in made]


def comparison(model: str, hot_step: float, budget: int, command: str = "x", **origin: Any) -> list[dict[str, Any]]:
    return rows(
        command,
        measured(model, Mode("full_gpu"), 0.002),
        measured(model, Mode("hot_experts", 44), hot_step, budget, hit_rate=0.75, uploads_per_token=1.0),
        measured(model, Mode("layers", 40), 0.01, budget),
        measured(model, Mode("cpu_experts"), 0.02),
        **origin,
    )


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_all_modes_at_each_budget(tables: ModuleType) -> None:
    lines = comparison("30b.gguf", 0.005, 8 * GIB) + comparison("30b.gguf", 0.004, 12 * GIB, command="y")
    text = tables.TABLES["30b"](lines)
    heading, *body = cells(text)
    assert [line[:2] for line in body] == [
        [budget, f"`{mode}`"]
        for budget in ("8", "12")
        for mode in ("cpu_experts", "layers:40", "hot_experts:44", "full_gpu")
    ]
    hot = dict(zip(heading, body[2], strict=True))
    assert (hot["tokens/s"], hot["cold"], hot["hits"]) == ("200.0", "100.0", "75%")
    assert (hot["/ cpu_experts"], hot["/ layers"], hot["prompt tokens/s"]) == ("4.00", "2.00", "128")
    assert hot["time / bound"] == "1.11"  # 5 ms, of 2 ms and 0.25 GB at 100 GB/s
    assert "abc1234" in text
    assert "(results/2026-12-01-a.jsonl)" in text


def test_what_was_measured_more_than_once_has_a_spread(tables: ModuleType) -> None:
    lines = [{**line, "repetitions": 2, "stddev_ts": 3.14} for line in comparison("30b.gguf", 0.005, 8 * GIB)]
    heading, *body = cells(tables.TABLES["30b"](lines))
    hot = dict(zip(heading, body[2], strict=True))
    assert (hot["tokens/s"], hot["repetitions"]) == ("200.0 ± 3.1", "2")


def test_each_row_has_its_commit_if_there_are_several(tables: ModuleType) -> None:
    older = comparison("30b.gguf", 0.005, 8 * GIB)
    newer = comparison("30b.gguf", 0.004, 12 * GIB, file="2026-12-02-b.jsonl", commit="def5678", n_ctx=99)
    assert "commit" not in cells(tables.TABLES["30b"](older))[0]
    text = tables.TABLES["30b"](older + newer)
    heading, *body = cells(text)
    commits = [(line[0], line[heading.index("commit")]) for line in body]
    assert commits == [("8", "abc1234")] * 4 + [("12", "def5678")] * 4
    assert "KV cache f16 of 99 or " in text


def test_the_newest_run_of_a_budget_is_shown(tables: ModuleType) -> None:
    older = comparison("30b.gguf", 0.005, 8 * GIB)
    newer = comparison("30b.gguf", 0.004, 8 * GIB, file="2026-12-02-b.jsonl", commit="def5678")
    text = tables.TABLES["30b"](older + newer)
    assert "250.0" in text
    assert "200.0" not in text
    assert "abc1234" not in text


def test_a_table_without_results_is_left_out(tables: ModuleType) -> None:
    lines = comparison("30b-of-somebody.gguf", 0.005, 8 * GIB) + comparison("122b.gguf", 0.005, 8 * GIB)
    for name in ("30b", "122b", "embedded", "threads", "machine", "cpu_lane", "agreement"):
        assert tables.TABLES[name](lines) == ""
        assert tables.TABLES[name]([]) == ""
    assert tables.TABLES["reference"]([]) == ""


def test_the_reference_stands_beside_the_same_rows(tables: ModuleType) -> None:
    body = cells(tables.TABLES["reference"](comparison("122b.gguf", 0.005, 16 * GIB)))[1:]
    assert [line[2] for line in body] == ["15.65", "17.87", "22.67"]
    assert [line[5:] for line in body] == [["50.00", "1.00"], ["100.00", "2.00"], ["200.00", "4.00"]]
    others = rows(
        "x", measured("122b.gguf", Mode("cpu_experts"), 0.02), measured("122b.gguf", Mode("layers", 40), 0.01)
    )
    assert tables.TABLES["reference"](others) == ""


def test_results_of_the_first_version_are_read(tables: ModuleType) -> None:
    common = {
        "model": "122b.gguf",
        "load_mode": "mmap",
        "n_threads": 16,
        "n_ubatch": 2048,
        "n_gen": 48,
        "vram_mib": 1024,
    }
    speeds = {"cpu_experts": (20.0, 22.0), "layers:40": (24.0,), "hot_experts:44": (42.0,)}
    lines = [
        {
            **ORIGIN,
            **common,
            "command": "x",
            "offload_mode": mode,
            "repetition": i,
            "generated_tokens_per_second": speed,
        }
        for mode, found in speeds.items()
        for i, speed in enumerate(found)
    ]
    body = cells(tables.TABLES["reference"](lines))[1:]
    assert [line[4:] for line in body] == [
        ["1.0 GiB", "21.00", "1.00"],
        ["1.0 GiB", "24.00", "1.14"],
        ["1.0 GiB", "42.00", "2.00"],
    ]


def test_the_embedded_model_on_real_text(tables: ModuleType) -> None:
    name = "tinymoe-q4_k_m.gguf"
    text = tables.TABLES["embedded"](comparison(name, 0.005, GIB, command="bench_offload.py"))
    assert len(cells(text)) == 5
    assert tables.TABLES["embedded"](comparison(name, 0.005, GIB, command="bench_offload.py --consecutive")) == ""


def test_the_same_with_few_threads(tables: ModuleType) -> None:
    run = comparison("122b.gguf", 0.005, 16 * GIB)
    few = [{**row, "n_threads": 6, "command": "y"} for row in run if row["offload_mode"] != "full_gpu"]
    text = tables.TABLES["threads"](run + few)
    assert {line[2] for line in cells(text)[1:]} == {"6"}
    assert tables.TABLES["threads"]([few[0], *run]) == ""
    assert tables.TABLES["threads"]([row for row in few if not row["n_gen"]]) == ""


def test_the_cpu_lane_beside_reads_and_ggml(tables: ModuleType) -> None:
    line = {**ORIGIN, "command": "x", "threads": 12, "pages": "huge", "experts": 2}
    here = {**line, "gpu": [], "file": "2026-12-02-b.jsonl", "gb_per_second": {"reads": 30.0, "q4_K": 20.0}}
    rates = {"gb_per_second": {"reads": 107.1, "q4_K": 73.5, "q8_0": 92.6}, "ggml_gb_per_second": {"q4_K": 49.0}}
    there = [{**line, **rates, "experts": n, "threads": threads} for threads in (8, 12) for n in (2, 4)]
    assert cells(tables.TABLES["cpu_lane"]([here])) == [["experts at a time", "2"], ["reads", "30.0"], ["q4_K", "20.0"]]
    text = tables.TABLES["cpu_lane"]([*there, here])
    assert [part in text for part in ("8 threads, huge pages", "12 threads, huge pages")] == [True, True]
    of_one = [["experts at a time", "2", "4"], ["reads", *2 * ["107.1"]], ["q4_K", *2 * ["73.5 (1.50x)"]]]
    assert cells(text) == 2 * [*of_one, ["q8_0", *2 * ["92.6"]]]


def test_the_machines_bounds(tables: ModuleType) -> None:
    parts: list[dict[str, Any]] = [
        {"part": "reads", "pages": "4k", "gb_per_second": {"1": 8.25, "16": 85.8}},
        {"part": "dma", "gb_per_second": {"16384": 5.0, "67108864": 55.0}},
        {"part": "reads_and_dma", "reads_gb_per_second": {"8": 40.0}, "dma_gb_per_second": {"8": 50.0}},
        {"part": "handover", "kind": "mailbox", "bytes_there": 1, "bytes_back": 2, "us_median": 21.5, "us_p95": 30.0},
    ]
    text = tables.TABLES["machine"]([{"benchmark": "machine", **ORIGIN, **part} for part in parts])
    assert ["threads", "reads, 4k pages", "reads beside copies", "copies beside reads"] in cells(text)
    assert ["8", "", "40.0", "50.0"] in cells(text)
    assert ["16", "85.8", "", ""] in cells(text)
    assert ["GB/s", "5.0", "55.0"] in cells(text)
    assert ["mailbox", "1", "2", "21.5", "30.0"] in cells(text)


def test_only_what_is_between_the_markers_changes(tables: ModuleType) -> None:
    places = "\n".join(f"<!-- table: {name} -->\nold\n<!-- end of table -->" for name in tables.TABLES)
    text = tables.filled(f"before\n{places}\nafter\n", comparison("30b.gguf", 0.005, 8 * GIB))
    assert text.startswith("before\n<!-- table: 30b -->\n\n## Qwen3-30B-A3B shapes")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert "\nold\n" not in text
    assert tables.filled(text, comparison("30b.gguf", 0.005, 8 * GIB)) == text
    with pytest.raises(ValueError, match="must have a place for each"):
        tables.filled("no marker", [])


@pytest.fixture
def results(root: Path) -> Path:
    folder = root / "benchmarks" / "results"
    if not folder.is_dir():
        pytest.skip("the results are not part of the source distribution")
    return folder


def test_the_readme_is_what_the_results_make_it(root: Path, results: Path, tables: ModuleType) -> None:
    command = [sys.executable, str(root / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (root / "benchmarks" / "README.md").read_text(encoding="utf-8")
    lines = tables.read_lines(results)
    changed = [{**line, "commit": "0000000"} for line in lines]
    assert tables.filled(text, lines) == text != tables.filled(text, changed)


NO_COMMAND = '{"median_ts": 1, "commit": "abc1234"}'
NO_GPU = '{"commit": "abc1234", "command": "x"}'
NO_MODEL = '{"median_ts": 1, "commit": "abc1234", "command": "x", "gpu": []}'


@pytest.mark.parametrize("line", ["", '{"median_ts": 1', "[1]", NO_COMMAND, NO_GPU, NO_MODEL])
def test_a_line_that_is_no_result_is_named(line: str, tables: ModuleType, tmp_path: Path) -> None:
    good = json.dumps({"commit": "abc1234", "command": "x", "gpu": []})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2, is no result with its origin"):
        tables.read_lines(tmp_path)


def test_every_result_says_where_it_comes_from(results: Path) -> None:
    for path in results.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert {"commit", "command", "processor", "cpus", "gpu", "compiler"} <= json.loads(line).keys()


def test_plots_are_drawn_from_the_same_rows(tables: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables.draw(comparison("30b.gguf", 0.005, 8 * GIB), tmp_path / "plots")
    assert (tmp_path / "plots" / "30b.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "plots" / "122b.png").exists()


def test_the_readme_quotes_results(tables: ModuleType) -> None:
    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text(encoding="utf-8")
    table = [row for row in cells(text) if len(row) == 5 and re.fullmatch(r"[\d.]+", row[3])]
    assert len(table) > 8
    rows = [row for run in tables.runs_of(tables.read_lines(root / "benchmarks" / "results")) for row in run]
    generated = {(f"{row['median_ts']:.1f}", f"{row['vram_peak_mib'] / 1024:.1f}") for row in rows if row["n_gen"]}
    prompts = {f"{row['median_ts']:.0f}" for row in rows if row["n_prompt"] == 512}
    for row in table:
        assert (row[3], row[2]) in generated
        assert set(re.findall(r"\d+", row[4])) <= prompts
