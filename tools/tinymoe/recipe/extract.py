"""The list of all sources: which reader, which files, which domain. Writes docs/<domain>.jsonl.

A line of such a file is an object with the keys `s` (source), `i` (identifier) and `t` (text).
A package that is not unpacked contributes nothing, except the dictionaries, Naev and the helper programs,
which are required.
"""

from __future__ import annotations

import collections
import json
import os
import sysconfig
from pathlib import Path

from . import DOMAINS
from .games import read_crawl, read_endless_sky, read_naev, read_wesnoth
from .packages import PYPI_MODULES
from .readers import (
    Collector,
    read_bible,
    read_dictionary,
    read_fortunes,
    read_html,
    read_kernel_manual,
    read_man_pages,
    read_perl_manual,
)
from .sourcecode import read_kernel_source, read_python

_HANDBOOK = "debian-handbook/usr/share/doc/debian-handbook/html"
_HISTORY = "debian-history/usr/share/doc/debian-history/docs"
_LOCALES = {"fr": "fr-FR", "de": "de-DE", "es": "es-ES"}


def _prose(out: Collector) -> None:
    read_bible(out)
    read_wesnoth(out)
    read_endless_sky(out)
    read_naev(out)
    read_crawl(out)
    read_fortunes(out, "prose", "fortunes", "", skip=("ascii-art", "translate-me", "zippy"))
    read_fortunes(out, "prose", "fortunes-min", "")
    read_html(out, "prose", "debian-handbook", f"{_HANDBOOK}/en-US/*.html", skip="index")
    read_html(out, "prose", "debian-history", f"{_HISTORY}/*.en.html")


def _dictionaries(out: Collector) -> None:
    for name in ("gcide", "foldoc", "jargon", "devil"):
        read_dictionary(out, f"dict-{name}", name)


def _python(out: Collector, site_packages: str) -> None:
    read_python(
        out,
        "cpython-stdlib",
        sysconfig.get_paths()["stdlib"],
        skip=r"/(site-packages|tests?|idle_test|__pycache__|encodings|pydoc_data|lib-dynload|ensurepip|"
        r"turtledemo|config-)(/|$)|/test_",
    )
    for module in PYPI_MODULES:
        read_python(
            out,
            f"pypi:{module}",
            f"{site_packages}/{module}",
            skip=r"/(tests?|testing|benchmarks|__pycache__|_vendor|bench)(/|$)|/test_|"
            r"_pyinstaller|_generated",
        )


def _technical(out: Collector) -> None:
    read_html(
        out,
        "tech",
        "python3.11-doc",
        "python3.11-doc/usr/share/doc/python3.11/html/**/*.html",
        skip=r"genindex|py-modindex|search\.html|/_|contents\.html|whatsnew/changelog|download|bugs|"
        r"copyright|license|index\.html",
        split=40000,
    )
    read_html(
        out,
        "tech",
        "postgresql-doc-15",
        "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html/*.html",
        skip=r"bookindex|index\.html|legalnotice|biblio",
        split=40000,
    )
    read_html(
        out,
        "tech",
        "git-doc",
        "git-doc/usr/share/doc/git-doc/**/*.html",
        skip=r"RelNotes/[0-9]",
        split=40000,
    )
    read_html(
        out,
        "tech",
        "sqlite3-doc",
        "sqlite3-doc/usr/share/doc/sqlite3/**/*.html",
        skip=r"search|matrix|doclist|keyword|sitemap|/index|releaselog|toc|crossref|"
        r"c3ref/(objlist|constlist|funclist|intro)",
        split=40000,
    )
    read_kernel_manual(out)
    read_perl_manual(out)
    read_man_pages(out, "tech", "manpages")
    read_man_pages(out, "tech", "manpages-dev")
    read_html(
        out,
        "tech",
        "debian-reference-en",
        "debian-reference-en/usr/share/debian-reference/*.en.html",
        skip="index",
        split=40000,
    )
    read_html(
        out,
        "tech",
        "developers-reference",
        "developers-reference/usr/share/developers-reference/**/*.html",
        skip=r"genindex|search|index\.",
    )
    read_html(
        out,
        "tech",
        "harden-doc",
        "harden-doc/usr/share/doc/harden-doc/html/en-US/*.html",
        skip="index",
    )
    read_html(
        out,
        "tech",
        "gimp-help-en",
        "gimp-help-en/usr/share/gimp/2.0/help/en/*.html",
        skip="index|glossary",
    )
    read_html(
        out,
        "tech",
        "debian-edu-doc-en",
        "debian-edu-doc-en/usr/share/doc/debian-edu-doc-en/*bookworm*.html",
        split=20000,
    )


