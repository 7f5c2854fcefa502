"""From a JSON schema to a GBNF grammar: every text of the grammar is JSON that the schema accepts.

The grammar may allow less than the schema: members come in the order of the schema, none that it does not name, numbers
have at most 16 digits. What a grammar cannot promise (`uniqueItems`, `not`, `pattern`, ...) is refused, never ignored.
One exception, as in llama.cpp: `oneOf` is taken as `anyOf`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyhotexperts.errors import GrammarError

MAX_DEPTH = 64  # of schemas inside each other
MAX_RULES = 5000
MAX_REPETITIONS = 2000  # of one rule, in upstream's parser
MAX_DIGITS = 16

# Keywords that say nothing about which values are valid.
ANNOTATIONS = {
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
}
KEYWORDS = {
    "string": {"minLength", "maxLength", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}

RULES = {
    "space": r'(" " | "\n" [ \t]{0,16})?',
    "hex": "[0-9a-fA-F]",
    # no half of a surrogate pair: it would be no character
    "escape": r'["\\/bfnrt] | "u" ([0-9abcefABCEF] hex{3} | [dD] [0-7] hex{2})',
    "char": r'[^"\\\x00-\x1F\x7F] | "\\" escape',
    "string": r'"\"" char* "\""',
    "digits": f"[0-9]{{0,{MAX_DIGITS - 1}}}",
    "whole": '"0" | [1-9] digits',
    "fraction": '"." [0-9] digits',
    "integer": '"-"? whole',
    "number": '"-"? whole fraction? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "any": "object | array | string | number | boolean | null",
    "member": 'string space ":" space any',
    "object": '"{" space (member (space "," space member)* space)? "}"',
    "array": '"[" space (any (space "," space any)* space)? "]"',
    "year": "[1-9] [0-9]{3}",
    "date": 'year "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])',
    "clock": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]',
    "time": 'clock ":" [0-5] [0-9] ("." [0-9]{1,6})? ("Z" | [-+] clock)',
    "date-time": 'date "T" time',
    "uuid": 'hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}',
}
FORMATS = ("date", "time", "date-time", "uuid")


def to_grammar(schema: object) -> str:
    """The GBNF grammar of a schema.

    Parameters
    ----------
    schema
        A dict, the same as JSON text, or True for any JSON value.

    Raises
    ------
    GrammarError
        If the schema is none, is nested too deeply, allows nothing, or asks for what a grammar cannot promise.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as e:
            raise GrammarError(f"json_schema is no JSON: {e}") from None
    if not isinstance(schema, Mapping) and schema is not True:
        raise GrammarError(f"json_schema must be a dict, JSON text or True, not {schema!r:.80}")
    return _Converter(schema).grammar()


