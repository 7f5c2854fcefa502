"""The only importer of the compiled part: `lib`, `ffi`, error checking, the native log.

The C API and its rules are in src/hotexperts/phx.h.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyhotexperts import errors

_native: Any = importlib.import_module("pyhotexperts._native")
ffi: Any = _native.ffi
lib: Any = _native.lib

logger = logging.getLogger("pyhotexperts")
logger.addHandler(logging.NullHandler())

# ggml's levels. Upstream is talkative: what it calls information is for debugging here.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}

_ERRORS: dict[int, type[errors.PyHotExpertsError]] = {
    lib.PHX_ERR_INVALID: errors.ConfigError,
    lib.PHX_ERR_LOAD: errors.ModelLoadError,
    lib.PHX_ERR_MEMORY: errors.OutOfMemoryError,
    lib.PHX_ERR_FULL: errors.ContextFullError,
    lib.PHX_ERR_DECODE: errors.DecodeError,
    lib.PHX_ERR_CANCELLED: errors.LoadCancelledError,
    lib.PHX_ERR_UNSUPPORTED: errors.UnavailableError,
    lib.PHX_ERR_BUFFER: errors.InternalError,
    lib.PHX_ERR_GRAMMAR: errors.GrammarError,
    lib.PHX_ERR_INTERNAL: errors.InternalError,
}

# What upstream says of a file that ends too early.
_SIGNS_OF_A_SHORT_FILE = ("gguf_init_from_reader: failed to read", "data is not within the file bounds")

# Functions that every other ggml and llama.cpp has, whatever its age; seen by the process only if global.
_FOREIGN_SYMBOLS = ("ggml_init", "llama_backend_init")

_init_lock = threading.RLock()  # re-entrant: a signal handler may ask for something meanwhile
_initialised = False
_forked = False  # this process is a child of one that had loaded the backends


def _after_fork() -> None:
    global _forked
    _forked = _initialised


os.register_at_fork(after_in_child=_after_fork)


def read_string(call: Callable[[Any, int], int]) -> str:
    """Text of a native function that fills a buffer and returns the full length in bytes."""
    cap = 1024
    while True:
        buf = ffi.new("char[]", cap)
        length: int = call(buf, cap)
        if length < cap:
            return bytes(ffi.buffer(buf, max(length, 0))).decode("utf-8", errors="replace")
        cap = length + 1


def text_of(chars: Any) -> str:
    """Text of a zero-terminated char array."""
    return str(ffi.string(chars).decode("utf-8", errors="replace"))


def drain_log() -> None:
    """Hand the native log's records to `logging.getLogger("pyhotexperts")`."""
    level = ffi.new("int32_t *")
    dropped = ffi.new("uint64_t *")
    buf = ffi.new("char[]", 2048)
    while lib.phx_log_next(level, buf, len(buf), dropped):
        if dropped[0]:
            logger.warning("%d log records of the native part were lost", dropped[0])
        logger.log(_LEVELS.get(level[0], logging.DEBUG), "%s", text_of(buf))


def error_of(status: int, doing: str) -> errors.PyHotExpertsError:
    """The exception for a failed native call; `doing` says what was tried."""
    reason = read_string(lib.phx_last_error) or "no reason was given"
    drain_log()
    kind = _ERRORS.get(status, errors.InternalError)
    if status == lib.PHX_ERR_INTERNAL:
        reason = f"the native code failed: {reason}"
    if status == lib.PHX_ERR_LOAD and any(sign in reason for sign in _SIGNS_OF_A_SHORT_FILE):
        reason = f"the file is incomplete or damaged: download or copy it again ({reason})"
    return kind(f"{doing}: {reason}")


def check(status: int, doing: str) -> None:
    """Raise the exception for a native status other than PHX_OK."""
    if status != lib.PHX_OK:
        raise error_of(status, doing)


def library_dir() -> Path:
    """The folder of the native libraries."""
    return Path(_native.__file__).parent / "lib"


def refuse_fork() -> None:
    """Raise NativeLibraryError in a forked child: the threads and the GPU of its parent do not exist in it."""
    if _forked:
        raise errors.NativeLibraryError(
            "this process was forked from one that had used pyhotexperts, whose threads it does not have: "
            'start it with multiprocessing.get_context("spawn"), or load models only after the fork'
        )


def refuse_foreign_ggml() -> None:
    """Raise NativeLibraryError if another ggml had global symbols before `init`: ours may be bound to it.

    Whatever calls a native function that needs no `init` has to call this first.
    """
    process = ctypes.CDLL(None)
    if not _initialised and any(hasattr(process, name) for name in _FOREIGN_SYMBOLS):
        raise errors.NativeLibraryError(
            "another library of this process has loaded ggml with global symbols (RTLD_GLOBAL), which would be "
            "mixed up with this package's own: load that library without RTLD_GLOBAL, or use separate processes"
        )


def init() -> None:
    """Load the compute backends, once per process.

    Raises
    ------
    NativeLibraryError
        If another copy of ggml was loaded with global symbols, which ours would then bind to.
    """
    global _initialised
    refuse_fork()
    with _init_lock:
        if _initialised:
            return
        refuse_foreign_ggml()
        check(lib.phx_init(str(library_dir()).encode()), "loading the compute backends")
        _initialised = True
    drain_log()


def build_info() -> dict[str, Any]:
    """What was built and what was loaded, as the native part reports it."""
    init()
    result: dict[str, Any] = json.loads(read_string(lib.phx_build_info))
    return result
