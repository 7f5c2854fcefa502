"""Pictures with matplotlib (extra ``plot``): what every one of them needs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from pyhotexperts.errors import ConfigError, UnavailableError


def check(path: str | os.PathLike[str], what: str) -> Path:
    """The path of a picture that can be drawn.

    Parameters
    ----------
    what
        Who draws, for the messages.

    Raises
    ------
    UnavailableError
        Without matplotlib.
    ConfigError
        If the file is no PNG or its folder is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(f'{what} needs matplotlib: pip install "pyhotexperts[plot]"')
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"{what} must name a PNG file, not {os.fspath(path)!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist")
    return Path(path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure that no window shows; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