def _translated(out: Collector, language: str) -> None:
    locale = _LOCALES[language]
    read_man_pages(out, language, f"manpages-{language}", f"/{language}")
    read_man_pages(out, language, f"manpages-{language}-dev", f"/{language}")
    read_html(out, language, "debian-handbook", f"{_HANDBOOK}/{locale}/*.html", skip="index")
    source = f"debian-reference-{language}"
    pattern = f"{source}/usr/share/debian-reference/*.{language}.html"
    read_html(out, language, source, pattern, skip="index", split=40000)
    source = f"gimp-help-{language}"
    pattern = f"{source}/usr/share/gimp/2.0/help/{language}/*.html"
    read_html(out, language, source, pattern, skip="index|glossary")
    source = f"libreoffice-help-{language}"
    pattern = f"{source}/usr/share/libreoffice/help/{language}/text/**/*.html"
    read_html(out, language, source, pattern, skip="index")
    source = f"kicad-doc-{language}"
    read_html(out, language, source, f"{source}/usr/share/doc/kicad/help/{language}/*.html", split=20000)
    source = f"debian-edu-doc-{language}"
    read_html(out, language, source, f"{source}/usr/share/doc/{source}/*bookworm*.html", split=20000)
    read_html(out, language, "debian-history", f"{_HISTORY}/*.{language}.html")
    pattern = f"harden-doc/usr/share/doc/harden-doc/html/{locale}/*.html"
    read_html(out, language, "harden-doc", pattern, skip="index")
    for manual in ("developers-reference", "maint-guide", "debian-faq", "aptitude-doc", "freedombox-doc"):
        source = f"{manual}-{language}"
        if os.path.isdir(f"{out.packages}/{source}"):
            pattern = f"{source}/usr/share/**/*.html"
            read_html(out, language, source, pattern, skip=r"genindex|search|index\.", split=20000)
    if language != "fr":
        folder = "de/" if language == "de" else ""
        read_fortunes(out, language, f"fortunes-{language}", folder, skip=("asciiart", "ascii-art"))


def extract(work: Path, site_packages: str) -> None:
    """Read all sources under work/x and write work/docs/<domain>.jsonl.

    Parameters
    ----------
    work
        The working folder, see prepare.py.
    site_packages
        Folder that holds the PyPI packages.
    """
    out = Collector(str(work / "x"))
    print("prose", flush=True)
    _prose(out)
    print("dict", flush=True)
    _dictionaries(out)
    print("python", flush=True)
    _python(out, site_packages)
    print("c", flush=True)
    read_kernel_source(out)
    print("tech", flush=True)
    _technical(out)
    for language in _LOCALES:
        print(language, flush=True)
        _translated(out, language)

    folder = work / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        chars: collections.Counter[str] = collections.Counter()
        with open(folder / f"{domain}.jsonl", "w", encoding="utf-8") as file:
            for source, ident, text in out.documents[domain]:
                file.write(json.dumps({"s": source, "i": ident, "t": text}, ensure_ascii=False) + "\n")
                chars[source] += len(text)
        largest = ", ".join(f"{source} {count / 1e6:.2f}" for source, count in chars.most_common(8))
        count = len(out.documents[domain])
        print(f"{domain}: {count} documents, {sum(chars.values()) / 1e6:.2f} M characters ({largest})")
