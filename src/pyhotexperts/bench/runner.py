"""Decides what to run and runs it: the best configuration of each baseline, then all modes in turn at equal VRAM."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyhotexperts import machine, placement
from pyhotexperts.bench.config import Mode, Run
from pyhotexperts.errors import ConfigError, PyHotExpertsError
from pyhotexperts.model import load_request
from pyhotexperts.offload import HotExperts

MODES = ("cpu_experts", "layers", "hot_experts", "full_gpu")
TRIES = 4  # to find the number of slots

Execute = Callable[[Run], dict[str, Any]]
Report = Callable[[str], None]


class RunFailedError(PyHotExpertsError):
    """A benchmark process ended without a result."""


@dataclass(frozen=True)
class Options:
    """What to compare. `base` has the workload; its mode, threads and load mode are replaced."""

    base: Run
    modes: tuple[Mode | str, ...]  # a name alone: `layers` and `hot_experts` are fitted to the budget
    threads: tuple[int, ...]
    load_modes: tuple[str, ...]
    repetitions: int
    vram_budgets: tuple[int | None, ...] = (
        None,
    )  # bytes that `layers` and `hot_experts` are fitted to, None = what is free


@dataclass
class Outcome:
    """What was measured, and the best configuration of each mode: the one with the smallest median."""

    measured: list[tuple[Run, dict[str, Any]]] = field(default_factory=list)
    winners: dict[str, Run] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def key_of(mode: Mode | str, budget: int | None) -> str:
    """What a winner is the winner of."""
    return str(mode) if budget is None else f"{mode} in {budget}"


def execute(run: Run, package: str | None = None) -> dict[str, Any]:
    """Measure in a process of its own.

    Parameters
    ----------
    package
        A folder that holds another build of this package, which is to be measured; None = this one.

    Raises
    ------
    RunFailedError
        If the process ends without a result.
    ConfigError
        If it does not use the package in that folder.
    """
    command = [sys.executable, "-m", "pyhotexperts.bench.child", run.to_json()]
    env = None if package is None else {**os.environ, "PYTHONPATH": package}
    child = subprocess.run(command, capture_output=True, text=True, env=env)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise RunFailedError(f"{run.label}: {lines[-1]}")
    result: dict[str, Any] = json.loads(child.stdout)
    if package is not None and not Path(result["package"]).is_relative_to(Path(package).resolve()):
        raise ConfigError(
            f"{package} was to be measured, and Python took the package in {result['package']}: give the folder that "
            "holds the folder pyhotexperts, and use a Python without an editable installation, which would win"
        )
    return result


class Benchmark:
    """One comparison. `outcome` is complete for what has finished, also after an interrupt."""

    def __init__(self, options: Options, execute: Execute = execute, report: Report = lambda line: None) -> None:
        self.options = options
        self.outcome = Outcome()
        self._execute = execute
        self._report = report
        self._tried: dict[str, list[Run]] = {}  # all that might win, by key_of
        self._seconds: dict[str, list[float]] = {}  # of each repetition, by label; one that failed took for ever

    def run(self) -> None:
        """Measure everything: first each mode with its variants, then in turn what is fastest of each mode."""
        for mode in self.options.modes:
            fitted = mode in ("layers", "hot_experts")
            for budget in self.options.vram_budgets if fitted else (None,):
                self._first(mode, budget)
        turn = 0
        while runs := self._unfinished():
            turn += 1
            shift = turn % len(runs)
            for run in runs[shift:] + runs[:shift]:
                result = self._measure(run.repeated(self._n_done(run)))
                self._seconds[run.label].append(math.inf if result is None else _seconds_of(result))
                self._choose()

    def _unfinished(self) -> list[Run]:
        """Of what is fastest of each mode, what lacks repetitions; once, if two modes turned out to be the same."""
        leaders = {run.label: run for run in self.outcome.winners.values()}
        return [run for run in leaders.values() if self._n_done(run) < self.options.repetitions]

    def _n_done(self, run: Run) -> int:
        return len(self._seconds[run.label])

    def _choose(self) -> None:
        """The fastest of each mode so far: a first repetition that was lucky does not last."""
        self.outcome.winners = {key: self._fastest(runs) for key, runs in self._tried.items()}

    def _fastest(self, runs: list[Run]) -> Run:
        return min(runs, key=lambda run: statistics.median(self._seconds[run.label]))

    # ------------------------------------------------------------ first repetition

    def _first(self, mode: Mode | str, budget: int | None) -> None:
        """Run the mode with each load mode, then with the best of them and the other numbers of threads."""
        tried = self._try(mode, self._variants(mode, budget))
        if tried and mode != "full_gpu":  # threads do not matter there
            fastest = self._fastest(tried)
            tried += self._try(mode, [replace(fastest, n_threads=t) for t in self.options.threads[1:]])
        if tried:
            self._tried[key_of(mode, budget)] = tried
            self._choose()

    def _try(self, mode: Mode | str, runs: list[Run]) -> list[Run]:
        """Measure the runs; those that did not fail."""
        done: list[Run] = []
        for run in runs:
            if mode == "hot_experts":
                result = self._fitted(replace(run, mode=done[-1].mode) if done else run)
            else:
                result = self._measure(run)
            if result is not None:
                done.append(self.outcome.measured[-1][0])
                self._seconds.setdefault(done[-1].label, []).append(_seconds_of(result))
        return done

    def _variants(self, mode: Mode | str, budget: int | None) -> list[Run]:
        """The mode with each load mode and the first number of threads."""
        name = mode if isinstance(mode, str) else mode.name
        load_modes = self.options.load_modes
        if name in ("hot_experts", "full_gpu"):  # the CPU's own forms of weights are of no use to the GPU
            load_modes = tuple(lm for lm in load_modes if lm != "repack") or ("mmap",)
        if name == "full_gpu":  # nor does it matter how weights get there
            load_modes = load_modes[:1]
        fitted = mode if isinstance(mode, Mode) else Mode(name)
        base = replace(self.options.base, mode=fitted, vram_budget=budget, n_threads=self.options.threads[0])
        if mode == "full_gpu" and not self._fits(base):
            self._report("full_gpu: the model does not fit, left out")
            return []
        if mode == "layers":
            base = replace(base, mode=Mode("layers", self._layers_in_budget(base)))
        return self._possible([replace(base, load_mode=lm) for lm in load_modes])

    def _possible(self, runs: list[Run]) -> list[Run]:
        """All but those that repack weights, if nothing of the model can be repacked and there are others."""
        repacking = [run for run in runs if run.load_mode == "repack"]
        if len(repacking) in (0, len(runs)):
            return runs
        if placement.repacked(placement.plan(_request(repacking[0]), repacking[0].mode.offload())):
            return runs
        self._report(f"{repacking[0].mode}: nothing can be repacked for this processor, left out")
        return [run for run in runs if run.load_mode != "repack"]

    def _fits(self, run: Run) -> bool:
        return placement.fits_gpu(placement.plan(_request(run), run.mode.offload()))

    def _layers_in_budget(self, run: Run) -> int:
        """The fewest layers in RAM whose plan stays within the budget, or within what is free."""
        budget = run.vram_budget

        def fits(n_cpu_moe: int) -> bool:
            memory = placement.plan(_request(run), Mode("layers", n_cpu_moe).offload())
            if budget is None:
                return placement.fits_gpu(memory)
            return all(m.needed + placement.CUDA_OVERHEAD <= budget for m in memory if m.is_gpu and m.needed)

        low, high = 0, 512
        if not fits(high):
            raise ConfigError("the VRAM budget does not even hold the model without its experts: give a larger one")
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low

    def _fitted(self, run: Run) -> dict[str, Any] | None:
        """Run hot experts with as many slots as keep the peak within that of all `layers` rows, or within the budget.

        The slots of its mode are tried first, 0 = guess them.
        """
        layers = {other.label for other in self._tried.get(key_of("layers", run.vram_budget), ())}
        peaks = [r["vram_peak"] for other, r in self.outcome.measured if other.label in layers]
        limit = min(peaks) if peaks else run.vram_budget
        probe = replace(run, mode=Mode("hot_experts", 1))
        memory = placement.plan(_request(run), probe.mode.offload())
        slot = max((m.slot for m in memory), default=0)
        if not slot:
            self.outcome.failures.append("hot_experts: no layer on a GPU has routed experts in RAM")
            return None
        most = max(m.n_expert for m in memory)
        slots = run.mode.value or placement.slots_that_fit(memory, HotExperts())
        if limit is not None and not run.mode.value:  # a guess, to be corrected by what is measured
            room = limit - placement.CUDA_OVERHEAD - max(m.needed for m in memory if m.slot)
            slots = min(slots, max(1, room // slot))
        fitting: tuple[Run, dict[str, Any]] | None = None
        for _ in range(TRIES):
            if slots < 1:
                break
            result = self._measure(replace(run, mode=Mode("hot_experts", slots)))
            if limit is None or (result is None and fitting is None):
                return result
            if result is None:
                break
            measured = self.outcome.measured.pop()  # in the results only if nothing fits better
            more = (limit - result["vram_peak"]) // slot  # negative: it took too much
            if more >= 0 and (fitting is None or slots > fitting[0].mode.value):
                fitting = measured
            if 0 <= more <= slots // 50 or slots == most == min(most, slots + more):
                break
            slots = min(most, slots + more)
        if fitting is None:
            self.outcome.failures.append("hot_experts: the VRAM of the layers row has no room for one slot per layer")
            return None
        self.outcome.measured.append(fitting)
        return fitting[1]

    def _measure(self, run: Run) -> dict[str, Any] | None:
        self._report(f"{run.label}, repetition {run.repetition + 1} of {self.options.repetitions}")
        try:
            result = self._execute(run)
        except RunFailedError as e:
            self.outcome.failures.append(str(e))
            return None
        self.outcome.measured.append((run, result))
        return result


def _seconds_of(result: dict[str, Any]) -> float:
    """What decides which configuration is fastest: the time of generation, or of the prompt if nothing is generated."""
    return float(sum(result["steps_seconds"]) or result["prompt_seconds"])


def _request(run: Run) -> placement.LoadRequest:
    """What loading the run's model asks for."""
    return load_request(run.model, **run.load_options)


def default_threads() -> tuple[int, ...]:
    """The numbers of threads that are tried: all physical cores, and all but one."""
    cores = machine.default_threads()
    return (cores, cores - 1) if cores > 2 else (cores,)
