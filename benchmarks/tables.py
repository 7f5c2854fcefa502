"""Makes the tables of README.md beside it, and the plots, from the results; so no figure is written by hand.

    python benchmarks/tables.py           rewrite what stands between the markers, draw the plots
    python benchmarks/tables.py --check   exit status 1 if README.md is not what the results make it

Results are the JSON lines of results/: rows of `bench_offload.py -o jsonl`, lines of microbench/*.py and agreement.py.
A table shows the newest run that has its rows (files in the order of their names, which begin with the date), and rows
of different runs never stand in one group, since they do not compare. A table without results is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
MODES = ("cpu_experts", "layers", "hot_experts", "full_gpu")

Row = dict[str, Any]


# ---------------------------------------------------------------- reading


def read_lines(folder: Path) -> list[Row]:
    """All results, oldest file first; each knows its file's name."""
    lines: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = {**json.loads(line), "file": path.name}
                needed = ["command", "commit", "gpu"] + (
                    ["model_filename", "offload_mode"] if "median_ts" in row else []
                )
                lines.append({**row, **{name: row[name] for name in needed}})
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"{path.name}, line {number}, is no result with its origin: {e}") from None
    return lines


def mode_of(row: Row) -> str:
    """The offload mode without its number."""
    return str(row["offload_mode"]).split(":")[0]


def runs_of(lines: list[Row]) -> list[list[Row]]:
    """The rows of `bench_offload.py`, one list for each run of it, oldest first."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in lines:
        if "median_ts" in row:
            runs.setdefault((row["file"], row["command"], row["commit"]), []).append(row)
    return list(runs.values())


def runs_of_first_version(lines: list[Row]) -> list[list[Row]]:
    """Results of its first version, a line for each process, as rows of today's kind (as far as a table needs them)."""
    processes: dict[tuple[str, ...], dict[tuple[Any, ...], list[Row]]] = {}
    for line in lines:
        if "generated_tokens_per_second" in line and "repetition" in line:
            configuration = tuple(line.get(name) for name in ("offload_mode", "build", "load_mode", "n_threads"))
            run = processes.setdefault((line["file"], line["command"], line["commit"]), {})
            run.setdefault(configuration, []).append(line)
    return [[_row_of(group) for group in run.values()] for run in processes.values()]


def _row_of(group: list[Row]) -> Row:
    speeds = [line["generated_tokens_per_second"] for line in group]
    same = (
        "offload_mode",
        "load_mode",
        "n_threads",
        "n_ubatch",
        "commit",
        "command",
        "gpu",
        "processor",
        "file",
        "cpus",
    )
    return {
        **{name: group[0][name] for name in same},
        "model_filename": group[0]["model"],
        "test": "generated",
        "best": True,
        "warm": group[0].get("warm", True),
        "n_gen": group[0]["n_gen"],
        "n_depth": 0,
        "n_ctx": None,
        "type_k": "f16",
        "repetitions": len(group),
        "vram_peak_mib": group[0]["vram_mib"],
        "vram_budget_mib": None,
        "hit_rate": group[0].get("hit_rate"),
        "median_ts": statistics.median(speeds),
    }


def generated(rows: Iterable[Row]) -> list[Row]:
    """The best rows of generation, warm where there are any, in the order of the modes."""
    best = [row for row in rows if row["best"] and row["n_gen"]]
    return sorted([row for row in best if row["warm"]] or best, key=lambda row: MODES.index(mode_of(row)))


# ---------------------------------------------------------------- writing


def table(heading: list[str], lines: list[list[str]]) -> str:
    """A markdown table; columns that are empty in all lines are left out."""
    kept = [i for i in range(len(heading)) if any(line[i] for line in lines)]
    text = ["| " + " | ".join(heading[i] for i in kept) + " |", "|" + "---|" * len(kept)]
    text += ["| " + " | ".join(line[i] for i in kept) + " |" for line in lines]
    return "\n".join(text) + "\n"


