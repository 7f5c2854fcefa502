"""JSON schemas as grammars: numbers within bounds, and everything that is refused. What grammars make a model write is
tested in tests/native/test_structured_output.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyhotexperts as phx
from pyhotexperts.json_schema import integers, literal, magnitudes, to_grammar


def matches(alternatives: list[str], text: str) -> bool:
    """Whether one of these GBNF texts, which have no rules but `digits` and `fraction`, describes a text."""
    expression = "|".join(alternatives).replace("fraction", '"\\." [0-9] digits').replace("digits", "[0-9]{0,15}")
    expression = re.sub(r'"([0-9]*)\."', r"\1[.]", expression)
    return re.fullmatch(expression.replace('"', "").replace(" ", ""), text) is not None


@given(st.integers(0, 1200), st.integers(0, 1200))
def test_integers_are_those_from_low_to_high(low: int, high: int) -> None:
    alternatives = integers(low, high)
    for number in {0, 9, 10, low - 1, low, low + 1, (low + high) // 2, high - 1, high, high + 1, 10 * high, 1200}:
        if number >= 0:
            assert (bool(alternatives) and matches(alternatives, str(number))) == (low <= number <= high)
    assert len(alternatives) < 20


@given(
    st.sampled_from([-2, 0, 0.5, 1, 7, 9.5, 10, 40]),
    st.booleans(),
    st.sampled_from([-1, 0, 0.5, 1, 1.5, 8, 10, 99, 100.25]),
    st.booleans(),
    st.booleans(),
)
def test_numbers_stay_within_their_bounds(
    low: float, low_is_out: bool, high: float, high_is_out: bool, whole: bool
) -> None:
    alternatives = magnitudes(low, low_is_out, high, high_is_out, whole)
    for tenth in range(1010):
        text = str(tenth // 10) if tenth % 10 == 0 else f"{tenth // 10}.{tenth % 10}"
        value = float(text)
        within = (value > low if low_is_out else value >= low) and (value < high if high_is_out else value <= high)
        allowed = bool(alternatives) and matches(alternatives, text)
        assert within or not allowed
        if value.is_integer():
            assert allowed == within
        elif float(low).is_integer() and float(high).is_integer():
            assert allowed == (within and not whole)


def test_a_literal_is_quoted() -> None:
    assert literal('a"b\\n\n') == '"a\\"b\\\\n\\x0A"'


def test_true_and_the_empty_schema_are_any_json() -> None:
    assert to_grammar(True) == to_grammar({}) == to_grammar('{"title": "Anything"}')
    assert "root ::= any\n" in to_grammar(True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (5, "must be a dict"),
        (False, "must be a dict"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ({"type": "text"}, "type must be of"),
        ({"type": []}, "type must be of"),
        ({"type": "string", "pattern": "a+"}, "at #: pattern is not supported"),
        ({"properties": {"a": {"type": "string", "format": "email"}}}, "at #/properties/a: the format 'email'"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"not": {}}, "not is not supported"),
        ({"if": {}, "then": {}}, "if, then is not supported"),
        ({"type": "object", "patternProperties": {}}, "patternProperties is not supported"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf is not supported"),
        ({"anyOf": [{}], "type": "string"}, "type is not supported beside anyOf"),
        ({"anyOf": []}, "list of schemas"),
        ({"anyOf": [False]}, "allows nothing"),
        ({"allOf": [{}, {}]}, "one schema alone"),
        ({"allOf": [False]}, "allows nothing"),
        ({"enum": []}, "no value is allowed"),
        ({"enum": ["a"], "type": "integer"}, "no value is allowed"),
        ({"enum": "abc"}, "enum must be a list"),
        ({"const": {1, 2}}, "no value is allowed"),
        ({"const": float("nan")}, "is no JSON"),
        ({"$ref": "https://example.com/schema"}, "must point into the schema itself"),
        ({"$ref": "#/$defs/none"}, "there is no"),
        ({"$ref": "#"}, "points to itself"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number within"),
        ({"type": "number", "minimum": 0.2, "maximum": 0.8}, "no number within"),
        ({"type": "number", "minimum": 10**17}, "at most 16 digits"),
        ({"type": "number", "minimum": float("nan")}, "at most 16 digits"),
        ({"type": "number", "minimum": True}, "must be a number"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength is more than maxLength"),
        ({"type": "string", "minLength": 2001}, "more than 2000"),
        ({"type": "string", "maxLength": -1}, "integer from 0"),
        ({"type": "string", "format": "date", "maxLength": 3}, "a length beside a format"),
        ({"type": "array", "items": [{}]}, "is no schema"),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "more than there can be"),
        ({"type": "object", "properties": []}, "properties must be a dict"),
        ({"type": "object", "required": "a"}, "required must be a list"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is required"),
        ({"properties": {"a": False}, "required": ["a"]}, "required, but not allowed"),
    ],
)
def test_what_a_grammar_cannot_promise_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(phx.GrammarError, match=re.escape(message)):
        to_grammar(schema)


def test_a_schema_that_is_too_deep_or_too_large_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    itself: dict[str, Any] = {"type": "array"}
    itself["items"] = itself
    for schema in (deep, itself):
        with pytest.raises(phx.GrammarError, match="more than 64 levels deep"):
            to_grammar(schema)
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(100)}
    with pytest.raises(phx.GrammarError, match="more than 64 levels deep"):
        to_grammar({"$defs": chain, "$ref": "#/$defs/d0"})
    with pytest.raises(phx.GrammarError, match="more than 5000 rules"):
        to_grammar({"properties": {f"p{i}": {"enum": [i]} for i in range(2000)}})
