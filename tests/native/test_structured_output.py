"""Grammars, JSON schemas, logit bias and log-probabilities on the embedded model."""

from __future__ import annotations

import contextlib
import json
import math
import re
import uuid
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_commands import command
from test_generation import PROMPT
from test_other_models import N_EMBD, N_VOCAB, write_dense

import pyhotexperts as phx

HOT: dict[str, Any] = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0}  # writes what it may, not what is likely

PERSON = {
    "$defs": {
        "place": {"type": "object", "properties": {"near": {"$ref": "#/$defs/place"}, "name": {"enum": ["A", "Ö"]}}}
    },
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "height": {"type": "number", "exclusiveMinimum": 0, "maximum": 3},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"', "c\n"]}, "minItems": 1, "maxItems": 3},
        "born": {"type": ["string", "null"], "format": "date"},
        "place": {"$ref": "#/$defs/place"},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "tags", "place"],
}


@pytest.mark.parametrize("seed", range(6))
def test_a_text_by_a_schema_is_valid(model: phx.Model, seed: int) -> None:
    result = model.generate(PROMPT, json_schema=PERSON, seed=seed, max_tokens=1500, **HOT)
    assert result.finish_reason == "stop"
    jsonschema.validate(json.loads(result.text), PERSON)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of the subset that is supported; numbers and lists small, so that texts end."""
    bound = st.integers(-30, 30)
    leaves = st.one_of(
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, bound, bound),
        st.builds(lambda a, n: {"type": "number", "minimum": a, "exclusiveMaximum": a + n}, bound, st.integers(1, 40)),
        st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": n + 2}, st.integers(0, 4)),
        st.sampled_from([{"type": "boolean"}, {"type": ["null", "boolean"]}, {"const": {"a": [1, None]}}]),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda items, n: {"type": "array", "items": items, "minItems": n, "maxItems": n + 2},
                inner,
                st.integers(0, 2),
            ),
            st.builds(
                lambda props, needed: {
                    "type": "object",
                    "properties": props,
                    "required": [p for p in props if p in needed],
                },
                st.dictionaries(st.sampled_from('abcdé"'), inner, min_size=1, max_size=4),
                st.sets(st.sampled_from('abcdé"')),
            ),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=5,
    )


@settings(max_examples=25)
@given(schemas(), st.integers(0, 1000))
def test_texts_by_any_schema_are_valid(shared_model: phx.Model, schema: dict[str, Any], seed: int) -> None:
    result = shared_model.generate([0], json_schema=schema, seed=seed, max_tokens=1500, **HOT)
    assert result.finish_reason == "stop"
    jsonschema.validate(json.loads(result.text), schema)


@pytest.mark.parametrize("seed", range(3))
def test_formats(model: phx.Model, seed: int) -> None:
    def text(form: str) -> str:
        schema = {"type": "string", "format": form}
        return str(json.loads(model.generate([0], json_schema=schema, seed=seed, **HOT).text))

    def plain(moment: str) -> str:  # as Python 3.10 reads it
        return re.sub(r"\.\d+", "", moment).replace("Z", "+00:00")

    assert uuid.UUID(text("uuid"))
    assert date.fromisoformat(text("date"))
    assert time.fromisoformat(plain(text("time"))).tzinfo
    assert datetime.fromisoformat(plain(text("date-time"))).tzinfo


def test_everything_that_a_schema_allows_can_come(model: phx.Model) -> None:
    schema = {"properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["b"]}
    seen = {json.dumps(json.loads(model.generate([0], json_schema=schema, seed=s, **HOT).text)) for s in range(60)}
    assert seen == {
        '{"b": true}',
        '{"b": false}',
        '{"a": 1, "b": true}',
        '{"a": 1, "b": false}',
        '{"a": 2, "b": true}',
        '{"a": 2, "b": false}',
    }


def test_any_json(model: phx.Model) -> None:
    text = model.generate(
        "[1, ",
        json_schema=json.dumps({"type": "object", "additionalProperties": {"type": "integer"}}),
        seed=2,
        max_tokens=900,
        **HOT,
    ).text
    assert all(isinstance(value, int) for value in json.loads(text).values())


def test_a_grammar_is_followed_and_ends_the_text(model: phx.Model) -> None:
    grammar = '# a date\nroot ::= year "-" [0-1] [0-9]\nyear ::= [0-9]{4}\n'
    result = model.generate(PROMPT, grammar=grammar, temperature=0)
    assert len(result.text) == 7
    assert result.text[4] == "-"
    assert (result.text[:4] + result.text[5:]).isdigit()
    assert result.tokens[-1] == model.info.token_eos
    with model.stream(PROMPT, grammar=grammar, temperature=0) as stream:
        assert "".join(chunk.text for chunk in stream) == result.text


def test_a_grammar_leaves_a_text_that_follows_it_as_it_is(model: phx.Model) -> None:
    free = model.generate(PROMPT, seed=3, max_tokens=30)
    assert model.generate(PROMPT, seed=3, max_tokens=30, grammar=r"root ::= [^\x00]*").tokens == free.tokens


def test_a_prompt_need_not_follow_the_grammar(model: phx.Model) -> None:
    result = model.generate(PROMPT, grammar='root ::= "yes" | "no"', repeat_penalty=1.3, seed=1)
    assert result.text in ("yes", "no")


def chain(rule: str, n: int) -> str:
    """Rules r0 ... r<n>, each of which begins with the next one."""
    return "".join(rule.format(i, i + 1) for i in range(n)) + f'r{n} ::= "a"\n'


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "text without zero bytes"),
        ("root ::= \0", "text without zero bytes"),
        (7, "text without zero bytes"),
        ("root ::= \"\ud800\"", "not valid Unicode"),
        ("root := x", "expecting ::="),
        ("root ::= x", "no rule 'x'"),
        ("a ::= \"b\"", "no rule 'root'"),
        ("# nothing\n", "no rule 'root'"),
        ("root ::= (\"a\"", r"expecting '\)'"),
        ("root ::= \"a", "unexpected end"),
        ("root ::= [a", "unexpected end"),
        ("root ::= \"\\q\"", "unknown escape"),
        ("x ::= \"a\"\nroot ::= *", "line 2"),
        ("root ::= \"a\"{5000}", "repetitions exceeds"),
        ("root ::= \"a\"{3, # comment\n 2}", r"\{3,2\} has its limits in the wrong order"),
        ("root ::= \"a\"{99999999999999999999}", "repetitions are too many"),
        ("root ::= \"" + "a" * 100_000 + "\"{50}", "of too long texts"),
        ("root ::= \"" + "a" * 10_000 + "\"{30}{30}", "of too long texts"),
        ("root ::= " + "[ab]{0,2000} " * 200, "repetitions are too many"),
        ("root ::= root \"a\" | \"b\"", "'root' is left-recursive"),
        ("root ::= a \"x\"\na ::= b?\nb ::= a", "left-recursive"),
        ("root ::= " + "(" * 5000 + "\"a\"" + ")" * 5000, "200 parentheses"),
        ("root ::= r0\n" + chain("r{0} ::= r{1}\n", 9000), "too deeply"),
        ("root ::= r0\n" + chain("r{0} ::= r{1} | r{1}\n", 60), "too many ways"),
        ("root ::= \"" + "a" * 2_000_000 + "\"", "1048576 bytes"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused(
    model: phx.Model, capfd: pytest.CaptureFixture[str], grammar: Any, message: str
) -> None:
    with pytest.raises(phx.GrammarError, match=message):
        model.generate(PROMPT, grammar=grammar)
    assert capfd.readouterr() == ("", "")
    assert model.generate(PROMPT, max_tokens=1).tokens


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([*'root::=abc"[]()*+?{},.|<>!#\\\n -^019é', ' "a" ', "\nroot ::= ", "{3,1}"]), max_size=30)
)
def test_no_grammar_harms_the_process(shared_model: phx.Model, parts: list[str]) -> None:
    with contextlib.suppress(phx.GrammarError, phx.DecodeError):
        shared_model.generate([0], grammar='root ::= "a" ' + "".join(parts), max_tokens=2)


def test_parentheses_in_literals_and_comments_do_not_nest(model: phx.Model) -> None:
    many = "(" * 300
    grammar = f'root ::= "{many}\\"" [({many}\\]] "x" # {many}\n'
    assert model.generate(PROMPT, grammar=grammar, temperature=0).text.startswith(many + '"')


def test_a_grammar_and_a_schema_contradict_each_other(model: phx.Model) -> None:
    with pytest.raises(phx.ConfigError, match="contradict"):
        model.generate(PROMPT, grammar="root ::= [a]", json_schema={})


def test_a_model_without_a_tokenizer_takes_no_grammar(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "dense.gguf")
    with phx.Model(path, n_threads=1) as dense, pytest.raises(phx.UnavailableError, match="no tokenizer"):
        dense.generate([1], grammar="root ::= [a]")


# ---------------------------------------------------------------- logit bias


def test_logit_bias_changes_what_is_chosen(model: phx.Model) -> None:
    first = model.generate(PROMPT, temperature=0, max_tokens=1).tokens[0]
    never = model.generate(PROMPT, temperature=0, max_tokens=20, logit_bias={first: -math.inf}).tokens
    assert first not in never
    assert model.generate(PROMPT, temperature=0, max_tokens=3, logit_bias={77: 1000.0}).tokens == (77, 77, 77)
    assert model.generate(PROMPT, seed=1, max_tokens=3, logit_bias={77: 1000}).tokens == (77, 77, 77)


@pytest.mark.parametrize("bias", [{8192: 1}, {-1: 1}, {"a": 1}, {1: math.nan}, {1: math.inf}, {1: "x"}, [1], {1: 1e5}])
def test_a_bad_logit_bias_is_refused(model: phx.Model, bias: Any) -> None:
    with pytest.raises(phx.ConfigError, match=r"logit_bias|outside the vocabulary"):
        model.generate(PROMPT, logit_bias=bias)


def test_no_token_left_to_choose_is_an_error(model: phx.Model) -> None:
    nothing = dict.fromkeys(range(model.info.n_vocab), -math.inf)
    for sampling in ({"temperature": 0}, {"temperature": 1}, {"grammar": "root ::= [a-z]"}):
        with pytest.raises(phx.DecodeError, match=r"no token can be chosen|allows none"):
            model.generate(PROMPT, logit_bias=nothing, **sampling)
    with pytest.raises(phx.DecodeError, match="allows none of the model's tokens"):
        model.generate(PROMPT, grammar="root ::= <[99999999]>")
    # the name of a token after a part of another token's text: upstream allows the latter and cannot go on after it
    with pytest.raises(phx.DecodeError, match="cannot go on after a token that it allowed"):
        model.generate(PROMPT, grammar="root ::= . !<[7]>", logit_bias={6916: 1000}, temperature=0)
    assert model.generate(PROMPT, max_tokens=1).tokens


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models(model: phx.Model) -> None:
    result = model.generate(PROMPT, seed=4, temperature=1.5, max_tokens=8, logprobs=5, repeat_penalty=1.3)
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == list(result.tokens)
    model.reset()
    model.eval(PROMPT)
    for entry in result.logprobs:
        logits = model.logits.astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert math.isclose(entry.logprob, expected[entry.token], abs_tol=1e-6)
        best = np.argsort(-expected)[:5]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], expected[best], atol=1e-6)
        model.eval([entry.token])
    assert result.tokens[0] != result.logprobs[0].top[0][0] or len({t.top[0][0] for t in result.logprobs}) > 1


def test_logprobs_of_a_stream_and_of_none_but_the_chosen(model: phx.Model) -> None:
    whole = model.generate(PROMPT, temperature=0, max_tokens=9, logprobs=0).logprobs
    with model.stream(PROMPT, temperature=0, max_tokens=9, logprobs=0) as stream:
        parts = [entry for chunk in stream for entry in chunk.logprobs or ()]
    assert tuple(parts) == whole
    assert whole is not None
    assert all(entry.top == () for entry in whole)
    assert model.generate(PROMPT, max_tokens=2).logprobs is None
    with pytest.raises(phx.ConfigError, match="logprobs"):
        model.generate(PROMPT, logprobs=-1)


# ---------------------------------------------------------------- embeddings


def test_a_model_that_gives_no_embeddings_says_so(model: phx.Model) -> None:
    with pytest.raises(phx.UnavailableError, match="gives no embeddings"):
        model.embed("Hello")
    assert model.generate(PROMPT, max_tokens=1).tokens


def test_a_model_that_gives_embeddings_gives_them(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "embedder.gguf", lambda writer: writer.add_uint32("llama.pooling_type", 3))
    with phx.Model(path, n_threads=1) as embedder:
        assert embedder.info.n_embd_out == N_EMBD
        one, same, other = (embedder.embed(ids) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4]))
        assert one.shape == (N_EMBD,)
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, same)
        assert np.abs(one - other).max() > 0.1
        assert embedder.embed(list(range(N_VOCAB)) * 12).shape == (N_EMBD,)  # longer than the context
        embedder.eval([1, 2, 3])  # the last token's state: its logits are the output matrix times it
        assert embedder.logits.shape == (N_VOCAB,)


# ---------------------------------------------------------------- the command


def test_the_command_takes_grammars_and_schemas(tmp_path: Path) -> None:
    grammar = tmp_path / "yes.gbnf"
    grammar.write_text('root ::= "yes"\n', encoding="utf-8")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [17]}', encoding="utf-8")
    flags = ("generate", "-p", "a", "-t", "1", "--no-display-prompt")
    assert command(*flags, "--grammar-file", str(grammar)).stdout == b"yes\n"
    assert command(*flags, "-jf", str(schema)).stdout == b"17\n"
    assert command(*flags, "-j", '{"const": "x"}').stdout == b'"x"\n'
    wrong = command(*flags, "--grammar", "root ::= x")
    assert wrong.returncode == 1
    assert wrong.stderr.count(b"\n") == 1
    assert b"there is no rule 'x'" in wrong.stderr
    assert b"cannot read the grammar missing" in command(*flags, "--grammar-file", "missing").stderr
