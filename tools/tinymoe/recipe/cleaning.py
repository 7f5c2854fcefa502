"""Functions on plain strings: reading, cleaning, cutting into pieces, guessing the language."""

from __future__ import annotations

import collections
import gzip
import re
import unicodedata
from collections.abc import Iterator

_REMOVED_CHARS = str.maketrans({"\xa0": " ", "\xad": "", "\ufeff": "", "\u200b": ""})

# The link that a manual's page begins with once its navigation bar has become text.
_LEADING_LINK = re.compile(
    r"^(Download the ebook|\* (Précédent|Suivant|Zurück|Weiter|Anterior|Siguiente|Prev|Next))\n+"
)

_STOP_WORDS = {
    "en": "the of and to in is that for it as with this are be on by an not or from which can if you",
    "fr": "le la les des et du une est pour dans que qui sur pas par ce vous avec sont être cette ou",
    "de": "der die das und ist nicht ein eine zu den von mit wird für auf sie werden dem im des auch als",
    "es": "el la los las que de en un una es por para con del no se al como más este si o su",
}


def read_text(path: str) -> str:
    """Return a file's text: gunzipped if need be, UTF-8 or else Latin-1."""
    opener = gzip.open if path.endswith((".gz", ".dz")) else open
    with opener(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def clean(text: str) -> str:
    """Tidy prose: line ends, invisible characters, trailing blanks, empty list items, runs of blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_REMOVED_CHARS)
    text = "".join(char for char in text if char in "\n\t" or unicodedata.category(char)[0] != "C")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n\* *\n+", "\n* ", text)
    text = _LEADING_LINK.sub("", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip("\n")


def clean_code(text: str) -> str:
    """Tidy source code and cut the interpreter line and the licence head, which are alike everywhere."""
    text = text.replace("\r\n", "\n").replace("\f", "")
    text = re.sub(r"\A(#!.*\n)?(#.*coding[:=].*\n)?", "", text)
    python_head = r"\A(?:#.*\n)*(?:#.*(?:Copyright|License|licen[cs]e).*\n)(?:#.*\n)*"
    text = re.sub(python_head, "", text)
    text = re.sub(r"\A(?:// SPDX.*\n|/\* SPDX.*\*/\n)", "", text)
    in_comment = r"(?:[^*]|\*(?!/))*"
    c_head = rf"\A\s*/\*{in_comment}(?:Copyright|GPL|General Public|License){in_comment}\*/\n"
    text = re.sub(c_head, "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n")


def chunks(text: str, size: int) -> Iterator[str]:
    """Cut a long text at blank lines into pieces of at least `size` characters, the last one shorter."""
    piece: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            yield "\n\n".join(piece)
            piece = []
            length = 0
    if piece:
        yield "\n\n".join(piece)


def language_of(text: str) -> tuple[str, float]:
    """Guess a language by its stop words.

    Returns the best of en, fr, de, es, and the share of the words that are stop words of it
    (in the first 20,000 characters).
    """
    words = re.findall(r"[a-zà-öø-ÿß]+", text[:20000].lower())
    counts = collections.Counter(words)
    scores = {}
    for language, stop_words in _STOP_WORDS.items():
        scores[language] = sum(counts[word] for word in stop_words.split())
    best = max(scores, key=lambda language: scores[language])
    return best, scores[best] / max(1, len(words))
