"""The process around us: Ctrl-C at any instant, threads, fork, the end of the process, odd files and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pyhotexperts as phx


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    program = "import os, sys, threading, time\nimport pyhotexperts as phx\n" + code
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("call", ["reset", "logits", "generate", "stream"])
def test_ctrl_c_at_any_instant_leaves_the_model_usable(call: str, model: phx.Model) -> None:
    model.eval("a")
    calls = {
        "reset": model.reset,
        "logits": lambda: model.logits,
        "generate": lambda: model.generate("a", max_tokens=2),
        "stream": lambda: model.stream("a", max_tokens=2).close(),
    }
    interrupts = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i))
                while True:
                    if call == "logits":
                        model.eval("a") if model.n_past < 200 else model.reset()
                        if not model.n_past:
                            continue
                    calls[call]()
            except KeyboardInterrupt:
                interrupts += 1
            except phx.ConfigError:  # nothing was evaluated since an interrupted reset
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            model.reset()  # BusyError if the interrupt left the model claimed
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert interrupts > 300
    assert model.generate("a", max_tokens=1).tokens


def test_metadata_and_closing_in_other_threads() -> None:
    for _ in range(40):
        model = phx.Model(n_threads=1)
        unexpected: list[BaseException] = []

        def ask(model: phx.Model = model, unexpected: list[BaseException] = unexpected) -> None:
            try:
                while True:
                    model.metadata("general.architecture")
                    model.tokenize("some text")
                    _ = model.n_past
            except phx.ClosedError:
                pass
            except BaseException as e:
                unexpected.append(e)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        model.close()
        for thread in threads:
            thread.join()
        assert not unexpected


def test_a_daemon_thread_that_generates_does_not_crash_the_exit() -> None:
    code = """
model = phx.Model(n_threads=2)
def work():
    while True:
        model.generate("a" * 200, max_tokens=20)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(4):
        result = run(code)
        assert result.returncode == 0, result.stderr


def test_a_forked_child_is_told_so() -> None:
    result = run("""
model = phx.Model(n_threads=2)
model.generate("a", max_tokens=2)
if os.fork() == 0:
    for call in (lambda: model.generate("a"), lambda: phx.Model(), lambda: model.tokenize("a")):
        try:
            call()
        except phx.NativeLibraryError as e:
            print("spawn" in str(e), flush=True)
    os._exit(0)
os.wait()
print(len(model.generate("a", max_tokens=2).tokens))
""")
    assert result.stdout.split() == ["True", "True", "True", "2"], result.stderr


def test_a_signal_handler_may_use_the_vocabulary() -> None:
    result = run("""
import signal
model = phx.Model(n_threads=1)
done = []
signal.signal(signal.SIGALRM, lambda *a: done.append(model.tokenize("interrupted")))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.time() + 1
while time.time() < end:
    model.tokenize("some text " * 50)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(done) > 10)
""")
    assert result.stdout.strip() == "True", result.stderr


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    with pytest.raises(phx.ModelLoadError, match="no regular file"):
        phx.Model(fifo)


def test_no_standard_error_is_no_error() -> None:
    for change in ("sys.stderr = None", "sys.stderr.close()"):
        result = run(f"{change}\nprint(len(phx.Model(n_threads=1).generate('a', max_tokens=2).tokens))")
        assert result.stdout.strip() == "2"


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full", "<&-"])
def test_commands_without_a_usable_stream_say_so(redirection: str) -> None:
    arguments = "generate -t 1 -n 2" + ("" if redirection == "<&-" else " -p x")
    result = subprocess.run(
        f"{sys.executable} -m pyhotexperts {arguments} {redirection}", shell=True, capture_output=True, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.startswith(b"pyhotexperts: ")
    assert b"Traceback" not in result.stderr


def test_text_that_the_terminal_cannot_show_is_replaced() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, "-m", "pyhotexperts", "generate", "-p", "né", "-n", "2", "-t", "1"],
        capture_output=True,
        timeout=60,
        env=env,
    )
    assert result.returncode == 0
    assert result.stdout.startswith(b"n?")


def test_a_callback_that_fails_at_the_end_frees_the_model() -> None:
    result = run("""
import resource
def fail(fraction):
    if fraction == 1.0:
        raise ValueError
def load():
    try:
        phx.Model(n_threads=1, progress=fail, load_mode="copy")
    except ValueError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = [load() for _ in range(5)][-1]
print([load() for _ in range(20)][-1] - first)
""")
    assert int(result.stdout) < 60_000, result.stderr  # KiB; the model has 27,000


def test_a_model_is_not_copied() -> None:
    import copy
    import pickle

    with phx.Model(n_threads=1) as model:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                duplicate(model)


@pytest.mark.parametrize("n_ctx", [1, 100, 257, 300])
def test_odd_context_sizes_hold_what_they_say(n_ctx: int) -> None:
    with phx.Model(n_ctx=n_ctx, n_threads=1) as model:
        assert model.n_ctx >= n_ctx
        assert model.generate([5] * (model.n_ctx - 1), max_tokens=2, temperature=0).tokens
        assert len(model.score([5] * model.n_ctx).nll) == model.n_ctx - 1
