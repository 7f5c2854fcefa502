"""The scripts that made the embedded model (tools/tinymoe), as far as they can be tried without PyTorch."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "tinymoe"
DATA = ROOT / "src" / "pyhotexperts" / "data"


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def document(text: str, source: str = "manual") -> dict[str, str]:
    return {"s": source, "i": "", "t": text}


class TestCacheSimulation:
    """cachesim: hit rates worked out by hand."""

    def test_lru_replaces_the_longest_unused(self) -> None:
        lru = import_module("cachesim").lru
        # 0 and 1 miss, 0 hits, 2 replaces 1, 0 hits, 1 misses
        assert lru([[0], [1], [0], [2], [0], [1]], 2) == pytest.approx(2 / 6)
        assert lru([[0], [1], [2], [0], [1], [2]], 2) == 0

    def test_lru_loads_the_experts_of_a_token_together(self) -> None:
        # two misses, then 1 hits and 2 replaces 0, then 2 hits
        assert import_module("cachesim").lru([[0, 1], [1, 2], [0, 2]], 2) == pytest.approx(2 / 6)

    def test_lfu_keeps_what_is_used_often(self) -> None:
        cachesim = import_module("cachesim")
        trace = [[0], [0], [1], [2], [0], [2]]
        assert cachesim.lfu_window(trace, 2, window=4) == pytest.approx(3 / 6)  # 2 replaces 1
        assert cachesim.lru(trace, 2) == pytest.approx(2 / 6)  # 2 replaces 0

    def test_lfu_forgets_uses_outside_the_window(self) -> None:
        lfu_window = import_module("cachesim").lfu_window
        trace = [[0], [0], [0], [1], [2], [1]]
        assert lfu_window(trace, 2, window=1) == pytest.approx(3 / 6)  # 0 goes: unused for longer than 1
        assert lfu_window(trace, 2, window=256) == pytest.approx(2 / 6)  # 1 goes: used less often

    def test_belady_replaces_what_is_needed_last(self) -> None:
        # 2 replaces 1, 0 hits, 1 replaces 0, 2 hits
        assert import_module("cachesim").belady([[0], [1], [2], [0], [1], [2]], 2) == pytest.approx(2 / 6)

    def test_fixed_set_counts_the_most_used(self) -> None:
        best_fixed_set = import_module("cachesim").best_fixed_set
        assert best_fixed_set([[0, 1], [1, 2], [1, 3]], 2) == pytest.approx(4 / 6)

    @pytest.mark.parametrize("slots", [4, 6, 10, 16])
    def test_no_policy_beats_belady(self, slots: int) -> None:
        cachesim = import_module("cachesim")
        rng = random.Random(7)
        experts = range(16)
        weights = [1 / (1 + expert) for expert in experts]
        trace = [list(dict.fromkeys(rng.choices(experts, weights, k=4))) for _ in range(600)]
        best = cachesim.belady(trace, slots)
        assert 0 < cachesim.lru(trace, slots) <= best
        assert 0 < cachesim.lfu_window(trace, slots, window=32) <= best

    @pytest.mark.parametrize("policy", ["lru", "lfu_window", "belady"])
    def test_with_room_for_all_only_first_uses_miss(self, policy: str) -> None:
        trace = [[0, 1], [2, 3], [0, 3], [1, 2]]
        assert getattr(import_module("cachesim"), policy)(trace, 4) == pytest.approx(4 / 8)

    @pytest.mark.parametrize("policy", ["lru", "lfu_window", "belady", "best_fixed_set"])
    def test_too_few_slots_for_a_token_are_refused(self, policy: str) -> None:
        simulate = getattr(import_module("cachesim"), policy)
        with pytest.raises(ValueError, match="1 slots cannot hold the 2 experts"):
            simulate([[0, 1]], 1)
        with pytest.raises(ValueError, match="empty"):
            simulate([], 4)


class TestCleaning:
    @pytest.mark.parametrize(
        ("raw", "cleaned"),
        [
            ("\na\r\nb\rc\n\n", "a\nb\nc"),
            ("a  \t\nb", "a\nb"),
            ("soft\xadware\xa0and\u200b\ufeff bell\x07", "software and bell"),
            ("a\n\n\n\n\nb", "a\n\nb"),
            ("list\n* \n\nitem", "list\n* item"),
            ("* Next\n\nText", "Text"),
            ("keep\ttabs", "keep\ttabs"),
        ],
    )
    def test_clean(self, raw: str, cleaned: str) -> None:
        assert import_module("recipe.cleaning").clean(raw) == cleaned

    @pytest.mark.parametrize(
        ("raw", "cleaned"),
        [
            ("#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\nimport os\n", "import os"),
            ("# Copyright 2000 Somebody\n# All rights.\nimport os\n", "import os"),
            ("# What this is for.\nimport os\n", "# What this is for.\nimport os"),
            ("// SPDX-License-Identifier: X\n/*\n * Copyright (C) Somebody\n */\nint a;\n", "int a;"),
            ("/* what it does */\nint a;\n", "/* what it does */\nint a;"),
            ("a = 1  \n\n\n\n\n\nb = 2", "a = 1\n\n\nb = 2"),
        ],
    )
    def test_clean_code(self, raw: str, cleaned: str) -> None:
        assert import_module("recipe.cleaning").clean_code(raw) == cleaned

    def test_chunks_cut_at_blank_lines_and_lose_nothing(self) -> None:
        chunks = import_module("recipe.cleaning").chunks
        text = "\n\n".join(["a" * 30, "b" * 30, "c" * 30, "d" * 10])
        pieces = list(chunks(text, 60))
        assert pieces == ["a" * 30 + "\n\n" + "b" * 30, "c" * 30 + "\n\n" + "d" * 10]
        assert "\n\n".join(pieces) == text

    @pytest.mark.parametrize(
        ("text", "language"),
        [
            ("The house is not for the people of that street.", "en"),
            ("La maison est dans la rue et le chat dort avec nous.", "fr"),
            ("Das Haus steht in der Straße und die Katze ist nicht da.", "de"),
            ("La casa es para los hombres del pueblo y no se vende.", "es"),
        ],
    )
    def test_language(self, text: str, language: str) -> None:
        found, share = import_module("recipe.cleaning").language_of(text)
        assert found == language
        assert 0.2 < share < 1

    def test_language_of_nothing(self) -> None:
        assert import_module("recipe.cleaning").language_of("123")[1] == 0

    def test_collector_leaves_out_the_short_and_the_foreign(self) -> None:
        collector = import_module("recipe.readers").Collector("/packages")
        german = "Das Haus steht in der Straße und die Katze ist nicht da. " * 6
        collector.add("de", "manual", "/packages/manual/a", german)
        collector.add("fr", "manual", "/packages/manual/b", german)
        collector.add("de", "manual", "/packages/manual/c", german[:100])
        assert [found.ident for found in collector.documents["de"]] == ["manual/a"]
        assert collector.documents["fr"] == []

    def test_html(self) -> None:
        pytest.importorskip("selectolax")
        html_text = import_module("recipe.markup").html_text
        page = """<html><head><title>x</title></head><body><nav>menu</nav><h1>Head</h1>
            <p>One  <b>two</b>.</p><ul><li>first</li><li>second</li></ul><div class="footer">end</div>
            <pre>a
  b</pre><table><tr><td>1</td><td>2</td></tr></table></body></html>"""
        assert html_text(page) == "Head\n\nOne two.\n\n* first\n* second\n\na\n  b\n\n1 | 2"

    def test_game_scenario(self) -> None:
        games = import_module("recipe.games")
        scenario = """
            name= _ "short"
            [message]
                speaker=old_man
                message= _ "Say ""yes"", " + _ "<b>friend</b>."
            [/message]
            [message]
                speaker=narrator
                message= _ "Night fell."
            [/message]
            [message]
                speaker=narrator
                message= _ "Night fell."
            [/message]
        """
        lines = games.scenario_lines(scenario)
        assert lines[1] == ("old_man", 'Say ""yes"", <b>friend</b>.')
        assert games.render_scenario(lines) == 'old man: Say "yes", friend.\n\nNight fell.'
        assert games.render_scenario(lines, {"Night fell.": "Es wurde Nacht."}.get) == "Es wurde Nacht."


class TestSplit:
    def test_boilerplate_lines_go(self) -> None:
        split = import_module("recipe.split")
        notice = "This page is part of the manual of something."
        documents = [document(f"Text of page {number}.\n{notice}") for number in range(20)]
        other = document(f"Another package.\n{notice}", source="other")
        split.drop_boilerplate([*documents, other])
        assert [found["t"] for found in documents] == [f"Text of page {number}." for number in range(20)]
        assert notice in other["t"]

    def test_duplicates_go(self) -> None:
        drop_duplicates = import_module("recipe.split").drop_duplicates
        lines = [f"This is the long line number {number} of a text." for number in range(12)]
        first = document("\n".join(lines[:8]))
        same_letters = document("\n\n".join(line.upper() for line in lines[:8]))
        mostly_seen = document("\n".join(lines[2:10]))
        mostly_new = document("\n".join([*lines[7:], "And one more line that nobody has seen."]))
        short = document("Too short.")
        found = drop_duplicates([first, same_letters, mostly_seen, mostly_new, short])
        assert found == [first, mostly_new]

    def test_limit_keeps_the_document_that_exceeds_it(self) -> None:
        limit_chars = import_module("recipe.split").limit_chars
        documents = [document("x" * 100) for _ in range(5)]
        assert len(limit_chars(documents, 250)) == 3
        assert len(limit_chars(documents, 1e6)) == 5

    def test_hold_out_sizes(self) -> None:
        hold_out = import_module("recipe.split").hold_out
        small = [document("x" * 1000) for _ in range(1000)]
        held_out, rest = hold_out(small)
        assert len(held_out) == 230  # 2 % would be 20 documents: too little text
        assert held_out + rest == small
        assert len(hold_out([document("x" * 50_000)] * 5000)[0]) == 12  # 100 documents would be too much text
        assert hold_out(small[:3]) == (small[:3], [])

    def test_validation_texts_are_about_195_kb(self) -> None:
        validation_texts = import_module("recipe.split").validation_texts
        texts = validation_texts([document("x" * size) for size in (61_000, *[45_000] * 10)])
        assert [len(text) for text in texts] == [45_000] * 4
        assert len(validation_texts([document("x" * 20_000)] * 30)) == 10


def test_card_lists_every_source_with_its_licence() -> None:
    packages = import_module("recipe.packages")
    card = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    table = card.split("| source | version |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]
    assert {row[0]: packages.licence_of(row[0]) for row in rows} == {row[0]: row[5] for row in rows}
    named = {row[0] for row in rows if not row[0].startswith(("pypi:", "cpython"))}
    assert set(packages.DEBIAN_PACKAGES) == named | {"bible-kjv", "mandoc"}
    assert {f"pypi:{module}" for module in packages.PYPI_MODULES} == {
        row[0] for row in rows if row[0].startswith("pypi:")
    }
    with pytest.raises(KeyError, match="no licence recorded"):
        packages.licence_of("something-else")


def test_card_describes_this_model_file() -> None:
    card = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    size, digest = re.findall(r"([\d,]+) bytes, sha256 `(\w+)`", card)[0]
    model = (DATA / "tinymoe-q4_k_m.gguf").read_bytes()
    assert len(model) == int(size.replace(",", ""))
    assert hashlib.sha256(model).hexdigest() == digest


def test_schedule() -> None:
    schedule = import_module("trainer.schedule").schedule
    assert schedule(0, 500)[0] == pytest.approx(0.05 / 10, rel=1e-6)
    assert schedule(10, 500)[0] == pytest.approx(0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 0.02)))
    assert schedule(250, 500)[0] == pytest.approx(0.505)
    assert schedule(500, 500)[0] == pytest.approx(0.01)
    momenta = [schedule(elapsed, 500)[1] for elapsed in (0, 12.5, 25, 400)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])


class TestAnalysis:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        np = pytest.importorskip("numpy")
        rng = np.random.default_rng(3)
        shape = (2, 1024, 1, 8)
        ids = np.argsort(rng.random((*shape[:3], 64)), axis=-1)[..., :8].astype(np.uint8)
        path = tmp_path / "trace.npz"
        np.savez(path, ids=ids, weights=np.full(shape, 0.125, np.float16), domains=np.array(["a", "b"]))
        return path

    def test_counts_and_shares(self, trace: Path) -> None:
        np = pytest.importorskip("numpy")
        analyse = import_module("analyse")
        loaded = analyse.Trace(trace)
        counts = loaded.counts()
        assert counts.shape == (2, 1, 64)
        assert counts.sum() == loaded.ids.size
        assert (loaded.mixed()[1024:, 0] == loaded.ids[1, :, 0]).all()
        assert analyse.top_share(np.array([1, 5, 2, 2]), 2) == pytest.approx(0.7)
        assert analyse.entropy(np.array([0.5, 0.5, 0.0])) == pytest.approx(1)

    def test_report(self, trace: Path) -> None:
        pytest.importorskip("numpy")
        report = trace.with_suffix(".md")
        command = [sys.executable, TOOLS / "analyse.py", trace, "--no-caches", "--out", report]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "| 0 |" in printed
        assert "Overlap of the top-16 sets" in printed
        assert report.read_text(encoding="utf-8") == printed


class TestGguf:
    @pytest.fixture
    def model(self, tmp_path: Path) -> tuple[Any, dict[str, Any], Path]:
        """A tiny configuration, random parameters, and the file of a tokenizer of six tokens."""
        np = pytest.importorskip("numpy")
        pytest.importorskip("gguf")
        config = import_module("trainer.config").ModelConfig(
            n_layer=2, n_embd=64, n_head=2, head_dim=32, n_kv=1, n_expert=4, top_k=2, n_ff=32, vocab=6
        )
        shapes = {"embed": (6, 64), "norm_f": (64,), "head": (6, 64)}
        layer = {
            "attn_norm": (64,),
            "ffn_norm": (64,),
            "q_norm": (32,),
            "k_norm": (32,),
            "wq": (64, 64),
            "wk": (32, 64),
            "wv": (32, 64),
            "wo": (64, 64),
            "router": (4, 64),
            "wgu": (2, 4, 32, 64),
            "wd": (4, 32, 64),
        }
        for number in range(2):
            shapes.update({f"layers.{number}.{name}": shape for name, shape in layer.items()})
        rng = np.random.default_rng(1)
        state = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        tokens = ["<|endoftext|>", "a", "b", "c", "ab", "abc"]
        tokenizer = {
            "model": {
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": ["a b", ["ab", "c"]],
            },
            "added_tokens": [{"id": 0, "content": tokens[0]}],
        }
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(tokenizer), encoding="utf-8")
        return config, state, path

    def test_f32_reads_back_exactly(self, model: tuple[Any, dict[str, Any], Path], tmp_path: Path) -> None:
        ggufio = import_module("ggufio")
        config, state, tokenizer = model
        path = tmp_path / "model.gguf"
        ggufio.write_gguf(path, state, config, tokenizer, qtype=ggufio.GGMLQuantizationType.F32)
        found = ggufio.read_gguf(path, config.n_layer)
        assert found.keys() == state.keys()
        for name, expected in state.items():
            assert (found[name] == expected).all(), name

    def test_q8_0_reads_back_closely(self, model: tuple[Any, dict[str, Any], Path], tmp_path: Path) -> None:
        ggufio = import_module("ggufio")
        config, state, tokenizer = model
        path = tmp_path / "model.gguf"
        ggufio.write_gguf(path, state, config, tokenizer)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model.gguf", "tokenizer.json"]
        found = ggufio.read_gguf(path, config.n_layer)
        for name, expected in state.items():
            error = abs(found[name] - expected).max()
            exact = expected.ndim == 1 or name.endswith("router")
            # a block of 32 is stored in steps of its largest value / 127, rounded, with a 16-bit scale
            assert error == 0 if exact else 0 < error < abs(expected).max() / 127, name

    def test_metadata(self, model: tuple[Any, dict[str, Any], Path], tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        ggufio = import_module("ggufio")
        config, state, tokenizer = model
        path = tmp_path / "model.gguf"
        ggufio.write_gguf(path, state, config, tokenizer)
        fields = gguf.GGUFReader(path).fields
        found = {name: field.contents() for name, field in fields.items()}
        assert found["general.architecture"] == "qwen3moe"
        assert found["qwen3moe.expert_count"] == 4
        assert found["qwen3moe.expert_used_count"] == 2
        assert found["qwen3moe.expert_feed_forward_length"] == 32
        assert found["tokenizer.ggml.tokens"] == ["<|endoftext|>", "a", "b", "c", "ab", "abc"]
        assert found["tokenizer.ggml.merges"] == ["a b", "ab c"]
        assert found["tokenizer.ggml.token_type"] == [3, 1, 1, 1, 1, 1]
        assert found["tokenizer.ggml.bos_token_id"] == 0


class TestTokcheck:
    def test_pieces_are_the_same_at_every_call(self) -> None:
        pieces = import_module("tokcheck").pieces
        text = "".join(chr(97 + number % 26) for number in range(3000))
        found = pieces([text, text[::-1]], 10)
        assert found == pieces([text, text[::-1]], 10)
        assert len(found) == 20
        assert all(3 <= len(piece) < 700 for piece in found)

    def test_records_reach_the_program(self, tmp_path: Path) -> None:
        # stands for the program built from tokcheck.cpp: its "tokens" are the bytes of a record
        program = tmp_path / "program"
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys\n"
            "stdin = sys.stdin.buffer\n"
            "while head := stdin.readline():\n"
            "    print(*stdin.read(int(head)))\n",
            encoding="utf-8",
        )
        program.chmod(0o755)
        strings = ["ab", "", "\n\n", "ä"]
        found = import_module("tokcheck").llama_tokens(program, Path("model.gguf"), strings)
        assert found == [list(string.encode()) for string in strings]


@pytest.mark.parametrize("script", ["prepare.py", "train.py", "analyse.py", "tokcheck.py"])
def test_help_needs_no_heavy_package(script: str) -> None:
    blocked = ["torch", "gguf", "tokenizers", "selectolax"]
    if script == "analyse.py":
        pytest.importorskip("numpy")
    else:
        blocked.append("numpy")
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"  # importing any of them now fails
        f"sys.path.insert(0, {str(TOOLS)!r})\n"
        f"sys.argv = [{script!r}, '--help']\n"
        f"runpy.run_path({str(TOOLS / script)!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {script}")
