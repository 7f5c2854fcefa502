"""The picture of `pyhotexperts demo --watch`."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts.cli.watch import COLD, HOT, Watch, has_shades, heat_map, state


def colours(counts: list[list[int]], layers: list[int]) -> list[list[str]]:
    """The colours of the blocks, row by row."""
    text = heat_map(np.array(counts), layers)
    rows: list[list[str]] = [[] for _ in text.plain.split("\n")]
    for span in text.spans:
        rows[text.plain[: span.start].count("\n")].append(str(span.style))
    return rows[:-1]


def test_the_hottest_expert_of_each_layer_is_brightest() -> None:
    rgb = [f"rgb({r},{g},{b})" for r, g, b in (COLD, HOT)]
    rows = colours([[0, 3, 9], [4, 0, 0]], [2, 5])
    assert (rows[0][0], rows[0][2]) == (rgb[0], rgb[1])
    assert rows[0][1] not in rgb
    assert rows[1] == [rgb[1], rgb[0], rgb[0]]


def test_many_experts_and_layers_share_what_room_there_is() -> None:
    counts = np.zeros((60, 256), int)
    counts[:, 255] = 1
    rows = colours(counts.tolist(), list(range(60)))
    assert len(rows) == 24
    assert all(len(row) == 64 for row in rows)
    assert all(row[-1] == f"rgb({HOT[0]},{HOT[1]},{HOT[2]})" for row in rows)
    plain = heat_map(counts, list(range(60))).plain
    assert "layer   0 " in plain
    assert "layer  59 " in plain


def test_without_colours_blocks_are_denser() -> None:
    text = heat_map(np.array([[0, 5, 9]]), [2], has_colours=False).plain
    assert "layer   2  ▒█" in text
    assert "denser = used more" in text


@pytest.mark.parametrize(
    ("terminal", "shades"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "vt100"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_terminals_that_show_shades(terminal: dict[str, str], shades: bool) -> None:
    console = pytest.importorskip("rich.console")
    assert has_shades(console.Console(force_terminal=True, _environ=terminal)) == shades


def test_nothing_used_is_dark() -> None:
    assert set(colours([[0, 0]], [0])[0]) == {f"rgb({COLD[0]},{COLD[1]},{COLD[2]})"}


def test_the_line_below_the_text(shared_model: phx.Model) -> None:
    status = shared_model.cache.status
    assert state(1, 0.0, status) == "1 tokens | ..."
    assert state(11, 2.0, status) == "11 tokens | 5.0 tokens/s"


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(phx.UnavailableError, match=r"pip install .pyhotexperts\[watch\]"):
        Watch()
