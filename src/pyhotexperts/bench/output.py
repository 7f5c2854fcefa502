"""Rows as text: a table for people, and formats that programs read back."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {  # of the table: field -> heading and how it is written
    "offload_mode": ("experts", str),
    "load_mode": ("load mode", str),
    "n_threads": ("threads", str),
    "vram_peak_mib": ("VRAM MiB", str),
    "test": ("test", str),
    "median_ts": ("tokens/s", lambda v: f"{v:.1f}"),
    "stddev_ts": ("±", lambda v: f"{v:.1f}"),
    "p95_ms": ("p95 ms", lambda v: f"{v:.1f}"),
    "ttft_ms": ("first token ms", lambda v: f"{v:.0f}"),
    "hit_rate": ("hits", lambda v: f"{v:.0%}"),
    "ratio_cpu_experts": ("/ cpu_experts", lambda v: f"{v:.2f}"),
    "ratio_layers": ("/ layers", lambda v: f"{v:.2f}"),
    "bound_ms": ("bound ms", lambda v: f"{v:.1f}"),
    "over_bound": ("/ bound", lambda v: f"{v:.2f}"),
    "best": ("best of mode", lambda v: "yes" if v else ""),
}


def markdown(rows: list[Row]) -> str:
    """A table of the fields that matter most, under the model's name; a column without any value is left out."""
    shown = [name for name in SHOWN if any(row[name] is not None for row in rows)]
    lines = [
        *dict.fromkeys(f"{row['model_filename']}:" for row in rows),
        "",
        "| " + " | ".join(SHOWN[name][0] for name in shown) + " |",
        "|" + "---|" * len(shown),
    ]
    for row in rows:
        cells = ["" if row[name] is None else SHOWN[name][1](row[name]) for name in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(rows: list[Row]) -> str:
    """One array."""
    return json.dumps(rows, indent=2) + "\n"


def json_lines(rows: list[Row]) -> str:
    """One object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def comma_separated(rows: list[Row]) -> str:
    """All fields, with a heading; None is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def sql(rows: list[Row]) -> str:
    """A table `pyhotexperts_bench` for SQLite."""
    if not rows:
        return ""
    kinds = {name: _sql_type([row[name] for row in rows]) for name in rows[0]}
    columns = ",\n".join(f"  {name} {kind}" for name, kind in kinds.items())
    lines = [f"CREATE TABLE IF NOT EXISTS pyhotexperts_bench (\n{columns}\n);"]
    for row in rows:
        values = ", ".join(_sql_value(row[name]) for name in kinds)
        lines.append(f"INSERT INTO pyhotexperts_bench ({', '.join(kinds)}) VALUES ({values});")
    return "\n".join(lines) + "\n"


def _sql_type(values: list[Any]) -> str:
    kinds = {type(v) for v in values if v is not None}
    return "TEXT" if str in kinds else "REAL" if float in kinds else "INTEGER"


def _sql_value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(int(value) if isinstance(value, bool) else value)


FORMATS: dict[str, Callable[[list[Row]], str]] = {
    "md": markdown,
    "csv": comma_separated,
    "json": as_json,
    "jsonl": json_lines,
    "sql": sql,
}
