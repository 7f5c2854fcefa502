"""TextAssembler: whole characters only, stop strings wherever the tokens are cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pyhotexperts.text import TextAssembler


def assemble(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    text = TextAssembler(stop)
    parts = []
    for piece in pieces:
        parts.append(text.push(piece))
        if text.stop_string is not None:
            return parts, text.stop_string
    parts.append(text.finish())
    return parts, text.stop_string


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def test_a_character_is_shown_only_when_it_is_whole() -> None:
    euro = "€".encode()
    parts, _ = assemble([b"5 ", euro[:1], euro[1:2], euro[2:], b"!"])
    assert parts == ["5 ", "", "", "€", "!", ""]


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    parts, _ = assemble([b"a", b"\xff", b"b", b"\xe2\x82"])
    assert "".join(parts) == "a\ufffdb\ufffd"


def test_a_stop_string_across_tokens_is_not_shown() -> None:
    parts, met = assemble([b"one ", b"<", b"en", b"d>", b" two"], ("<end>",))
    assert parts == ["one ", "", "", ""]
    assert met == "<end>"


def test_text_held_back_for_a_stop_string_that_does_not_come_is_shown() -> None:
    parts, met = assemble([b"one <en", b"try>"], ("<end>",))
    assert parts == ["one ", "<entry>", ""]
    assert met is None


def test_held_text_is_shown_at_the_end() -> None:
    parts, met = assemble([b"one <en"], ("<end>",))
    assert parts == ["one ", "<en"]
    assert met is None


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_the_cuts_between_tokens_do_not_change_the_text(text: str, places: list[int]) -> None:
    parts, _ = assemble(cut(text.encode(), places))
    assert "".join(parts) == text


@given(
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 100)),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_stop_strings_do_not_depend_on_the_cuts(text: str, places: list[int], stop: tuple[str, ...]) -> None:
    parts, met = assemble(cut(text.encode(), places), stop)
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        assert ("".join(parts), met) == (text, None)
        return
    matches = [s for s in stop if text[: min(ends)].endswith(s)]
    assert met == max(matches, key=len)
    assert "".join(parts) == text[: min(ends) - len(met)]
