"""The collector of documents, and one reader per kind of source: manuals, dictionaries, quotations, books."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from . import DOMAINS
from .cleaning import chunks, clean, language_of, read_text
from .markup import html_text, man_text

_PER_DOCUMENT = 20  # short entries (quotations, descriptions) that make one document

_BIBLE_CHAPTERS = """
    Genesis:50 Exodus:40 Leviticus:27 Numbers:36 Deuteronomy:34 Joshua:24 Judges:21 Ruth:4 1Samuel:31
    2Samuel:24 1Kings:22 2Kings:25 1Chronicles:29 2Chronicles:36 Ezra:10 Nehemiah:13 Esther:10 Job:42
    Psalms:150 Proverbs:31 Ecclesiastes:12 Song:8 Isaiah:66 Jeremiah:52 Lamentations:5 Ezekiel:48 Daniel:12
    Hosea:14 Joel:3 Amos:9 Obadiah:1 Jonah:4 Micah:7 Nahum:3 Habakkuk:3 Zephaniah:3 Haggai:2 Zechariah:14
    Malachi:4 Matthew:28 Mark:16 Luke:24 John:21 Acts:28 Romans:16 1Corinthians:16 2Corinthians:13
    Galatians:6 Ephesians:6 Philippians:4 Colossians:4 1Thessalonians:5 2Thessalonians:3 1Timothy:6
    2Timothy:4 Titus:3 Philemon:1 Hebrews:13 James:5 1Peter:5 2Peter:3 1John:5 2John:1 3John:1 Jude:1
    Revelation:22
"""


class Document(NamedTuple):
    source: str  # package, for translations followed by " (language)"
    ident: str  # file, "#number" for a part of it
    text: str


class Collector:
    """Gathers documents by domain; too short ones and those in the wrong language are left out.

    Parameters
    ----------
    packages
        Folder that holds the unpacked packages, one folder each, named like the package.
    """

    def __init__(self, packages: str) -> None:
        self.packages = packages
        self.documents: dict[str, list[Document]] = {domain: [] for domain in DOMAINS}

    def add(self, domain: str, source: str, ident: str, text: str, min_chars: int = 200) -> None:
        text = text.strip("\n ")
        if len(text) < min_chars:
            return
        if domain in ("fr", "de", "es"):
            language, share = language_of(text)
            if language != domain or share < 0.04:
                return
        self.documents[domain].append(Document(source, ident.replace(self.packages + "/", ""), text))


def groups(entries: list[str]) -> Iterator[tuple[int, str]]:
    """Join short entries to texts of 20 entries; yields the number of the first one and the text."""
    for start in range(0, len(entries), _PER_DOCUMENT):
        yield start, "\n\n".join(entries[start : start + _PER_DOCUMENT])


def read_html(
    out: Collector,
    domain: str,
    source: str,
    pattern: str,
    skip: str | None = None,
    split: int | None = None,
) -> None:
    """Add the HTML pages that match `pattern` and not the expression `skip`, cut at `split` characters."""
    count = 0
    for path in sorted(glob.glob(f"{out.packages}/{pattern}", recursive=True)):
        if skip and re.search(skip, path):
            continue
        count += 1
        text = html_text(read_text(path))
        if split and len(text) > split:
            for number, part in enumerate(chunks(text, split)):
                out.add(domain, source, f"{path}#{number}", part, 300)
        else:
            out.add(domain, source, path, text, 300)
    print(f"  {source} {domain}: {count} pages", flush=True)


def read_man_pages(out: Collector, domain: str, source: str, subfolder: str = "") -> None:
    """Add the man pages of a package, rendered by mandoc."""
    mandoc = f"{out.packages}/mandoc/usr/bin/mandoc"
    pattern = f"{out.packages}/{source}/usr/share/man{subfolder}/man*/*.gz"
    paths = sorted(path for path in glob.glob(pattern) if not os.path.islink(path))
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda path: man_text(path, mandoc), paths)
        for path, text in zip(paths, texts, strict=True):
            out.add(domain, source, path, text, 400)
    print(f"  {source} {domain}: {len(paths)} pages", flush=True)


def read_perl_manual(out: Collector) -> None:
    """Add Perl's manual, rendered by pod2text."""
    for path in sorted(glob.glob(f"{out.packages}/perl-doc/usr/share/perl/5.36.0/pod/*.pod")):
        command = ["pod2text", "-u", "-w", "78", path]
        result = subprocess.run(command, capture_output=True, check=False)
        text = clean(result.stdout.decode("utf-8", "replace"))
        for number, part in enumerate(chunks(text, 30000)):
            out.add("tech", "perl-doc", f"{path}#{number}", part)


