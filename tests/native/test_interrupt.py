"""Ctrl-C during load, prompt and generation: a clean KeyboardInterrupt, and the process stays usable."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pyhotexperts as phx

PROMPT = "The harbour lay quiet"


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    return timer


def again_and_again(call: Callable[[], object]) -> None:
    for _ in range(1000):
        call()


def test_during_generation(model: phx.Model) -> None:
    timer = interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        again_and_again(lambda: model.generate(PROMPT, temperature=1, top_k=0, top_p=1, min_p=0))
    timer.join()
    assert model.generate(PROMPT, temperature=0, max_tokens=3).tokens


def test_during_the_prompt(model: phx.Model) -> None:
    before = model.generate(PROMPT, temperature=0, max_tokens=3).tokens
    timer = interrupt_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        again_and_again(lambda: model.perplexity([7] * 2000, n_ctx=2000))
    timer.join()
    assert model.generate(PROMPT, temperature=0, max_tokens=3).tokens == before


def test_during_load() -> None:
    def interrupt(fraction: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs here

    with pytest.raises(KeyboardInterrupt):
        phx.Model(n_threads=1, progress=interrupt)
    with phx.Model(n_threads=1) as model:
        assert model.generate(PROMPT, max_tokens=1).tokens


def test_a_load_that_is_stopped_midway_is_freed(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    seen: list[float] = []

    def stop(fraction: float) -> None:
        seen.append(fraction)
        raise EnoughError

    for _ in range(3):
        with pytest.raises(EnoughError):
            phx.Model(n_threads=1, progress=stop, load_mode="copy")
    assert len(seen) == 3
    assert not [t for t in threading.enumerate() if t.name == "pyhotexperts-load"]


def test_progress_is_reported_up_to_the_end() -> None:
    seen: list[float] = []
    with phx.Model(n_threads=1, progress=seen.append):
        pass
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_command_ends_with_the_shells_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pyhotexperts", "generate", "-p", PROMPT, "--temp", "1.5", "--top-k", "0"]
    command += ["-t", "1", "--min-p", "0", "--top-p", "1"]
    for _ in range(20):  # a text may end before the signal comes
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(len(PROMPT) + 5)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        if process.returncode:
            break
    assert process.returncode == 130
    assert b"interrupted" in error
    assert b"Traceback" not in error