def figure(value: float | None, digits: int = 1) -> str:
    """A number, "" for none."""
    return "" if value is None else f"{value:.{digits}f}"


def machine_of(row: Row) -> str:
    """The hardware of a result."""
    return f"{', '.join(row['gpu']) or 'no GPU'}, {row['cpus']} logical CPUs of {row['processor']}"


def origin(rows: list[Row]) -> str:
    """Where the rows come from, as a sentence with a link to each file."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    files = ", ".join(f"[{name}](results/{name})" for name in sorted({row["file"] for row in rows}))
    return f"{machine_of(rows[0])}; commit {commits}; {files}."


# ---------------------------------------------------------------- the tables of bench_offload.py


def newest_by_budget(lines: list[Row], name: str, budgets_gib: tuple[int, ...]) -> dict[int, list[Row]]:
    """GiB -> all rows of the newest run of a model (by its file's name) that has this budget."""
    found: dict[int, list[Row]] = {}
    for run in runs_of(lines):
        if run[0]["model_filename"] == f"{name}.gguf":
            for budget in budgets_gib:
                if any(row["vram_budget_mib"] == budget << 10 for row in run):
                    found[budget] = [row for row in run if row["vram_budget_mib"] in (None, budget << 10)]
    return {budget: found[budget] for budget in budgets_gib if budget in found}


def over_bound(row: Row) -> str:
    """Time over the bound; "~" if the GPU's part is extrapolated, "" if by so much that the bound was beaten."""
    over = row.get("over_bound")
    if over is None or row.get("bound_gpu_from") == "full_gpu":
        return figure(over, 2)
    return f"~{over:.2f}" if over >= 1 else ""


def speed_line(row: Row, rows: list[Row], budget: str) -> list[str]:
    """What a table says of a configuration: row is its row of generation, rows are all of its run."""

    def other(test: Callable[[Row], bool]) -> Row:
        same = ("offload_mode", "load_mode", "n_threads", "vram_budget_mib")
        return next((r for r in rows if all(r[n] == row[n] for n in same) and test(r)), {})

    prompt = other(lambda r: bool(r["n_prompt"]))
    cold = other(lambda r: r["warm"] is False) if row["warm"] else {}
    return [
        budget,
        f"`{row['offload_mode']}`",
        row["load_mode"],
        str(row["n_threads"]),
        str(row["repetitions"]),
        str(row["vram_peak_mib"]),
        "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
        figure(row["median_ts"]) + (f" ± {row['stddev_ts']:.1f}" if row["repetitions"] > 1 else ""),
        figure(cold.get("median_ts")),
        figure(row["ratio_cpu_experts"], 2),
        figure(row["ratio_layers"], 2),
        over_bound(row),
        figure(prompt.get("median_ts"), 0),
        figure(prompt.get("ttft_ms"), 0),
    ]


SPEED_HEADING = ["budget GiB", "experts", "load mode", "threads", "repetitions", "VRAM MiB", "hits", "tokens/s", "cold"]
SPEED_HEADING += ["/ cpu_experts", "/ layers", "time / bound", "prompt tokens/s", "first token ms"]


def workload(rows: list[Row]) -> str:
    """What the rows of a run did, in words."""
    row = generated(rows)[0]
    prompts = " or ".join(map(str, sorted({r["n_prompt"] for r in rows if r.get("n_prompt")})))
    depth = f", after {row['n_depth']} tokens" if row["n_depth"] else ""
    contexts = " or ".join(map(str, sorted({r["n_ctx"] for r in rows if r["n_ctx"]})))
    context = f" of {contexts} tokens" if contexts else ""
    return (
        f"Prompts of {prompts} tokens, " if prompts else ""
    ) + f"passes of {row['n_ubatch']} tokens, KV cache {row['type_k']}{context}{depth}"


def by_budget(lines: list[Row], name: str, title: str, budgets_gib: tuple[int, ...]) -> str:
    """All modes of a model at several budgets."""
    found = newest_by_budget(lines, name, budgets_gib)
    if not found:
        return ""
    used = [row for rows in found.values() for row in rows]
    shown = [
        [*speed_line(row, rows, str(budget)), row["commit"] if len({r["commit"] for r in used}) > 1 else ""]
        for budget, rows in found.items()
        for row in generated(rows)
    ]
    picture = f"\n![{title}](plots/{name}.png)\n" if (HERE / "plots" / f"{name}.png").exists() else ""
    text = f"{workload(used)}. {origin(used)}"
    body = table([*SPEED_HEADING, "commit"], shown)
    return f"## {title}, all modes at equal VRAM\n\n{text}\n\n{body}{picture}"


def few_threads(lines: list[Row]) -> str:
    """The 122B with the 6 cores of a small machine: the newest run of several modes with no other number of threads."""
    rows: list[Row] = []
    for run in runs_of(lines):
        modes = {mode_of(row) for row in run}
        if run[0]["model_filename"] == "122b.gguf" and {row["n_threads"] for row in run} == {6} and len(modes) > 1:
            rows = run
    if not generated(rows):
        return ""
    shown = [speed_line(row, rows, "") for row in generated(rows)]
    text = f"{workload(rows)}. {origin(rows)}"
    return f"## Qwen3.5-122B-A10B shapes, 6 threads\n\n{text}\n\n{table(SPEED_HEADING, shown)}"


def embedded(lines: list[Row]) -> str:
    """The embedded model on real text."""
    runs = [
        run
        for run in runs_of(lines)
        if run[0]["model_filename"].startswith("tinymoe") and "--consecutive" not in run[0]["command"] and run[0]["gpu"]
    ]
    if not runs:
        return ""
    rows = runs[-1]
    shown = [speed_line(row, rows, "") for row in generated(rows)]
    text = f"{workload(rows)}. {origin(rows)}"
    return f"## The embedded model on real text\n\n{text}\n\n{table(SPEED_HEADING, shown)}"


# From the post that presented the reference implementation: RTX 4090 24 GB and Ryzen 7950X, Qwen3.5-122B-A10B Q4_K_L,
# q8_0 KV cache of 131K tokens, ubatch 3072. Mode of ours, what it says, VRAM, tokens/s.
REFERENCE = (
    ("cpu_experts", "all experts on the CPU", "", 15.65),
    ("layers:40", "8 of 48 layers on the GPU", "22.6 GB", 17.87),
    ("hot_experts:44", "hot experts, 44 of 256 slots per layer", "22.2 GB", 22.67),
)


def reference(lines: list[Row]) -> str:
    """The reference post's table beside the same rows of ours: the newest run of the 122B model with all of them."""
    wanted = {mode for mode, _, _, _ in REFERENCE}
    ours: dict[str, Row] = {}
    for run in runs_of_first_version(lines) + runs_of(lines):
        rows = {row["offload_mode"]: row for row in generated(run)}
        if run[0]["model_filename"] == "122b.gguf" and wanted <= rows.keys():
            ours = rows
    if not ours:
        return ""
    first, theirs_first = ours["cpu_experts"], REFERENCE[0][3]
    shown = [
        [
            what,
            vram,
            figure(speed, 2),
            figure(speed / theirs_first, 2),
            f"{ours[mode]['vram_peak_mib'] / 1024:.1f} GiB",
            figure(ours[mode]["median_ts"], 2),
            figure(ours[mode]["median_ts"] / first["median_ts"], 2),
        ]
        for mode, what, vram, speed in REFERENCE
    ]
    heading = ["experts", "their VRAM", "their tokens/s", "/ CPU", "our VRAM", "our tokens/s", "/ CPU"]
    return (
        "## Beside the reference implementation\n\nThe hardware differs: compare the ratios. Layers and slots are "
        "theirs, so the VRAM of our two last rows is not equal. "
        "Theirs: RTX 4090 24 GB and Ryzen 7950X, Qwen3.5-122B-A10B Q4_K_L, q8_0 KV cache of 131K tokens, ubatch 3072. "
        f"Ours: geometry model of the same shapes, {workload(list(ours.values()))}, load mode {first['load_mode']}, "
        f"{first['n_threads']} threads, repetitions: {first['repetitions']}. {origin(list(ours.values()))}"
        f"\n\n{table(heading, shown)}"
    )


# ---------------------------------------------------------------- the tables of microbench/


def newest(lines: list[Row]) -> list[Row]:
    """The lines of the newest run: the same file and commit as the last one."""
    return [line for line in lines if (line["file"], line["commit"]) == (lines[-1]["file"], lines[-1]["commit"])]


def machine(lines: list[Row]) -> str:
    """The machine's bounds."""
    lines = [line for line in lines if line.get("benchmark") == "machine" and line["gpu"]]
    if not lines:
        return ""
    lines = newest(lines)
    columns: dict[str, dict[str, float]] = {}
    text = (
        f"## The machine's bounds\n\n`microbench/machine.py`, by code that is not the engine's, GB/s. {origin(lines)}\n"
    )
    for line in lines:
        if line["part"] == "reads":
            columns[f"reads, {line['pages']} pages"] = line["gb_per_second"]
        for other, name in (("dma", "copies"), ("zero_copy", "kernel reads")):
            if line["part"] == f"reads_and_{other}":
                columns[f"reads beside {name}"] = line["reads_gb_per_second"]
                columns[f"{name} beside reads"] = line[f"{other}_gb_per_second"]
    if columns:
        threads = sorted({t for column in columns.values() for t in column}, key=int)
        shown = [[t, *(figure(column.get(t)) for column in columns.values())] for t in threads]
        text += "\n" + table(["threads", *columns], shown)
    for part, heading in (("dma", "copies to the GPU, bytes of a piece"), ("zero_copy", "kernel reads, blocks")):
        for line in lines:
            if line["part"] == part:
                rates = line["gb_per_second"]
                text += "\n" + table([heading, *rates], [["GB/s", *map(figure, rates.values())]])
    shown = [
        [
            line["kind"],
            str(line["bytes_there"]),
            str(line["bytes_back"]),
            figure(line["us_median"]),
            figure(line["us_p95"]),
        ]
        for line in lines
        if line["part"] == "handover"
    ]
    if shown:
        text += "\n" + table(["hand-over", "bytes there", "bytes back", "median us", "p95 us"], shown)
    return text


def lane_figure(line: Row, name: str) -> str:
    """GB/s of the CPU lane with weights of this type."""
    lane, ggml = line["gb_per_second"].get(name), line.get("ggml_gb_per_second", {}).get(name)
    return figure(lane) + (f" ({lane / ggml:.2f}x)" if lane and ggml else "")


def cpu_lane(lines: list[Row]) -> str:
    """The CPU lane beside plain reads, and over ggml's own CPU path: the newest file, of a GPU machine if any."""
    lines = [line for line in lines if "reads" in line.get("gb_per_second", {}) and "threads" in line]
    lines = [line for line in lines if line["gpu"]] or lines
    if not lines:
        return ""
    lines = [line for line in lines if line["file"] == lines[-1]["file"]]
    text = (
        "`microbench/cpu_lane.py`: experts of the 30B's shape that are in no cache, so many at a time, and plain "
        f"reads, GB/s; in brackets the lane over ggml's own CPU path, where that was measured. {origin(lines)}"
    )
    same = ("commit", "threads", "pages")
    for setup in dict.fromkeys(tuple(line[name] for name in same) for line in lines):
        of_setup = [line for line in lines if tuple(line[name] for name in same) == setup]
        commit, threads, pages = setup
        types = [name for name in of_setup[0]["gb_per_second"] if name != "reads"]
        shown = [[name, *(lane_figure(line, name) for line in of_setup)] for name in ["reads", *types]]
        heading = ["experts at a time", *(str(line.get("experts", 8)) for line in of_setup)]
        text += f"\n\n{threads} threads, {pages} pages, commit {commit}:\n\n{table(heading, shown)}".rstrip()
    return f"## The CPU lane alone\n\n{text}\n"


def agreement(lines: list[Row]) -> str:
    """The benchmark beside a C loop."""
    lines = [line for line in lines if line.get("benchmark") == "agreement"]
    if not lines:
        return ""
    lines = newest(lines)
    shown = [
        [
            line["model_filename"],
            f"`{line['offload_mode']}`",
            line["load_mode"],
            str(line["n_threads"]),
            figure(statistics.median(line["generated"]["loop_ts"])),
            figure(statistics.median(line["generated"]["bench_ts"])),
            figure(line["generated"]["ratio"], 3),
            figure(line["prompt"]["ratio"], 3),
        ]
        for line in lines
    ]
    heading = [
        "model",
        "experts",
        "load mode",
        "threads",
        "C loop tokens/s",
        "benchmark tokens/s",
        "ratio",
        "prompt's ratio",
    ]
    text = f"`agreement.py`: plain decoding over llama.h, in turn with the benchmark. {origin(lines)}"
    return f"## The benchmark beside a C loop\n\n{text}\n\n{table(heading, shown)}"


GEOMETRIES = {
    "30b": ("Qwen3-30B-A3B shapes", (6, 8, 12, 16)),
    "122b": ("Qwen3.5-122B-A10B shapes", (12, 16, 20, 24)),
}
TABLES: dict[str, Callable[[list[Row]], str]] = {
    **{
        name: lambda lines, name=name, title=title, budgets=budgets: by_budget(lines, name, title, budgets)
        for name, (title, budgets) in GEOMETRIES.items()
    },
    "threads": few_threads,
    "embedded": embedded,
    "reference": reference,
    "machine": machine,
    "cpu_lane": cpu_lane,
    "agreement": agreement,
}


def filled(text: str, lines: list[Row]) -> str:
    """A document with its tables made anew.

    Raises
    ------
    ValueError
        If it has a marker of a table that there is not, or lacks one.
    """
    named = [name for _, name, _, _ in MARKED.findall(text)]
    if sorted(named) != sorted(TABLES):
        raise ValueError(f"README.md must have a place for each of the tables {', '.join(TABLES)}, and has {named}")

    def made(match: re.Match[str]) -> str:
        content = TABLES[match[2]](lines)
        return match[1] + ("\n" + content + "\n" if content else "") + match[4]

    return MARKED.sub(made, text)


def draw(lines: list[Row], folder: Path) -> None:
    """Speed against VRAM, and hit rate against slots, of the models whose tables have rows."""
    from pyhotexperts.bench import plot

    for name, (_, budgets) in GEOMETRIES.items():
        found = newest_by_budget(lines, name, budgets)
        if found:
            folder.mkdir(exist_ok=True)
            unique = {id(row): row for rows in found.values() for row in rows}
            plot.draw(list(unique.values()), str(folder / f"{name}.png"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    a = parser.parse_args()
    readme = HERE / "README.md"
    try:
        lines = read_lines(HERE / "results")
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    text = readme.read_text(encoding="utf-8")
    if a.check:
        if filled(text, lines) != text:
            print("benchmarks/README.md is not what the results make it: run benchmarks/tables.py", file=sys.stderr)
            return 1
        return 0
    try:
        draw(lines, HERE / "plots")
    except ImportError as e:
        print(f'the plots are left as they are: {e} (pip install "pyhotexperts[plot]")', file=sys.stderr)
    readme.write_text(filled(text, lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
