"""Loading a model file: checks that need no native code, progress, and stopping with Ctrl-C."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pyhotexperts import _ffi
from pyhotexperts.errors import (
    ConfigError,
    LoadCancelledError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from pyhotexperts.placement import Placement
from pyhotexperts.results import ModelInfo

ProgressCallback = Callable[[float], object]

POLL_SECONDS = 0.05


def embedded_model() -> Path:
    """The small mixture-of-experts model that is part of the package (its card: data/SOURCES.md)."""
    return Path(__file__).parent / "data" / "tinymoe-q4_k_m.gguf"


def check_file(path: str | os.PathLike[str] | None) -> str:
    """The path of a file that may be a GGUF; None is the embedded model.

    Raises
    ------
    ModelNotFoundError, ModelLoadError
        If it is missing, a folder, empty, unreadable or not a GGUF.
    """
    if path is None:
        path = embedded_model()
    try:
        name = os.path.expanduser(os.fsdecode(os.fspath(path)))
    except TypeError:
        raise ConfigError(f"path must be a path to a GGUF file, not {path!r}") from None
    if "\0" in name:
        raise ConfigError(f"path must not contain a zero byte: {name!r}")
    try:
        # without waiting for somebody to write into a FIFO
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ModelLoadError(f"{name} is no regular file: give the path of a GGUF model")
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {name or '(empty path)'}: give the path of a GGUF model") from None
    except IsADirectoryError:
        raise ModelLoadError(f"{name} is a folder: give the path of a GGUF file in it") from None
    except OSError as e:
        raise ModelLoadError(f"cannot read {name}: {e.strerror}") from e
    except ValueError:
        raise ConfigError(f"path is not a name that a file can have: {name!r}") from None
    if not magic:
        raise ModelLoadError(f"{name} is empty: download or copy the model again")
    if magic != b"GGUF":
        raise ModelLoadError(f"{name} is no GGUF file (it begins with {magic!r}): give a model in GGUF format")
    return name


def load(placement: Placement, progress: ProgressCallback | bool | None) -> tuple[Any, ModelInfo]:
    """Load the model of a placement; returns the native handle and the model's facts.

    The native call runs in a thread of its own, so that this one can show progress and be interrupted; an
    exception here (Ctrl-C, or one of the callback) stops the load and is raised when the thread has ended.
    """
    ffi, lib = _ffi.ffi, _ffi.lib
    path = placement.request.path
    state = ffi.new("phx_progress *")
    out = ffi.new("phx_model **")
    failure: list[Exception] = []

    def work() -> None:
        params = placement.request.model_params(placement.offload)
        try:
            _ffi.check(lib.phx_model_load(os.fsencode(path), params, state, out), f"cannot load {path}")
        except Exception as e:
            failure.append(e)

    thread = threading.Thread(target=work, name="pyhotexperts-load", daemon=True)
    try:
        with _reporter(progress, Path(path).name) as report:
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                report(state.fraction)
            if not failure:
                report(1.0)
    except BaseException as e:  # Ctrl-C, or an exception of the callback
        state.cancel = 1
        _wait(thread)
        lib.phx_model_free(out[0])
        if isinstance(e, RuntimeError) and thread.ident is None:
            raise OutOfMemoryError(f"cannot load {path}: {e}; the system gives this process no more threads") from e
        raise
    if failure:
        if isinstance(failure[0], LoadCancelledError):
            raise LoadCancelledError(f"loading {path} was stopped") from failure[0]
        raise failure[0]
    info = _ffi.ffi.new("phx_model_info *")
    _ffi.check(lib.phx_model_get_info(out[0], info), f"cannot read the facts of {path}")
    if info.has_encoder or not info.has_decoder or info.n_vocab < 1:
        lib.phx_model_free(out[0])
        raise UnavailableError(f"{path} ({_ffi.text_of(info.architecture)}) generates no text")
    return out[0], _model_info(info)


def _wait(thread: threading.Thread) -> None:
    """Wait for the thread to end, whatever Ctrl-C says: it writes to memory that is about to be freed."""
    while thread.is_alive():
        with suppress(BaseException):
            thread.join(POLL_SECONDS)


def _model_info(info: Any) -> ModelInfo:
    return ModelInfo(
        architecture=_ffi.text_of(info.architecture),
        description=_ffi.text_of(info.description),
        n_params=info.n_params,
        size=info.size,
        n_layer=info.n_layer,
        n_embd=info.n_embd,
        n_embd_out=info.n_embd_out,
        n_vocab=info.n_vocab,
        n_ctx_train=info.n_ctx_train,
        n_expert=info.n_expert,
        n_expert_used=info.n_expert_used,
        expert_bytes=info.expert_bytes,
        expert_bytes_in_ram=info.expert_bytes_in_ram,
        has_vocab=bool(info.has_vocab),
        add_bos=bool(info.add_bos),
        token_bos=info.token_bos,
        token_eos=info.token_eos,
    )


@contextmanager
def _reporter(progress: ProgressCallback | bool | None, name: str) -> Iterator[ProgressCallback]:
    """Where the loaded fraction goes: the given callback, or a bar on stderr when that is a terminal."""
    if callable(progress):
        yield progress
        return
    if not (_is_watched() if progress is None else progress):
        yield lambda fraction: None
        return
    with tqdm(total=100, desc=f"loading {name}", unit="%", leave=False, file=sys.stderr) as bar:

        def show(fraction: float) -> None:
            bar.n = round(100 * fraction)
            bar.refresh()

        yield show


def _is_watched() -> bool:
    """Whether somebody sees stderr as it is written: in a terminal, or below the cell of a notebook."""
    try:
        return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False