def read_kernel_manual(out: Collector) -> None:
    """Add the Linux kernel's documentation (reStructuredText and plain text)."""
    root = f"{out.packages}/linux-doc-6.1/usr/share/doc/linux-doc-6.1/Documentation"
    directive = re.compile(
        r"^\.\. SPDX.*\n|"
        r"^\.\. (include|toctree|contents|kernel-doc|highlight|only|index)::.*\n(?:[ \t]+:.*\n)*",
        flags=re.MULTILINE,
    )
    for path in sorted(glob.glob(root + "/**/*", recursive=True)):
        if not os.path.isfile(path) or os.path.islink(path):
            continue
        relative = path[len(root) + 1 :]
        if relative.startswith(("translations", "devicetree", "features", "output")):
            continue
        if not re.search(r"\.(rst|txt)(\.gz)?$", path):
            continue
        text = clean(directive.sub("", read_text(path)))
        for number, part in enumerate(chunks(text, 40000)):
            out.add("tech", "linux-doc-6.1", f"{path}#{number}", part, 400)


def read_bible(out: Collector) -> None:
    """Add the King James Bible, a chapter a document, as printed by the program `bible`."""
    program = f"{out.packages}/bible-kjv/usr/bin/bible"
    folder = f"{out.packages}/bible-kjv-text/usr/lib/"
    count = 0
    for entry in _BIBLE_CHAPTERS.split():
        book, chapters = entry.split(":")
        for chapter in range(1, int(chapters) + 1):
            command = [program, "-p", folder, "-l72", f"{book}{chapter}:1-200"]
            result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
            text = result.stdout.decode("latin-1")
            if f" {chapter}\n" in text:  # the heading: a wrong book name prints none
                out.add("prose", "bible-kjv-text", f"{book} {chapter}", clean(text))
                count += 1
    print(f"  bible-kjv-text prose: {count} chapters", flush=True)


def read_fortunes(out: Collector, domain: str, source: str, folder: str, skip: Collection[str] = ()) -> None:
    """Add collections of quotations; `skip` names files that hold pictures or foreign text."""
    for path in sorted(glob.glob(f"{out.packages}/{source}/usr/share/games/fortunes/{folder}*")):
        if path.endswith((".dat", ".u8")) or os.path.islink(path) or os.path.isdir(path):
            continue
        if os.path.basename(path) in skip:
            continue
        entries = [entry.strip("\n") for entry in re.split(r"^%.*$", read_text(path), flags=re.MULTILINE)]
        for start, text in groups([entry for entry in entries if entry.strip()]):
            out.add(domain, source, f"{path}#{start}", clean(text))


def read_dictionary(out: Collector, source: str, name: str, chars_per_document: int = 6000) -> None:
    """Add a dictd dictionary: entries begin in column 0 after a blank line."""
    text = read_text(f"{out.packages}/{source}/usr/share/dictd/{name}.dict.dz")
    text = re.sub(r"\n +\[1913 Webster\]", "", text)
    origin = r"\n +\[(Webster 1913 Suppl\.|PJC|WordNet 1\.5|Century Dict[^\]]*|a source)[^\]]*\]"
    text = re.sub(origin, "", text)
    text = text.replace("\r", "")
    entries: list[str] = []
    length = 0
    number = 0
    for raw_entry in re.split(r"\n\n(?=\S)", text):
        entry = raw_entry.strip("\n")
        if entry.startswith("00-database") or len(entry) < 8:
            continue
        entries.append(entry)
        length += len(entry)
        if length > chars_per_document:
            out.add("dict", source, f"{source}#{number}", clean("\n\n".join(entries)))
            entries = []
            length = 0
            number += 1
    if entries:
        out.add("dict", source, f"{source}#{number}", clean("\n\n".join(entries)))
