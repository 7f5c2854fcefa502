"""Models of the Hugging Face Hub, downloaded by the library huggingface_hub into its cache (extra ``hf``)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyhotexperts import _ffi
from pyhotexperts.errors import ConfigError, ModelNotFoundError, UnavailableError
from pyhotexperts.shards import NAME

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # the first one that a repository has, else its first model

# GGUF files that are no models: projectors, importance matrices, adapters.
NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix|lora)([-._/]|$)", re.IGNORECASE)


def split_name(name: object) -> tuple[str, str | None]:
    """Repository and quantisation of ``user/model`` or ``user/model:quant``."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name, re.ASCII):
        raise ConfigError(f'the repository must be "user/model" or "user/model:quant", not {name!r:.80}')
    repo, _, quant = name.partition(":")
    return repo, quant or None


def choose(files: Sequence[str], quant: str | None, filename: str | None, repo: str) -> list[str]:
    """The files of one model among those of a repository: all shards, the first one first.

    Raises
    ------
    ModelNotFoundError
        If there is none; the message lists what there is.
    """
    models = sorted(f for f in files if f.endswith(".gguf") and not NO_MODEL.search(f))
    if not models:
        raise ModelNotFoundError(f"{repo} has no model in GGUF format: look for a repository with GGUF in its name")
    if filename is not None:
        found = [f for f in models if f == filename]  # projectors and the like are no models
    elif quant is not None:
        found = _of_quant(models, quant)
    else:
        found = next((f for q in DEFAULT_QUANTS if (f := _of_quant(models, q))), models)
    if not found:
        names = ", ".join(models[:20]) + (", ..." if len(models) > 20 else "")
        raise ModelNotFoundError(f"{repo} has no {filename or quant}: it has {names}")
    chosen = min(found, key=lambda f: (len(f), f))  # without prefixes such as "UD-"
    shard = NAME.fullmatch(chosen)
    if shard is None:
        return [chosen]
    return [f"{shard['prefix']}-{i + 1:05}-of-{shard['count']}.gguf" for i in range(int(shard["count"]))]


def _of_quant(models: Sequence[str], quant: str) -> list[str]:
    whole = re.compile(rf"(^|[-._/]){re.escape(quant)}([-./]|$)", re.IGNORECASE)  # Q4_K is not Q4_K_M
    return [f for f in models if whole.search(f)]


def download(
    name: str,
    *,
    filename: str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    endpoint: str | None = None,
) -> Path:
    """The local path of a model of the Hub, downloaded if it is not there yet. An interrupted download is resumed.

    Without a network, or with `local_files_only`, a model that was downloaded before is found in the cache.

    Raises
    ------
    UnavailableError
        If huggingface_hub is not installed, the Hub cannot be reached, or it refuses access.
    ModelNotFoundError
        If there is no such repository, revision or file.
    ConfigError
        If the name is none of a repository.
    """
    repo, quant = split_name(name)
    try:
        import huggingface_hub as hf
    except ImportError as e:
        raise UnavailableError(
            f'models of the Hugging Face Hub need huggingface_hub: pip install "pyhotexperts[hf]" ({e})'
        ) from None
    place: dict[str, Any] = {"cache_dir": cache_dir, "revision": revision}
    if not local_files_only:
        try:
            info = hf.HfApi(endpoint=endpoint, token=token).model_info(repo, revision=revision, timeout=20)
            wanted = choose([s.rfilename for s in info.siblings or []], quant, filename, repo)
            paths = [hf.hf_hub_download(repo, f, endpoint=endpoint, token=token, **place) for f in wanted]
            return Path(paths[0])
        except ModelNotFoundError:
            raise
        except Exception as e:
            _raise_if_final(e, repo, revision)
            reason = f"the Hugging Face Hub cannot be reached ({_one_line(e)})"
    else:
        reason = "local_files_only is set"
    try:
        folder = Path(hf.snapshot_download(repo, local_files_only=True, **place))
    except Exception as e:
        raise UnavailableError(f"{reason}, and {repo} is not in the cache: connect to the network once") from e
    cached = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    wanted = choose(cached, quant, filename, f"{reason}; of {repo}, the cache")
    _ffi.logger.warning("%s: using the cached %s", reason, folder / wanted[0])
    return folder / wanted[0]


def _raise_if_final(error: Exception, repo: str, revision: str | None) -> None:
    """Raise our exception for an answer of the Hub that the cache cannot replace."""
    from huggingface_hub import errors as hf_errors

    if isinstance(error, hf_errors.GatedRepoError):
        raise UnavailableError(f"{repo} is gated: ask for access on its page, then run `hf auth login`") from error
    if isinstance(error, hf_errors.RepositoryNotFoundError):
        raise ModelNotFoundError(
            f"the Hub has no {repo}, or it is private: check the name, or run `hf auth login`"
        ) from error
    if isinstance(error, hf_errors.RevisionNotFoundError):
        raise ModelNotFoundError(f"{repo} has no revision {revision}") from error
    if isinstance(error, hf_errors.EntryNotFoundError) and not isinstance(error, hf_errors.LocalEntryNotFoundError):
        raise ModelNotFoundError(f"{repo} lacks a file of the model: {_one_line(error)}") from error
    if isinstance(error, hf_errors.HFValidationError):
        raise ConfigError(f"{repo} is no name of a repository: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
