"""What ``pyhotexperts demo --watch`` shows: the text as it comes, the speed, the cache, and which experts were used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhotexperts.cache import CacheStatus
from pyhotexperts.cli.generate import about
from pyhotexperts.errors import UnavailableError
from pyhotexperts.generation import Stream
from pyhotexperts.results import Generation, Routing

MAX_ROWS = 24  # of the heat map: layers
MAX_COLUMNS = 64  # experts
DENSITIES = " ░▒▓█"
COLD, HOT = (24, 28, 48), (255, 176, 32)  # RGB of an expert that was never used, and of the one used most


class Watch:
    """A live view in the terminal, while it is open as a context manager.

    Raises
    ------
    UnavailableError
        If rich is not installed.
    """

    def __init__(self) -> None:
        try:
            from rich.live import Live
        except ImportError as e:
            raise UnavailableError(f'--watch needs rich: pip install "pyhotexperts[watch]" ({e})') from None
        self._live = Live(auto_refresh=False)
        self._prompt = self._text = self._line = ""
        self._counts: npt.NDArray[np.int64] | None = None
        self._layers: Sequence[int] = ()

    def __enter__(self) -> Watch:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if not self._live.console.is_terminal:
            self._live.console.print()  # rich ends the last line in a terminal alone

    def show(self, prompt: str, stream: Stream, cache: Any) -> Generation:
        """Show a generation as it comes; `cache` is asked for its state. Returns the result."""
        self._prompt, self._text = prompt, ""
        n_tokens = 0
        seconds = 0.0  # without those of drawing
        with stream:
            begin = time.perf_counter()
            for chunk in stream:
                if n_tokens > 0:  # the first token belongs to the prompt
                    seconds += time.perf_counter() - begin
                n_tokens += len(chunk.tokens)
                self._text += chunk.text
                self._line = state(n_tokens, seconds, cache.status)
                self.refresh()
                begin = time.perf_counter()
            return stream.result

    def add_routing(self, routing: Routing) -> None:
        """Add the experts that a text used to the heat map."""
        counts = routing.counts()
        self._counts = counts if self._counts is None else self._counts + counts
        self._layers = routing.layers
        self.refresh()

    def refresh(self) -> None:
        """Draw everything."""
        self._live.update(self.view(), refresh=True)

    def view(self) -> Any:
        """The whole picture, for rich."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        parts: list[Any] = [Panel(Text.assemble((self._prompt, "bold"), self._text), height=14), Text(self._line)]
        if self._counts is not None:
            parts.append(heat_map(self._counts, self._layers, has_shades(self._live.console)))
        return Group(*parts)


def has_shades(console: Any) -> bool:
    """Whether a terminal, as rich's console knows it, shows enough colours to tell how bright a block is."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def state(n_tokens: int, seconds: float, cache: CacheStatus) -> str:
    """One line: how much, how fast, how often the cache hits."""
    speed = f"{(n_tokens - 1) / seconds:.1f} tokens/s" if n_tokens > 1 and seconds > 0 else "..."
    return f"{n_tokens} tokens | {speed}{about(cache)}"


def heat_map(counts: npt.NDArray[np.int64], layers: Sequence[int], has_colours: bool = True) -> Any:
    """A row of blocks for each layer, the brighter the more an expert was used; neighbours share a block if needed.

    Parameters
    ----------
    counts
        int64[n_layers, n_expert]: uses of each expert.
    layers
        Numbers of the layers.
    has_colours
        False: blocks of several densities instead.
    """
    from rich.text import Text

    text = Text()
    rows = np.linspace(0, len(layers) - 1, min(MAX_ROWS, len(layers))).round().astype(int)
    for row in rows.tolist():
        blocks = np.array([part.sum() for part in np.array_split(counts[row], min(MAX_COLUMNS, counts.shape[1]))])
        text.append(f"layer {layers[row]:>3} ")
        for share in blocks / max(1, blocks.max()):
            red, green, blue = (round(c + (h - c) * share) for c, h in zip(COLD, HOT, strict=True))
            block = "█" if has_colours else DENSITIES[round(share * (len(DENSITIES) - 1))]
            text.append(block, style=f"rgb({red},{green},{blue})")
        text.append("\n")
    more = "brighter" if has_colours else "denser"
    text.append(f"{counts.shape[1]} experts per layer, from left to right; {more} = used more in these texts")
    return text
