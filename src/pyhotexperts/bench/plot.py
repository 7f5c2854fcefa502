"""A picture of the results: generation speed against VRAM for every mode, and hit rate against slots."""

from __future__ import annotations

from pyhotexperts import picture
from pyhotexperts.bench.output import Row


def shown(rows: list[Row]) -> list[Row]:
    """The best rows of generation, warm where there are any."""
    generated = [row for row in rows if row["best"] and row["n_gen"]]
    return [row for row in generated if row["warm"]] or generated


def points(rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """For each mode (VRAM in GiB, tokens/s) of the rows shown, in order of VRAM."""
    result: dict[str, list[tuple[float, float]]] = {}
    for row in shown(rows):
        result.setdefault(row["offload_mode"].split(":")[0], []).append((row["vram_peak_mib"] / 1024, row["median_ts"]))
    return {mode: sorted(p) for mode, p in result.items()}


def hit_rates(rows: list[Row]) -> list[tuple[int, float]]:
    """(slots, hit rate in percent) of the rows shown that have them, in order of slots."""
    return sorted((row["slots"], 100 * row["hit_rate"]) for row in shown(rows) if row["slots"])


def draw(rows: list[Row], path: str) -> None:
    """Write the picture."""
    rates = hit_rates(rows)
    figure = picture.new_figure(11 if rates else 6, 4.5)
    axes = figure.subplots(1, 2 if rates else 1, squeeze=False)[0]
    for mode, line in points(rows).items():
        axes[0].plot(*zip(*line, strict=True), marker="o", label=mode)
    axes[0].set(xlabel="VRAM of the process, GiB", ylabel="generated tokens/s", title=rows[0]["model_filename"])
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlim(left=0)
    axes[0].legend()
    if rates:
        axes[1].plot(*zip(*rates, strict=True), marker="o")
        axes[1].set(xlabel="slots per layer", ylabel="hits, % of selections", ylim=(0, 100))
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
