"""The benchmark's decisions, with made-up measurements: what wins, equal VRAM, formats, failures, interrupts."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pyhotexperts as phx
from pyhotexperts import picture, placement
from pyhotexperts.bench import bound, output, plot, runner, summary
from pyhotexperts.bench.config import COLD_TOKENS, Mode, Run
from pyhotexperts.cli import bench as cli_bench
from pyhotexperts.results import DeviceMemory

MIB = 2**20
BASE = Run("m.gguf", Mode("cpu_experts"), 64, 80, 0, 512, 512, 1, "mmap", "f16", "f16", "on", None, 0)


def result(run: Run, step: float = 0.01, vram: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "test",
        "model_size": 1,
        "model_n_params": 1,
        "n_gpu_layers": -1,
        "expert_bytes_in_ram": 480_000_000,
        "load_seconds": 1.0,
        "prompt_seconds": 0.5,
        "steps_seconds": [step * 2] * min(run.n_gen, COLD_TOKENS) + [step] * max(0, run.n_gen - COLD_TOKENS),
        "vram_peak": vram,
        "n_ctx": 256,
        "slots": None,
        "policy": None,
        "cache": {},
        "disturbance": None,
        **more,
    }


class FakeGpu:
    """A machine on which everything takes what this says."""

    def __init__(self, slot: int = 10 * MIB, extra: int = 0) -> None:
        self.slot = slot
        self.extra = extra  # VRAM that hot experts take beside the plan
        self.repacked = 0
        self.runs: list[Run] = []

    def plan(self, request: object, offload: phx.Offload) -> tuple[DeviceMemory, ...]:
        n_cpu = offload.n_cpu_moe if offload.n_cpu_moe >= 0 else 48
        needed = (100 + 50 * max(0, 48 - n_cpu)) * MIB
        slot = self.slot if isinstance(offload, phx.HotExperts) else 0
        n_expert = 128 if slot else 0
        return (
            DeviceMemory("CUDA0", True, needed, 0, 0, 8192 * MIB, 8192 * MIB, slot, n_expert),
            DeviceMemory("CPU", False, 0, 0, 0, 8192 * MIB, 8192 * MIB, repacked=self.repacked),
        )

    def execute(self, run: Run) -> dict[str, Any]:
        self.runs.append(run)
        if run.mode.name == "hot_experts":
            vram = 100 * MIB + run.mode.value * self.slot + self.extra
            cache = {"cold": {"hit_rate": 0.25}, "warm": {"hit_rate": 0.5}}
            return result(run, 0.004, vram, slots=run.mode.value, policy="decay", cache=cache)
        if run.mode.name == "full_gpu":
            return result(run, 0.002, 2500 * MIB, expert_bytes_in_ram=0)
        if run.mode.name == "layers":
            bytes_in_ram = run.mode.value * 10_000_000
            return result(run, 0.009, (100 + 50 * (48 - run.mode.value)) * MIB, expert_bytes_in_ram=bytes_in_ram)
        step = {("mmap", 1): 0.02, ("mmap", 2): 0.015, ("copy", 1): 0.012, ("copy", 2): 0.01}
        if run.load_mode == "repack":  # generates fastest, and reads prompts slowly
            return result(run, 0.0095, 100 * MIB, prompt_seconds=5.0)
        return result(run, step[run.load_mode, run.n_threads], 100 * MIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(placement, "plan", lambda request, offload: fake.plan(request, offload))
    monkeypatch.setattr(runner, "_request", lambda run: run)
    return fake


def options(*modes: Mode | str, **changes: Any) -> runner.Options:
    given: dict[str, Any] = {
        "threads": (1, 2),
        "load_modes": ("mmap", "copy"),
        "repetitions": 3,
        "vram_budgets": (2000 * MIB,),
    }
    return runner.Options(base=BASE, modes=modes, **{**given, **changes})


def test_the_environment_names_model_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    cli_bench.add_parser(commands)

    def made(*words: str) -> runner.Options:
        return cli_bench.options_of(commands.choices["bench"].parse_args(["--modes", "cpu_experts", *words]))

    for name, value in {"THREADS": "2,1", "LOAD_MODE": "copy", "CTX_SIZE": "1000", "UBATCH": "64"}.items():
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    options = made()
    assert (options.threads, options.load_modes) == ((2, 1), ("copy",))
    assert (options.base.n_ctx, options.base.n_ubatch) == (1000, 64)
    assert made("-t", "1").threads == (1,)
    monkeypatch.setenv("LLAMA_ARG_MODEL", str(tmp_path / "none.gguf"))
    with pytest.raises(phx.ModelNotFoundError, match=r"none\.gguf"):
        made()
    monkeypatch.setenv("LLAMA_ARG_THREADS", "2 x")
    with pytest.raises(phx.ConfigError, match=r"LLAMA_ARG_THREADS: 'x' is no whole number"):
        made()


def test_what_is_named_twice_is_tried_once() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    cli_bench.add_parser(commands)
    words = [
        "--modes",
        "cpu_experts",
        "cpu_experts",
        "-t",
        "2",
        "1",
        "2",
        "-lm",
        "mmap",
        "mmap",
        "--vram-budget",
        "8GiB",
        "8192MiB",
    ]
    made = cli_bench.options_of(commands.choices["bench"].parse_args(words))
    assert (made.modes, made.threads, made.load_modes) == (("cpu_experts",), (2, 1), ("mmap",))
    assert made.vram_budgets == (8 << 30,)


def test_load_modes_then_threads_are_tried_and_the_fastest_is_repeated(gpu: FakeGpu) -> None:
    benchmark = runner.Benchmark(options("cpu_experts"), gpu.execute)
    benchmark.run()
    assert [(r.load_mode, r.n_threads, r.repetition) for r in gpu.runs] == [
        ("mmap", 1, 0),
        ("copy", 1, 0),
        ("copy", 2, 0),
        ("copy", 2, 1),
        ("copy", 2, 2),
    ]
    assert benchmark.outcome.winners["cpu_experts"].label == "cpu_experts, copy, 2 threads"


def test_what_was_fastest_once_by_luck_is_not_the_best(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        if run.load_mode == "copy" and run.repetition:  # 0.01 s a token at first
            gpu.runs.append(run)
            return result(run, 0.03, 100 * MIB)
        return gpu.execute(run)

    benchmark = runner.Benchmark(options("cpu_experts", threads=(2,)), execute)
    benchmark.run()
    assert [(r.load_mode, r.repetition) for r in gpu.runs] == [
        ("mmap", 0),
        ("copy", 0),
        ("copy", 1),
        ("mmap", 1),
        ("mmap", 2),
    ]
    assert benchmark.outcome.winners["cpu_experts"].load_mode == "mmap"


def test_a_repetition_that_fails_is_not_tried_again(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        if run.repetition == 1 and run.load_mode == "copy":
            gpu.runs.append(run)
            raise runner.RunFailedError("out of memory")
        return gpu.execute(run)

    benchmark = runner.Benchmark(options("cpu_experts", threads=(2,), load_modes=("copy",)), execute)
    benchmark.run()
    assert [r.repetition for r in gpu.runs] == [0, 1, 2]
    assert benchmark.outcome.failures == ["out of memory"]
    assert benchmark.outcome.winners["cpu_experts"].load_mode == "copy"
    beside_another = runner.Benchmark(options("cpu_experts", threads=(2,), repetitions=2), execute)
    beside_another.run()
    assert beside_another.outcome.winners["cpu_experts"].load_mode == "mmap"  # slower, but it does not fail


@pytest.mark.parametrize(("steps", "best"), [((0.001, 0.0029, 0.0011), "copy"), ((0.001, 0.0029, 0.00205), "mmap")])
def test_the_fastest_has_the_smallest_median(gpu: FakeGpu, steps: tuple[float, ...], best: str) -> None:
    def execute(run: Run) -> dict[str, Any]:
        gpu.runs.append(run)
        return result(run, steps[run.repetition] if run.load_mode == "copy" else 0.002)

    benchmark = runner.Benchmark(options("cpu_experts", threads=(2,)), execute)
    benchmark.run()
    assert benchmark.outcome.winners["cpu_experts"].load_mode == best


def test_without_generation_the_prompt_decides(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        return result(run, prompt_seconds=1.0 if run.load_mode == "mmap" else 0.5)

    given = options("cpu_experts", threads=(2,), repetitions=1)
    benchmark = runner.Benchmark(replace(given, base=replace(BASE, n_gen=0)), execute)
    benchmark.run()
    assert benchmark.outcome.winners["cpu_experts"].load_mode == "copy"


def test_what_two_modes_mean_is_repeated_once(gpu: FakeGpu) -> None:
    modes = ("layers", Mode("layers", 0))
    given = options(*modes, threads=(2,), load_modes=("copy",), vram_budgets=(None,))
    benchmark = runner.Benchmark(given, gpu.execute)
    benchmark.run()
    assert [str(run.mode) for run in gpu.runs] == ["layers:0"] * 3
    assert {row["repetitions"] for row in cli_bench.rows_of(benchmark.outcome, None)} == {3}


def test_slots_that_fit_are_kept_if_more_of_them_fail(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        answer = gpu.execute(run)
        if run.mode.name == "layers":
            answer["vram_peak"] += 300 * MIB
        elif len([r for r in gpu.runs if r.mode.name == "hot_experts"]) == 2:
            raise runner.RunFailedError("out of memory")
        return answer

    given = options("layers", "hot_experts", threads=(2,), load_modes=("mmap",), repetitions=1)
    benchmark = runner.Benchmark(given, execute)
    benchmark.run()
    first = next(r for r in gpu.runs if r.mode.name == "hot_experts")
    assert [str(run.mode) for run, _ in benchmark.outcome.measured][1:] == [str(first.mode)]
    assert benchmark.outcome.failures == ["out of memory"]


def test_hot_experts_take_no_more_than_any_layers_row(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        answer = gpu.execute(run)
        if run.mode.name == "layers" and run.load_mode == "mmap":  # the first, so it wins
            answer["vram_peak"] += 100 * MIB
        return answer

    benchmark = runner.Benchmark(options("layers", "hot_experts", threads=(2,)), execute)
    benchmark.run()
    peaks = [(run.mode.name, r["vram_peak"]) for run, r in benchmark.outcome.measured]
    assert max(p for name, p in peaks if name == "hot_experts") <= min(p for name, p in peaks if name == "layers")


def test_layers_fill_the_budget_and_hot_experts_take_no_more(gpu: FakeGpu) -> None:
    gpu.extra = 130 * MIB
    benchmark = runner.Benchmark(options("layers", "hot_experts", threads=(2,), load_modes=("mmap",)), gpu.execute)
    benchmark.run()
    budget = 2000 * MIB - placement.CUDA_OVERHEAD
    layers = benchmark.outcome.winners[runner.key_of("layers", 2000 * MIB)].mode
    assert (100 + 50 * (48 - layers.value)) * MIB <= budget < (100 + 50 * (49 - layers.value)) * MIB
    peaks = {str(run.mode): r["vram_peak"] for run, r in benchmark.outcome.measured}
    hot = benchmark.outcome.winners[runner.key_of("hot_experts", 2000 * MIB)].mode
    assert set(peaks) == {str(layers), str(hot)}  # what took too much is not in the results
    limit = peaks[str(layers)]
    assert limit - 20 * MIB < peaks[str(hot)] <= limit


def test_slots_are_searched_once_for_all_variants(gpu: FakeGpu) -> None:
    gpu.extra = 130 * MIB
    benchmark = runner.Benchmark(options("layers", "hot_experts", repetitions=1), gpu.execute)
    benchmark.run()
    hot = [(r.load_mode, r.n_threads, r.mode.value) for r in gpu.runs if r.mode.name == "hot_experts"]
    found = benchmark.outcome.winners[runner.key_of("hot_experts", 2000 * MIB)].mode.value
    assert hot[0][2] != found  # the guess took too much
    assert hot[1:] == [("mmap", 1, found), ("copy", 1, found), ("mmap", 2, found)]


def test_modes_are_rotated(gpu: FakeGpu) -> None:
    modes = (Mode("layers", 40), Mode("hot_experts", 8))
    runner.Benchmark(options("cpu_experts", *modes, threads=(2,), load_modes=("copy",)), gpu.execute).run()
    order = [str(r.mode) for r in gpu.runs]
    assert order[:3] == ["cpu_experts", "layers:40", "hot_experts:8"]
    assert order[3:6] == ["layers:40", "hot_experts:8", "cpu_experts"]
    assert order[6:] == ["hot_experts:8", "cpu_experts", "layers:40"]


def test_a_budget_without_room_is_an_error(gpu: FakeGpu) -> None:
    with pytest.raises(phx.ConfigError, match="larger one"):
        runner.Benchmark(options("layers", vram_budgets=(800 * MIB,)), gpu.execute).run()


def test_a_model_without_routed_experts_has_no_hot_row(gpu: FakeGpu) -> None:
    gpu.slot = 0
    benchmark = runner.Benchmark(options("hot_experts"), gpu.execute)
    benchmark.run()
    assert not benchmark.outcome.measured
    assert "no layer on a GPU has routed experts" in benchmark.outcome.failures[0]


def test_a_run_that_fails_leaves_the_others(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        if run.load_mode == "copy":
            raise runner.RunFailedError("out of memory")
        return gpu.execute(run)

    benchmark = runner.Benchmark(options("cpu_experts"), execute)
    benchmark.run()
    assert benchmark.outcome.winners["cpu_experts"].label == "cpu_experts, mmap, 2 threads"
    assert benchmark.outcome.failures == ["out of memory"]


def test_an_interrupt_keeps_what_has_finished(gpu: FakeGpu) -> None:
    def execute(run: Run) -> dict[str, Any]:
        if len(gpu.runs) == 2:
            raise KeyboardInterrupt
        return gpu.execute(run)

    benchmark = runner.Benchmark(options("cpu_experts"), execute)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    assert len(benchmark.outcome.measured) == 2


@pytest.fixture
def rows(gpu: FakeGpu) -> list[summary.Row]:
    benchmark = runner.Benchmark(options("cpu_experts", Mode("layers", 40), "hot_experts"), gpu.execute)
    benchmark.run()
    return summary.rows(benchmark.outcome.measured, {r.label for r in benchmark.outcome.winners.values()}, 100.0)


def test_what_was_measured_once_has_no_spread(rows: list[summary.Row]) -> None:
    for row in rows:
        assert (row["stddev_ts"] is None) == (row["stddev_ns"] is None) == (row["repetitions"] == 1)


def test_disturbed_measurements_are_counted_and_warned_of(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    def execute(run: Run) -> dict[str, Any]:
        answer = gpu.execute(run)
        if (run.n_threads, run.repetition) in ((1, 0), (2, 1)):
            answer["disturbance"] = "other programs were busy"
        return answer

    benchmark = runner.Benchmark(options("cpu_experts", load_modes=("copy",)), execute)
    benchmark.run()
    made = cli_bench.rows_of(benchmark.outcome, None)
    assert {(row["n_threads"], row["repetitions"], row["disturbed"]) for row in made} == {(1, 1, 1), (2, 3, 1)}
    cli_bench.warn_of_competition(benchmark.outcome)
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 4 measurements were disturbed; measure again. cpu_experts, copy, 1 thread: other programs were busy"
    ]
    caplog.clear()
    cli_bench.warn_of_competition(runner.Outcome(measured=benchmark.outcome.measured[-1:]))
    assert not caplog.records


def test_rows_have_medians_and_ratios(rows: list[summary.Row]) -> None:
    best = {(r["offload_mode"].split(":")[0], r["test"]): r for r in rows if r["best"]}
    assert best["cpu_experts", "pp64"]["median_ts"] == pytest.approx(128)
    cold, warm = best["cpu_experts", "tg64 cold"], best["cpu_experts", "tg16 warm"]
    assert (cold["median_ts"], warm["median_ts"]) == (pytest.approx(50), pytest.approx(100))
    assert cold["repetitions"] == 3
    assert (cold["p50_ms"], cold["ratio_cpu_experts"]) == (pytest.approx(20), pytest.approx(1))
    hot = best["hot_experts", "tg16 warm"]
    assert hot["ratio_cpu_experts"] == pytest.approx(2.5)
    assert hot["ratio_layers"] == pytest.approx(2.25)
    assert hot["hit_rate"] == 0.5
    assert best["hot_experts", "tg64 cold"]["hit_rate"] == 0.25
    assert best["cpu_experts", "pp64"]["ttft_ms"] == pytest.approx(520)


def test_repacked_weights_are_a_variant_of_what_the_cpu_computes(gpu: FakeGpu) -> None:
    gpu.repacked = 1
    given = options(
        "cpu_experts", "hot_experts", "full_gpu", load_modes=("copy", "repack"), threads=(2,), repetitions=1
    )
    benchmark = runner.Benchmark(given, gpu.execute)
    benchmark.run()
    assert {(r.mode.name, r.load_mode) for r in gpu.runs} == {
        ("cpu_experts", "copy"),
        ("cpu_experts", "repack"),
        ("hot_experts", "copy"),
        ("full_gpu", "copy"),
    }
    assert benchmark.outcome.winners["cpu_experts"].load_mode == "repack"
    made = summary.rows(benchmark.outcome.measured, {r.label for r in benchmark.outcome.winners.values()})
    hot = {row["test"]: row for row in made if row["slots"] and row["best"]}
    assert hot["tg16 warm"]["ratio_cpu_experts"] == pytest.approx(0.0095 / 0.004)
    assert hot["pp64"]["ratio_cpu_experts"] == pytest.approx(1)  # of copy, which reads prompts faster


def test_repacking_is_left_out_where_nothing_can_be_repacked(gpu: FakeGpu) -> None:
    runner.Benchmark(options("cpu_experts", load_modes=("copy", "repack"), repetitions=1), gpu.execute).run()
    assert {r.load_mode for r in gpu.runs} == {"copy"}


def machine_file(folder: Path, **parts: dict[str, float]) -> str:
    path = folder / "machine.jsonl"
    lines = [{"part": "reads", "gb_per_second": {"1": 500.0}}]
    lines.append({"part": "reads_and_dma", **{f"{name}_gb_per_second": rates for name, rates in parts.items()}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_bound_is_the_gpu_part_and_the_cold_bytes(gpu: FakeGpu, tmp_path: Path) -> None:
    bandwidth = bound.cold_bandwidth(
        machine_file(tmp_path, reads={"1": 20, "8": 70, "16": 65}, dma={"1": 50, "8": 50, "16": 20})
    )
    assert bandwidth == 120
    benchmark = runner.Benchmark(
        options("cpu_experts", Mode("layers", 24), Mode("hot_experts", 8), "full_gpu"), gpu.execute
    )
    benchmark.run()
    winners = {r.label for r in benchmark.outcome.winners.values()}
    made = summary.rows(benchmark.outcome.measured, winners, bandwidth)
    hot = {row["test"]: row for row in made if row["slots"] and row["best"]}
    warm, cold = hot["tg16 warm"], hot["tg64 cold"]
    assert (warm["cold_bytes_per_token"], cold["cold_bytes_per_token"]) == (240_000_000, 360_000_000)
    assert (warm["bound_gpu_ms"], warm["bound_gpu_from"]) == (pytest.approx(2), "full_gpu")
    assert warm["bound_ms"] == pytest.approx(2 + 240 / 120)
    assert warm["over_bound"] == pytest.approx(4 / 4)
    assert cold["bound_ms"] == pytest.approx(4 + 360 / 120)  # of the cold tokens of full_gpu, which take twice as long
    assert cold["over_bound"] == pytest.approx(8 / 7)
    assert hot["pp64"]["bound_ms"] is None
    assert {row["over_bound"] for row in made if not row["slots"]} == {None}
    assert "/ bound" in output.markdown(made)
    without = summary.rows(benchmark.outcome.measured, winners)
    assert {row["bound_ms"] for row in without} == {row["over_bound"] for row in without} == {None}
    assert "bound" not in output.markdown(without)


def test_the_gpu_part_is_predicted_from_the_layers_if_the_model_does_not_fit(gpu: FakeGpu) -> None:
    def predicted(*modes: Mode | str) -> tuple[float | None, str | None]:
        benchmark = runner.Benchmark(options(*modes, threads=(2,), load_modes=("copy",), repetitions=1), gpu.execute)
        benchmark.run()
        made = summary.rows(benchmark.outcome.measured, {r.label for r in benchmark.outcome.winners.values()}, 100.0)
        return next(
            (row["bound_gpu_ms"], row["bound_gpu_from"]) for row in made if row["test"] == "tg16 warm" and row["slots"]
        )

    hot = Mode("hot_experts", 8)
    # 10 ms with 48 layers' experts in RAM, 9 ms with those of 42 of them: 2 ms with none
    assert predicted("cpu_experts", Mode("layers", 42), hot) == (pytest.approx(2), "layers")
    # 9 ms with 8: 8.8 ms with none, but the cache takes 4
    assert predicted("cpu_experts", Mode("layers", 8), hot) == (None, None)
    assert predicted("cpu_experts", hot) == (None, None)
    assert predicted(Mode("layers", 40), hot) == (None, None)
    # 10 ms, and 9 ms with 47: no time is left for the GPU
    assert predicted("cpu_experts", Mode("layers", 47), hot) == (None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the machine's figures"),
        ("no JSON", "is not what benchmarks/microbench/machine.py prints"),
        ("[1]", "is not what benchmarks/microbench/machine.py prints"),
        ('{"part": "reads_and_dma"}', "is not what benchmarks/microbench/machine.py prints"),
        ('{"part": "dma"}', "has no line of the part reads_and_dma"),
        ("[" * 100_000, "is not what benchmarks/microbench/machine.py prints"),
        *(
            (
                '{"part": "reads_and_dma", "reads_gb_per_second": {"1": R}, "dma_gb_per_second": {"1": 1}}'.replace(
                    "R", rate
                ),
                "is not what benchmarks/microbench/machine.py prints",
            )
            for rate in ("0", "-4.0", "NaN", "Infinity", "true", '"5"', "1" + 400 * "0")
        ),
    ],
    ids=range(13),
)
def test_a_file_without_the_machines_figures_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(phx.ConfigError, match=message):
        bound.cold_bandwidth(str(path))


def as_text(value: Any) -> str:
    return "" if value is None else str(value)


READERS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "json": json.loads,
    "jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    "csv": lambda text: list(csv.DictReader(io.StringIO(text))),
}


@pytest.mark.parametrize("kind", READERS)
def test_formats_are_read_back(rows: list[summary.Row], kind: str) -> None:
    rows[0]["model_filename"] = 'it\'s "odd", really.gguf'
    back = READERS[kind](output.FORMATS[kind](rows))
    expected = [{k: as_text(v) for k, v in row.items()} for row in rows] if kind == "csv" else rows
    assert back == expected


def test_sql_is_read_back(rows: list[summary.Row]) -> None:
    rows[0]["model_filename"] = 'it\'s "odd"; DROP TABLE pyhotexperts_bench;.gguf'
    database = sqlite3.connect(":memory:")
    database.executescript(output.sql(rows))
    database.row_factory = sqlite3.Row
    back = [dict(row) for row in database.execute("SELECT * FROM pyhotexperts_bench")]
    database.close()
    assert back == [{k: int(v) if isinstance(v, bool) else v for k, v in row.items()} for row in rows]


def test_the_table_has_a_line_for_each_row(rows: list[summary.Row]) -> None:
    lines = output.markdown(rows).splitlines()
    assert lines[:2] == ["m.gguf:", ""]
    assert len(lines) == len(rows) + 4
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_nothing_gives_nothing() -> None:
    assert [output.FORMATS[kind]([]).strip() for kind in ("csv", "json", "jsonl", "sql")] == ["", "[]", "", ""]


def test_a_run_travels_as_json() -> None:
    assert Run.from_json(BASE.to_json()) == BASE


def test_several_budgets_are_compared_each_with_its_own_layers(gpu: FakeGpu) -> None:
    budgets = (1200 * MIB, 2000 * MIB)
    given = options("cpu_experts", "layers", "hot_experts", vram_budgets=budgets, repetitions=1)
    benchmark = runner.Benchmark(given, gpu.execute)
    benchmark.run()
    made = summary.rows(benchmark.outcome.measured, {r.label for r in benchmark.outcome.winners.values()})
    hot = [row for row in made if row["best"] and row["slots"] and row["test"] == "tg16 warm"]
    assert [row["vram_budget_mib"] for row in hot] == [1200, 2000]
    assert hot[0]["slots"] < hot[1]["slots"]
    assert all(row["ratio_layers"] == pytest.approx(2.25) for row in hot)
    assert len([row for row in made if row["best"] and row["offload_mode"] == "cpu_experts"]) == 3
    lines = plot.points(made)
    assert [len(lines[mode]) for mode in ("cpu_experts", "layers", "hot_experts")] == [1, 2, 2]
    assert plot.hit_rates(made) == [(row["slots"], 100 * row["hit_rate"]) for row in hot]


def test_the_picture_is_drawn(rows: list[summary.Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    picture.check(path, "--plot")
    plot.draw(rows, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "message"), [("speed.jpg", "must name a PNG"), ("no/folder/x.png", "does not exist")])
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(name: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(phx.ConfigError, match=message):
        picture.check(tmp_path / name, "--plot")
