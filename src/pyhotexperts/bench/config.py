"""What one process measures: a model, an offload mode, a workload. Travels to that process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyhotexperts import offload
from pyhotexperts.errors import ConfigError

SEGMENT = 1024  # consecutive ids that belong together in a geometry model (benchmarks/make_model.py)
COLD_TOKENS = 64  # generated tokens that count as cold
PARTS = {"cold": slice(None, COLD_TOKENS), "warm": slice(COLD_TOKENS, None)}  # of the generated tokens


@dataclass(frozen=True)
class Mode:
    """An offload mode: `name` is cpu_experts, layers, hot_experts or full_gpu; `value` its layers or slots."""

    name: str
    value: int = 0

    def offload(self) -> offload.Offload:
        """The mode as a value for `Model`."""
        if self.name == "layers":
            return offload.layers(self.value)
        if self.name == "hot_experts":
            return offload.hot_experts(slots=self.value, strict=True)
        return offload.cpu_experts() if self.name == "cpu_experts" else offload.full_gpu()

    def __str__(self) -> str:
        return f"{self.name}:{self.value}" if self.name in ("layers", "hot_experts") else self.name


@dataclass(frozen=True)
class Run:
    """One measurement."""

    model: str
    mode: Mode
    n_prompt: int
    n_gen: int
    n_depth: int  # tokens evaluated before the prompt, not timed
    n_batch: int
    n_ubatch: int
    n_threads: int
    load_mode: str
    type_k: str
    type_v: str
    flash_attn: str
    text: str | None  # file of real text; None = consecutive ids
    repetition: int
    warm_up: bool = True
    n_ctx: int = 0  # least tokens of context, 0 = those that the run needs
    vram_budget: int | None = None  # bytes that layers or slots were fitted to

    def to_json(self) -> str:
        """As text for `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Run:
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return Run(**{**fields, "mode": Mode(**fields["mode"])})

    @property
    def n_own(self) -> int:
        """Tokens of the run itself, without those to warm up with."""
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def label(self) -> str:
        """What is compared: everything but the repetition."""
        plural = "" if self.n_threads == 1 else "s"
        budget = "" if self.vram_budget is None else f", {self.vram_budget / 2**30:.4g} GiB"
        return f"{self.mode}, {self.load_mode}, {self.n_threads} thread{plural}{budget}"

    @property
    def load_options(self) -> dict[str, Any]:
        """How the model is loaded, as parameters of `Model`."""
        return {
            "n_ctx": max(self.n_ctx, self.n_own + 64),
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_threads": self.n_threads,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "flash_attn": self.flash_attn,
            "load_mode": self.load_mode,
        }

    def repeated(self, repetition: int) -> Run:
        """The same measurement on other tokens."""
        return replace(self, repetition=repetition)


def default_text() -> Path:
    """The text of several kinds that is part of the package, of our own writing."""
    return Path(__file__).parent.parent / "data" / "bench.txt"


def read_text(path: str) -> str:
    """A text file for the workload.

    Raises
    ------
    ConfigError
        If it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read the text {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text: {e}") from None
