"""HTML and man pages to plain text."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from .cleaning import clean, read_text

_PARAGRAPH_TAGS = re.compile(r"p|h[1-6]|pre|dl|table|blockquote|ul|ol|section")
_OTHER_BLOCK_TAGS = re.compile(
    r"div|li|dt|dd|tr|article|body|center|form|fieldset|details|summary|figure|figcaption|main|thead|tbody|"
    r"caption|title"
)
_DROPPED_TAGS = re.compile(
    r"script|style|nav|header|footer|head|noscript|svg|img|iframe|button|form|select|template|math|meta|link|"
    r"input|object|figure"
)
_DROPPED_CLASSES = re.compile(
    r"\b(navheader|navfooter|headerlink|related|sphinxsidebar|sphinxsidebarwrapper|footer|toc|docnav|"
    r"contents|breadcrumb|footer-text|fancy_toc|nosearch|searchmenu|menubar|flextoc|donation|copyright|"
    r"legalnotice|viewcode-link|mediaobject|bookmark|relatedtopics-nav|logo|symbol)\b"
)
_DROPPED_IDS = re.compile(
    r"TopLeftHeader|SearchFrame|Contents|Bookmarks|DonationFrame|footer-text|footer|toc|searchbox|SidebarTool"
)
_MAX_DEPTH = 300

_DROPPED_MAN_SECTIONS = re.compile(
    r"^(TRADUCTION|ÜBERSETZUNG|TRADUCCIÓN|COPYRIGHT|LICENSE|LICENCE|LICENCIA|LIZENZ|COLOPHON|TRADUCTOR(ES)?|"
    r"NOTA DE TRADUCCIÓN|DROITS D.AUTEUR|COPYRIGHT ET LICENCE|URHEBERRECHT|REPORTING BUGS|"
    r"RAPPORTER DES BOGUES|SIGNALER DES BOGUES|SIGNALEMENT DES BOGUES|FEHLER BERICHTEN|FEHLERBERICHTE|"
    r"INFORMAR DE ERRORES)\b"
)


class _Text:
    """Collects the pieces of a page and keeps track of line ends."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def newlines(self, wanted: int) -> None:
        """Make the text end in at least `wanted` line ends."""
        have = 0
        while have < len(self.pieces) and have < 4 and self.pieces[-1 - have] == "\n":
            have += 1
        self.pieces.extend("\n" for _ in range(wanted - have))

    def add(self, text: str, preformatted: bool) -> None:
        if preformatted:
            self.pieces.append(text)
            return
        text = re.sub(r"[ \t\r\n\f]+", " ", text)
        at_blank = bool(self.pieces) and self.pieces[-1].endswith((" ", "\n"))
        if text == " " and (at_blank or not self.pieces):
            return
        if at_blank:
            text = text.lstrip(" ")
        if text:
            self.pieces.append(text)


def _walk(node: Any, out: _Text, preformatted: bool, depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    child = node.child
    while child is not None:
        _visit(child, out, preformatted, depth)
        child = child.next


def _visit(node: Any, out: _Text, preformatted: bool, depth: int) -> None:
    tag = node.tag
    if tag == "-text":
        out.add(node.text_content or "", preformatted)
        return
    if tag.startswith(("-", "!", "_")) or _DROPPED_TAGS.fullmatch(tag):
        return
    attributes = node.attributes
    if _DROPPED_CLASSES.search(attributes.get("class") or ""):
        return
    if _DROPPED_IDS.fullmatch(attributes.get("id") or ""):
        return
    if tag == "br":
        out.pieces.append("\n")
        return
    if tag == "hr":
        out.newlines(2)
        return
    gap = 0
    if _PARAGRAPH_TAGS.fullmatch(tag):
        gap = 2
    elif _OTHER_BLOCK_TAGS.fullmatch(tag):
        gap = 1
    out.newlines(gap)
    if tag == "li":
        out.pieces.append("* ")
    elif tag in ("td", "th") and out.pieces and not out.pieces[-1].endswith("\n"):
        out.pieces.append(" | ")
    _walk(node, out, preformatted or tag == "pre", depth + 1)
    out.newlines(gap)


def html_text(html: str) -> str:
    """Return the main text of an HTML page, without navigation, notices and pictures."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(re.sub(r"^\s*<\?xml[^>]*\?>", "", html))
    candidates = (tree.css_first(selector) for selector in ("div[role=main]", "main", "#DisplayArea"))
    root = next(filter(None, candidates), tree.body)
    if root is None:
        return ""
    out = _Text()
    _walk(root, out, False, 0)
    return clean("".join(out.pieces))


def man_text(path: str, mandoc: str) -> str:
    """Return a man page as text of 80 columns, without the sections on licence, translators and bugs.

    Returns an empty string for links (`.so`) and for very short pages. `mandoc` is the program to run.
    """
    source = read_text(path)
    if re.match(r"\s*\.so ", source) or len(source) < 400:
        return ""
    command = [mandoc, "-T", "utf8", "-O", "width=80"]
    result = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    overstruck = result.stdout.decode("utf-8", "replace")
    lines = re.sub(r".\x08", "", overstruck).split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    kept = []
    skipping = False
    for line in lines[1:-1]:  # without the running head and foot
        if line and not line[0].isspace():
            skipping = bool(_DROPPED_MAN_SECTIONS.match(line.strip()))
        if not skipping:
            kept.append(line)
    return clean("\n".join(kept))
