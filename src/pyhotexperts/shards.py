"""Models in several files, ``name-00001-of-00003.gguf`` and so on: any of them stands for all."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from pyhotexperts import _ffi, loading
from pyhotexperts.errors import ModelLoadError, ModelNotFoundError

NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Shard:
    """What a file says of its place in a model."""

    index: int  # from 0
    count: int  # files of the model
    n_tensors: int  # in this file
    n_tensors_all: int  # in all files


def read(path: str) -> Shard:
    """What a GGUF file says of its place in a model.

    Raises
    ------
    ModelLoadError
        If the file cannot be read, or is an adapter or a projector instead of a model.
    """
    _ffi.refuse_foreign_ggml()
    out = _ffi.ffi.new("phx_shard *")
    _ffi.check(_ffi.lib.phx_shard_read(os.fsencode(path), out), f"cannot load {path}")
    return Shard(out.index, out.count, out.n_tensors, out.n_tensors_all)


def first_shard(path: str) -> str:
    """The first file of the model that a file belongs to; all of them are there and belong together.

    Raises
    ------
    ModelNotFoundError
        If files are missing.
    ModelLoadError
        If a file is no part of this model.
    """
    shard = read(path)
    if shard.count <= 1:
        return path
    if not 0 <= shard.index < shard.count:
        raise ModelLoadError(f"{path} says that it is file {shard.index + 1} of {shard.count}: it is damaged")
    name = NAME.fullmatch(path)
    if name is None or (int(name["number"]), int(name["count"])) != (shard.index + 1, shard.count):
        end = _ending(shard.index, shard.count)
        raise ModelLoadError(f"{path} is file {shard.index + 1} of {shard.count}: its name must end with {end}")
    paths = [name["prefix"] + _ending(i, shard.count) for i in range(shard.count)]
    missing = [p for p in paths if not os.path.exists(p)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFoundError(
            f"of the model's {shard.count} files are missing: {', '.join(missing[:3])}{more}. Download them too"
        )
    _check_together(paths, shard)
    return paths[0]


def _check_together(paths: list[str], given: Shard) -> None:
    n_tensors = 0
    for i, path in enumerate(paths):
        loading.check_file(path)
        shard = read(path)
        if (shard.count, shard.n_tensors_all) == (given.count, given.n_tensors_all) and shard.index != i:
            raise ModelLoadError(
                f"{path} does not belong under this name: the file says that it is file {shard.index + 1}, not "
                f"{i + 1}, of {shard.count}. Download the one of this name again"
            )
        if (shard.index, shard.count, shard.n_tensors_all) != (i, given.count, given.n_tensors_all):
            raise ModelLoadError(
                f"{path} does not belong to the files beside it: it is file {shard.index + 1} of {shard.count} of a "
                f"model with {shard.n_tensors_all} tensors (theirs has {given.n_tensors_all}). Download it again"
            )
        n_tensors += shard.n_tensors
    if n_tensors != given.n_tensors_all:
        raise ModelLoadError(
            f"{paths[0]} and the other {given.count - 1} files hold {n_tensors} tensors, not {given.n_tensors_all}: "
            "they are not of the same model. Download them again"
        )


def _ending(index: int, count: int) -> str:
    return f"-{index + 1:05}-of-{count:05}.gguf"
