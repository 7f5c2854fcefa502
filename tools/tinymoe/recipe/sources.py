"""Writes the table of sources, versions and licences from what the split counted."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import DOMAINS
from .packages import licence_of

_INTRODUCTION = """\
# Sources of the tinymoe training text

The model was trained from scratch on text taken from the following packages, all of them from Debian 12's
`main` section, CPython or PyPI, under free licences.
`prepare.py` holds the extraction, cleaning, deduplication and split. A small model trained for eleven passes
can repeat fragments of its sources, so treat its output as possibly derived from them.
"""

_CLOSING = """\
Documents longer than 20-40 kB were cut at blank lines before the split; exact duplicates and documents of
which more than half of the long lines had been seen were dropped; lines that recur in over 2 % of a source's
documents were removed as boilerplate.
Man pages were rendered with mandoc; HTML was reduced to its main text with selectolax; licence heads of
source files were cut. The Wesnoth, Naev and Crawl texts are dialogue and descriptions in reading order, with
their published translations.
"""


@dataclass
class _Source:
    documents: int = 0
    bytes: int = 0
    domains: set[str] = field(default_factory=set)


def version_of(source: str, work: Path) -> str:
    """Return where a source came from; FileNotFoundError if its package file is not in work/debs."""
    if source == "cpython-stdlib":
        return f"{platform.python_version()} (standard library)"
    if source.startswith("pypi:"):
        module = source.removeprefix("pypi:")
        distribution = {"bs4": "beautifulsoup4"}.get(module, module)
        return "PyPI " + importlib.metadata.version(distribution)
    files = glob.glob(f"{work}/debs/{source}_*.deb")
    if not files:
        raise FileNotFoundError(f"no {source}_*.deb in {work / 'debs'}: the version is read from its name")
    version = os.path.basename(files[0]).split("_")[1]
    return "Debian 12, " + version.replace("%3a", ":")


def _source_table(per_source: dict[str, list[int]], work: Path) -> list[str]:
    rows: dict[str, _Source] = {}
    for key, (documents, size) in per_source.items():
        domain, name = key.split("\t")
        row = rows.setdefault(name.split(" ")[0], _Source())
        row.documents += documents
        row.bytes += size
        row.domains.add(domain)
    lines = [
        "| source | version | domains | documents (training) | kB (training) | licence of the text |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: -item[1].bytes):
        domains = ", ".join(domain for domain in DOMAINS if domain in row.domains)
        lines.append(
            f"| {name} | {version_of(name, work)} | {domains} | {row.documents} | {row.bytes / 1000:.0f} "
            f"| {licence_of(name)} |"
        )
    documents = sum(row.documents for row in rows.values())
    size = sum(row.bytes for row in rows.values())
    return [*lines, "", f"Total: {documents} documents, {size / 1e6:.1f} MB."]


def _domain_table(stats: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| domain | documents | MB | held-out documents | held-out kB | val_<domain>.txt |",
        "|---|---|---|---|---|---|",
    ]
    for domain in DOMAINS:
        row = stats[domain]
        lines.append(
            f"| {domain} | {row['docs_train']} | {row['bytes_train'] / 1e6:.1f} | {row['docs_val']} "
            f"| {row['bytes_val'] / 1e3:.0f} "
            f"| {row['val_txt_docs']} documents, {row['val_txt_bytes'] / 1e3:.0f} kB |"
        )
    return lines


def write_sources(work: Path) -> None:
    """Read work/corpus/stats.json and write work/out/SOURCES.md."""
    with open(work / "corpus" / "stats.json", encoding="utf-8") as file:
        stats = json.load(file)
    sections = [
        _INTRODUCTION,
        "\n".join(_source_table(stats["per"], work)) + "\n",
        "## Domains\n",
        "\n".join(_domain_table(stats["stats"])) + "\n",
        _CLOSING,
    ]
    (work / "out" / "SOURCES.md").write_text("\n".join(sections), encoding="utf-8")