class _Converter:
    """Collects the rules of one schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules: dict[str, str] = {}
        self._of_reference: dict[str, str] = {}  # JSON pointer -> name of its rule
        self._path: list[str] = []  # from the schema to the part that is converted
        self._depth = 0

    def grammar(self) -> str:
        """The text of the grammar."""
        root = self._convert(self._schema)
        rules = {"root": root, **self._rules}
        needed = [text for text in rules.values()]
        while needed:
            for name in _names(needed.pop()):
                if name in RULES and name not in rules:
                    rules[name] = RULES[name]
                    needed.append(RULES[name])
        return "".join(f"{name} ::= {text}\n" for name, text in rules.items())

    def _fail(self, reason: str) -> GrammarError:
        where = "/".join(["#", *self._path])
        return GrammarError(f"the JSON schema cannot be used: at {where:.200}: {reason}")

    def _add(self, text: str, name: str | None = None) -> str:
        if len(self._rules) >= MAX_RULES:
            raise self._fail(f"it needs more than {MAX_RULES} rules")
        name = name or f"r{len(self._rules)}"
        self._rules[name] = text
        return name

    def _inside(self, key: str, schema: Any) -> str:
        """The name of a rule for a part of the schema that is converted."""
        self._path += key.split("/")
        rule = self._convert(schema)
        del self._path[-len(key.split("/")) :]
        return rule

    def _convert(self, schema: Any) -> str:
        """The name of a rule for a schema."""
        if self._depth == MAX_DEPTH:
            raise self._fail(f"schemas are nested more than {MAX_DEPTH} levels deep")
        self._depth += 1
        rule = self._convert_inner(schema)
        self._depth -= 1
        return rule

    def _convert_inner(self, schema: Any) -> str:
        if schema is True:
            return "any"
        if schema is False:
            raise self._fail("the schema false allows nothing")
        if not isinstance(schema, Mapping):
            raise self._fail(f"{schema!r:.80} is no schema")
        keys = {key for key in schema if key not in ANNOTATIONS}
        if not keys:
            return "any"
        for key, convert in (
            ("$ref", self._reference),
            ("enum", self._enum),
            ("const", self._const),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
            ("allOf", self._all_of),
        ):
            if key in keys:
                self._refuse_others(keys, {key, "type"} if key in ("enum", "const") else {key})
                return convert(key, schema)
        return self._typed(schema, keys)

    def _refuse_others(self, keys: set[str], known: set[str]) -> None:
        others = sorted(keys - known)
        if others:
            beside = f" beside {', '.join(sorted(keys & known))}" if keys & known else ""
            raise self._fail(f"{', '.join(map(str, others))} is not supported{beside}")

    # ------------------------------------------------------------ what has no type of its own

    def _reference(self, key: str, schema: Mapping[str, Any]) -> str:
        pointer = schema[key]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise self._fail(f"$ref must point into the schema itself (#/...), not {pointer!r:.80}")
        if pointer in self._of_reference:
            return self._of_reference[pointer]
        target = self._schema
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(part)] if isinstance(target, list) else target[part]
            except (LookupError, TypeError, ValueError):
                raise self._fail(f"there is no {pointer:.80}") from None
        name = self._of_reference[pointer] = f"ref{len(self._of_reference)}"
        before, self._path = self._path, pointer.split("/")[1:]
        rule = self._convert(target)
        self._path = before
        if rule == name:
            raise self._fail(f"{pointer} points to itself")
        return self._add(rule, name)

    def _enum(self, key: str, schema: Mapping[str, Any]) -> str:
        values = schema[key]
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise self._fail(f"enum must be a list, not {values!r:.80}")
        return self._literals(values, schema)

    def _const(self, key: str, schema: Mapping[str, Any]) -> str:
        return self._literals([schema[key]], schema)

    def _literals(self, values: Sequence[Any], schema: Mapping[str, Any]) -> str:
        kinds = self._types(schema) if "type" in schema else list(KEYWORDS)
        texts = [literal(self._json(value)) for value in values if any(_is_a(value, kind) for kind in kinds)]
        if not texts:
            raise self._fail("no value is allowed")
        return self._add(" | ".join(texts))

    def _any_of(self, key: str, schema: Mapping[str, Any]) -> str:
        options = schema[key]
        if not isinstance(options, list) or not options:
            raise self._fail(f"{key} must be a list of schemas, not {options!r:.80}")
        rules = [self._inside(f"{key}/{i}", option) for i, option in enumerate(options) if option is not False]
        if not rules:
            raise self._fail(f"{key} allows nothing")
        return self._add(" | ".join(dict.fromkeys(rules)))

    def _all_of(self, key: str, schema: Mapping[str, Any]) -> str:
        options = schema[key]
        if not isinstance(options, list) or len(options) != 1:
            raise self._fail("allOf is supported with one schema alone")
        return self._inside(f"{key}/0", options[0])

    # ------------------------------------------------------------ types

    def _types(self, schema: Mapping[str, Any]) -> list[str]:
        given = schema["type"]
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) and k in KEYWORDS for k in kinds):
            raise self._fail(f"type must be of {', '.join(KEYWORDS)}, not {given!r:.80}")
        return kinds

    def _typed(self, schema: Mapping[str, Any], keys: set[str]) -> str:
        if "type" in schema:
            kinds = self._types(schema)
        else:  # what the keywords are about
            kinds = [kind for kind, known in KEYWORDS.items() if keys & known and kind != "integer"]
        self._refuse_others(keys - {"type"}, set().union(*(KEYWORDS[kind] for kind in kinds)))
        convert: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "string": self._string,
            "integer": lambda s: self._number(s, whole=True),
            "number": lambda s: self._number(s, whole=False),
            "array": self._array,
            "object": self._object,
        }
        rules = [convert[kind](schema) if kind in convert else kind for kind in kinds]
        return rules[0] if len(rules) == 1 else self._add(" | ".join(rules))

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "format" in schema:
            name = schema["format"]
            if name not in FORMATS:
                raise self._fail(f"the format {name!r:.80} is not supported: there are {', '.join(FORMATS)}")
            if "minLength" in schema or "maxLength" in schema:
                raise self._fail("a length beside a format is not supported")
            return self._add(rf'"\"" {name} "\""')
        if "minLength" not in schema and "maxLength" not in schema:
            return "string"
        return self._add(rf'"\"" char{self._repetitions(schema, "minLength", "maxLength")} "\""')

    def _number(self, schema: Mapping[str, Any], whole: bool) -> str:
        low, low_is_out = self._bound(schema, "minimum", "exclusiveMinimum", max)
        high, high_is_out = self._bound(schema, "maximum", "exclusiveMaximum", min)
        if low == -math.inf and high == math.inf:
            return "integer" if whole else "number"
        alternatives = magnitudes(low, low_is_out, high, high_is_out, whole)
        alternatives += [f'"-" ({text})' for text in magnitudes(-high, high_is_out, -low, low_is_out, whole)]
        if not alternatives:
            raise self._fail("no number within the bounds can be written (those of a number must enclose an integer)")
        return self._add(" | ".join(alternatives))

    def _bound(
        self, schema: Mapping[str, Any], plain: str, exclusive: str, tighter: Callable[[Any], Any]
    ) -> tuple[float, bool]:
        """A bound, infinite if there is none, and whether it is itself out."""
        bounds: list[tuple[float, bool]] = []
        for key, is_out in ((plain, False), (exclusive, True)):
            value = schema.get(key)
            if key in schema:
                if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 10**MAX_DIGITS:
                    raise self._fail(f"{key} must be a number of at most {MAX_DIGITS} digits, not {value!r:.80}")
                bounds.append((value, is_out))
        if not bounds:
            return (-math.inf if plain == "minimum" else math.inf), False
        limit = tighter(value for value, _ in bounds)
        return limit, (limit, True) in bounds

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise self._fail(f"prefixItems must be a list of schemas, not {first!r:.80}")
        fixed = [self._inside(f"prefixItems/{i}", item) for i, item in enumerate(first)]
        low, high = self._limits(schema, "minItems", "maxItems")
        items = schema.get("items", not fixed or low > len(fixed))
        more = None if items is False else self._inside("items", items)
        if more is None:
            high = len(fixed) if high is None else min(high, len(fixed))
        if high is not None and low > high:
            raise self._fail("minItems is more than there can be")
        if fixed:
            n = len(fixed) if high is None else min(high, len(fixed))
            text = ' space "," space '.join(fixed[:n])
            if more is not None and (high is None or high > n):
                rest = self._add(f'space "," space {more}')
                text += f" {rest}{_times(max(0, low - n), None if high is None else high - n)}"
            return self._add(f'"[" space {text} space "]"' if n else '"[" space "]"')
        if more is None or high == 0:
            return self._add('"[" space "]"')
        rest = self._add(f'space "," space {more}')
        text = f"{more} {rest}{_times(max(0, low - 1), None if high is None else high - 1)} space"
        return self._add(f'"[" space {text if low else f"({text})?"} "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
            raise self._fail(f"properties must be a dict of schemas, not {properties!r:.80}")
        if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
            raise self._fail(f"required must be a list of names, not {required!r:.80}")
        unnamed = [name for name in required if name not in properties]
        if unnamed and others is False:
            raise self._fail(f"{unnamed[0]!r:.80} is required, but no such property is allowed")
        if not properties and not unnamed:
            return self._free_object(others)
        members = []
        for name, value in [*properties.items(), *((name, others) for name in unnamed)]:
            if value is False:
                if name in required:
                    raise self._fail(f"{name!r:.80} is required, but not allowed")
                continue
            rule = self._inside(f"properties/{name}", value)
            members.append((self._add(f'{literal(self._json(name))} space ":" space {rule}'), name in required))
        # From the last to the first: what can come when something stands before it, and when nothing does.
        after, alone = "", ""
        for rule, is_required in reversed(members):
            first = f"{rule} {after} space"
            with_it = f'space "," space {rule} {after}'
            if is_required:
                alone, after = self._add(first), self._add(with_it)
            elif after:
                alone, after = self._add(f"{first} | {alone}"), self._add(f"{with_it} | {after}")
            else:
                alone, after = self._add(first), self._add(f"({with_it})?")
        optional = not any(is_required for _, is_required in members)
        return self._add(f'"{{" space {f"({alone})?" if optional else alone} "}}"' if members else '"{" space "}"')

    def _free_object(self, values: Any) -> str:
        """An object with any names."""
        if values is False:
            return self._add('"{" space "}"')
        if values is True:
            return "object"
        member = self._add(f'string space ":" space {self._inside("additionalProperties", values)}')
        return self._add(f'"{{" space ({member} (space "," space {member})* space)? "}}"')

    # ------------------------------------------------------------ small parts

    def _json(self, value: Any) -> str:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise self._fail(f"{value!r:.80} is no JSON: {e}") from None

    def _limits(self, schema: Mapping[str, Any], low_key: str, high_key: str) -> tuple[int, int | None]:
        for key in (low_key, high_key):
            value = schema.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self._fail(f"{key} must be an integer from 0, not {value!r:.80}")
        low, high = schema.get(low_key, 0), schema.get(high_key)
        if low > MAX_REPETITIONS:
            raise self._fail(f"{low_key} is more than {MAX_REPETITIONS}")
        if high is not None and low > high:
            raise self._fail(f"{low_key} is more than {high_key}")
        return low, None if high is None else min(high, MAX_REPETITIONS)

    def _repetitions(self, schema: Mapping[str, Any], low_key: str, high_key: str) -> str:
        return _times(*self._limits(schema, low_key, high_key))


def magnitudes(low: float, low_is_out: bool, high: float, high_is_out: bool, whole: bool) -> list[str]:
    """GBNF for the numbers from 0 on, without a sign, within bounds; nothing if there is none."""
    if low < 0:
        low, low_is_out = 0, False
    first = math.floor(low) + 1 if low_is_out else math.ceil(low)  # the first and the last integer within
    top = 10**MAX_DIGITS - 1
    last = top if high > top else math.ceil(high) - 1 if high_is_out else math.floor(high)
    alternatives = integers(first, last)
    if whole:
        return alternatives
    # a fraction after an integer whose successor is within too, or is the limit that is out
    last_before = last if high > top or (high_is_out and last + 1 == high) else last - 1
    alternatives += [f"({text}) fraction" for text in integers(first, last_before)]
    if low_is_out and low == first - 1 and first - 1 <= last_before:
        alternatives.append(f'"{first - 1}." digits [1-9]')
    return alternatives


def integers(low: int, high: int) -> list[str]:
    """GBNF for the decimal integers from low to high, both from 0 on: one text for each block of equal digits."""
    result = []
    while low <= high:
        size = 1  # of the largest block that begins at low: digits that are free at the end
        while low % (size * 10) == 0 and low + size * 10 - 1 <= high and low >= size * 10:
            size *= 10
        digit = low // size % 10
        n = min(9 - digit, (high - low + 1) // size - 1)  # blocks more that differ in one digit
        head = str(low // size // 10) if low // size >= 10 else ""
        free = len(str(size)) - 1
        text = f'"{head}" ' if head else ""
        text += f"[{digit}-{digit + n}]" if n else f'"{digit}"'
        result.append(text + (f" [0-9]{{{free}}}" if free else ""))
        low += (n + 1) * size
    return result


def literal(text: str) -> str:
    """A text as GBNF writes it."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02X}" for c in quoted) + '"'


def _names(text: str) -> set[str]:
    """The rules of `RULES` that a text may name."""
    word = "".join(c if c.isalnum() or c == "-" else " " for c in text)
    return set(word.split())


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _is_a(value: Any, kind: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "string": isinstance(value, str),
        "integer": is_number and float(value).is_integer(),
        "number": is_number,
        "boolean": isinstance(value, bool),
        "null": value is None,
        "array": isinstance(value, list | tuple),
        "object": isinstance(value, Mapping),
    }[kind]
