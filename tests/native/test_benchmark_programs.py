"""The programs of benchmarks/ that are compiled on the spot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pyhotexperts as phx
from pyhotexperts import competition
from pyhotexperts.bench import child, runner
from pyhotexperts.bench.config import Mode, Run


def run(root: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benchmarks" / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def upstream(root: Path) -> None:
    if not (root / "vendor" / "llama.cpp" / "include" / "llama.h").is_file():
        pytest.skip("needs vendor/llama.cpp")


@pytest.mark.usefixtures("upstream")
def test_the_benchmark_and_a_c_loop_measure_the_same_thing(root: Path) -> None:
    """How well they agree is measured on a quiet machine, not here."""
    done = run(root, "agreement.py", "-t", "1", "-r", "1", "-p", "64", "-n", "96")
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout)
    assert figures["offload_mode"] == "cpu_experts"
    for part in ("prompt", "generated"):
        assert 0.2 < figures[part]["ratio"] < 5
        assert figures[part]["ratio"] == pytest.approx(
            figures[part]["bench_ts"][0] / figures[part]["loop_ts"][0], rel=1e-2
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modes", "full_gpu"), "full_gpu is not compared: take cpu_experts or layers:N"),
        (("--unpatched", "/nowhere"), "does not hold this package"),
        (("-m", "/nowhere.gguf"), "there is no file /nowhere.gguf"),
    ],
)
def test_what_cannot_be_compared_is_said(root: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(root, "agreement.py", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_another_build_is_measured_or_none(tmp_path: Path) -> None:
    """An editable installation is found before PYTHONPATH: the comparison would be one of this build with itself."""
    model = str(phx.embedded_model())
    measured = Run(model, Mode("cpu_experts"), 8, 1, 0, 8, 8, 1, "mmap", "f16", "f16", "on", None, 0, warm_up=False)
    assert runner.execute(measured)["package"] == str(Path(phx.__file__).resolve().parent)
    with pytest.raises(phx.ConfigError, match="Python took the package in"):
        runner.execute(measured, package=str(tmp_path))


def test_other_programs_are_looked_for_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def hint(before: competition.Times | None, after: competition.Times | None, n_threads: int) -> str:
        seen.append((before, after, n_threads))
        return "they were busy"

    monkeypatch.setattr(competition, "hint", hint)
    run = Run(str(phx.embedded_model()), Mode("cpu_experts"), 8, 4, 0, 8, 8, 2, "mmap", "f16", "f16", "on", None, 0)
    measured = child.measure(run)
    assert measured["disturbance"] == "they were busy"
    ((before, after, n_threads),) = seen
    assert n_threads == 2
    if before is not None and after is not None:  # the system tells
        assert after.clock - before.clock > measured["prompt_seconds"] + sum(measured["steps_seconds"])


def test_the_machines_bounds_need_a_cuda_compiler(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    done = run(root, "microbench/machine.py")
    assert done.returncode == 1
    assert "/nowhere/nvcc" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_machines_bounds_need_a_gpu(root: Path) -> None:
    if any(d.is_gpu for d in phx.devices()):
        pytest.skip("for a machine without a GPU")
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("needs a CUDA compiler")
    done = run(root, "microbench/machine.py", "--parts", "handover", "reads")
    assert (done.returncode, done.stdout) == (1, "")
    assert "all parts but reads need a GPU" in done.stderr
    reads = ["--parts", "reads", "--arch", "sm_90", "-t", "1", "--pages", "4k", "--mib", "64", "--interval", "10"]
    done = run(root, "microbench/machine.py", *reads)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gb_per_second"]["1"] > 0
