"""The word about other programs that are busy at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyhotexperts import competition
from pyhotexperts.competition import Times, hint
from pyhotexperts.offload import cpu_experts, full_gpu

START = Times(10.0, 100.0, 5.0)


def after(seconds: float, busy: float, own: float) -> Times:
    return Times(START.clock + seconds, START.busy + busy, START.own + own)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


def test_one_of_two_processors_is_taken() -> None:
    text = hint(START, after(2.0, 4.0, 2.0), n_threads=2)
    assert text is not None
    assert "1.0 of 2 processors" in text
    assert "-t 1 may be many times faster" in text


@pytest.mark.parametrize(
    ("later", "n_threads"),
    [
        (after(1.0, 2.0, 2.0), 2),  # nobody else
        (after(1.0, 1.2, 1.0), 2),  # hardly anybody
        (after(1.0, 2.0, 1.0), 1),  # there is one for each thread
        (after(0.09, 0.18, 0.09), 2),  # too short to tell
        (None, 2),
    ],
)
def test_nothing_is_said_where_all_is_well(later: Times | None, n_threads: int) -> None:
    assert hint(START, later, n_threads) is None


def test_one_thread_cannot_become_fewer() -> None:
    text = hint(START, after(1.0, 2.0, 0.1), n_threads=1)
    assert text is not None
    assert "-t" not in text


def test_little_of_many_processors_is_not_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert hint(START, after(1.0, 63.8, 63.0), n_threads=64) is None
    text = hint(START, after(1.0, 64.0, 49.4), n_threads=64)
    assert text is not None
    assert "14.6 of 64 processors" in text
    assert "-t 49 may" in text


def test_what_the_system_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    line = "cpu{} 100 20 30 5000 7 3 2 5 0 0"
    stat.write_text("\n".join(line.format(i) for i in ("", 0, 1, 2)) + "\nctxt 1\n")
    monkeypatch.setattr(competition, "PROC_STAT", stat)
    now = competition.times()
    assert now is not None
    mine = os.times()
    assert 0 < now.own <= mine.user + mine.system < now.own + 1
    assert now.busy == pytest.approx(2 * 160 / os.sysconf("SC_CLK_TCK"))  # not processor 2, not idle or waiting
    stat.write_text("cpu0 1 2\n")
    assert competition.times() is None
    monkeypatch.setattr(competition, "PROC_STAT", tmp_path / "missing")
    assert competition.times() is None


def test_a_model_that_is_wholly_on_the_gpu_keeps_one_thread_busy() -> None:
    assert competition.busy_threads(full_gpu(), 8) == 1
    assert competition.busy_threads(cpu_experts(), 8) == 8
