"""The packages that the text is taken from, the tools needed to read them, and the licences of the texts."""

from __future__ import annotations

_ENGLISH = """
    bible-kjv-text crawl-common debian-edu-doc-en debian-handbook debian-history debian-reference-en
    developers-reference dict-devil dict-foldoc dict-gcide dict-jargon endless-sky-data fortunes fortunes-min
    gimp-help-en git-doc harden-doc linux-doc-6.1 linux-source-6.1 manpages manpages-dev naev-data perl-doc
    postgresql-doc-15 python3.11-doc sqlite3-doc
"""

_TRANSLATED = """
    aptitude-doc-es aptitude-doc-fr debian-edu-doc-de debian-edu-doc-es debian-edu-doc-fr debian-faq-de
    debian-faq-fr debian-reference-de debian-reference-es debian-reference-fr developers-reference-de
    developers-reference-fr fortunes-de freedombox-doc-es gimp-help-de gimp-help-es gimp-help-fr kicad-doc-de
    kicad-doc-es libreoffice-help-de libreoffice-help-es libreoffice-help-fr maint-guide-de maint-guide-es
    maint-guide-fr manpages-de manpages-de-dev manpages-es manpages-es-dev manpages-fr manpages-fr-dev
"""

_WESNOTH = "data did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs"

# Programs that are run straight from their unpacked packages.
_TOOLS = ["bible-kjv", "mandoc"]

DEBIAN_PACKAGES = sorted(
    [*_ENGLISH.split(), *_TRANSLATED.split(), *_TOOLS, *(f"wesnoth-1.16-{part}" for part in _WESNOTH.split())]
)

# Import names; the distribution of bs4 is called beautifulsoup4.
PYPI_MODULES = ("sympy", "networkx", "numpy", "scipy", "torch", "bs4", "jinja2", "mpmath")

_MANPAGES = "per page: GPL-2+, Linux-man-pages-copyleft, BSD, public domain"
_TRANSLATED_MANPAGES = "translations GPL-3+; originals per page GPL-2+, GPL-3+, BSD, Linux-man-pages-copyleft"
_FORTUNES = "BSD-3-Clause (collection; short quotations with attribution)"
_GCIDE = "GNU Collaborative International Dictionary of English"
_GFDL = "GFDL-1.2+ without invariant sections"

# The longest entry that a source's name begins with counts.
LICENCES = {
    "aptitude-doc": "GPL-2+",
    "bible-kjv-text": "text in the public domain (programs GPL-2+)",
    "cpython-stdlib": "PSF-2.0",
    "crawl-common": "GPL-2+",
    "debian-edu-doc": "GPL-2+",
    "debian-faq": "verbatim and modified copies under the same terms (SPI)",
    "debian-handbook": "GPL-2+ or CC-BY-SA-3.0",
    "debian-history": "GPL-2+",
    "debian-reference": "GPL-2+",
    "developers-reference": "GPL-2+",
    "dict-devil": "public domain",
    "dict-foldoc": _GFDL,
    "dict-gcide": f"GPL-2+ ({_GCIDE}; Webster 1913 part in the public domain)",
    "dict-jargon": "public domain",
    "endless-sky-data": "GPL-3+",
    "fortunes": _FORTUNES,
    "fortunes-de": "GPL-2+ (collection)",
    "fortunes-min": _FORTUNES,
    "freedombox-doc": "CC-BY-SA-4.0",
    "gimp-help": _GFDL,
    "git-doc": "GPL-2.0",
    "harden-doc": "GPL-2+",
    "kicad-doc": "GPL-3+ or CC-BY-3.0+",
    "libreoffice-help": "MPL-2.0",
    "linux-doc-6.1": "GPL-2.0 (single files GFDL-1.1+ without invariant sections, CC-BY-4.0)",
    "linux-source-6.1": ("GPL-2.0-only WITH Linux-syscall-note (single files also GPL-2.0+, BSD, MIT)"),
    "maint-guide": "GPL-2+ (and MIT)",
    "manpages": _MANPAGES,
    "manpages-dev": _MANPAGES,
    "manpages-de": _TRANSLATED_MANPAGES,
    "manpages-es": _TRANSLATED_MANPAGES,
    "manpages-fr": _TRANSLATED_MANPAGES,
    "naev-data": "GPL-3+",
    "perl-doc": "GPL-1+ or Artistic",
    "postgresql-doc-15": "PostgreSQL licence",
    "pypi:bs4": "MIT",
    "pypi:jinja2": "BSD-3-Clause",
    "pypi:mpmath": "BSD-3-Clause",
    "pypi:networkx": "BSD-3-Clause",
    "pypi:numpy": "BSD-3-Clause",
    "pypi:scipy": "BSD-3-Clause",
    "pypi:sympy": "BSD-3-Clause",
    "pypi:torch": "BSD-3-Clause",
    "python3.11-doc": "PSF-2.0 (examples 0BSD)",
    "sqlite3-doc": "public domain",
    "wesnoth": "GPL-2+",
}


def licence_of(source: str) -> str:
    """Return the licence of a source's text; KeyError if the table does not know the source."""
    known = [prefix for prefix in LICENCES if source.startswith(prefix)]
    if not known:
        raise KeyError(f"no licence recorded for source {source!r}: add it to LICENCES")
    return LICENCES[max(known, key=len)]
