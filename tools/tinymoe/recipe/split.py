"""Removes boilerplate and duplicates, holds out documents, writes the corpus and the validation texts.

Documents are dicts as in docs/<domain>.jsonl (`s` source, `i` identifier, `t` text); here `d`, the domain, is
added.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from . import DOMAINS, MAX_CHARS
from .cleaning import clean

Doc = dict[str, str]

_SEED = 20240607
_MIN_CHARS = 200


def read_jsonl(path: Path) -> list[Doc]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_jsonl(path: Path, documents: Iterable[Doc]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")


def text_bytes(documents: Iterable[Doc]) -> int:
    return sum(len(document["t"].encode()) for document in documents)


def package_of(document: Doc) -> str:
    return document["s"].split(" ")[0]


def drop_boilerplate(documents: list[Doc]) -> None:
    """Remove, in place, the lines of 25 or more characters that very many documents of one package share."""
    line_counts: collections.Counter[tuple[str, str]] = collections.Counter()
    document_counts: collections.Counter[str] = collections.Counter()
    for document in documents:
        package = package_of(document)
        document_counts[package] += 1
        for line in {line.strip() for line in document["t"].split("\n") if len(line.strip()) >= 25}:
            line_counts[package, line] += 1
    boilerplate = {
        (package, line)
        for (package, line), count in line_counts.items()
        if count > max(12, 0.02 * document_counts[package])
    }
    for document in documents:
        package = package_of(document)
        lines = document["t"].split("\n")
        document["t"] = clean("\n".join(line for line in lines if (package, line.strip()) not in boilerplate))


def drop_duplicates(documents: list[Doc]) -> list[Doc]:
    """Return the documents without the short ones, exact copies and near copies.

    Copies are compared by letters and digits alone. A near copy is one of whose long lines (30 or more
    characters, at least 4 of them) more than half stand in documents kept before it.
    """
    seen_texts = set()
    seen_lines: set[int] = set()
    kept = []
    for document in documents:
        text = document["t"]
        if len(text) < _MIN_CHARS:
            continue
        digest = hashlib.md5(re.sub(r"\W+", "", text.lower()).encode(), usedforsecurity=False).digest()
        if digest in seen_texts:
            continue
        seen_texts.add(digest)
        lines = [hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= 30]
        if len(lines) >= 4 and sum(line in seen_lines for line in lines) / len(lines) > 0.5:
            continue
        seen_lines.update(lines)
        kept.append(document)
    return kept


def limit_chars(documents: list[Doc], max_chars: float) -> list[Doc]:
    """Return the first documents, up to and with the one that exceeds `max_chars`."""
    total = 0
    for count, document in enumerate(documents):
        if total > max_chars:
            return documents[:count]
        total += len(document["t"])
    return documents


def hold_out(documents: list[Doc]) -> tuple[list[Doc], list[Doc]]:
    """Return (held out, rest): the first 2 % of the documents, at least 230 kB, about 600 kB at most."""
    wanted = 0.02 * len(documents)
    size = 0
    for count, document in enumerate(documents):
        if not ((count < wanted and size < 600e3) or size < 230e3):
            return documents[:count], documents[count:]
        size += len(document["t"].encode())
    return documents, []


def validation_texts(held_out: list[Doc]) -> list[str]:
    """Return texts of about 195 kB in all, none of them above 60 kB."""
    texts: list[str] = []
    total = 0
    for document in held_out:
        size = len(document["t"].encode())
        if (total + size > 215e3 and total > 150e3) or size > 60e3:
            continue
        texts.append(document["t"])
        total += size
        if total >= 195e3:
            break
    return texts


def split(work: Path) -> None:
    """Read work/docs; write work/corpus/{train,val}.jsonl and stats.json, work/out/val_<domain>.txt."""
    rng = random.Random(_SEED)
    corpus = work / "corpus"
    out = work / "out"
    corpus.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    train: list[Doc] = []
    val: list[Doc] = []
    stats = {}
    for domain in DOMAINS:
        documents = read_jsonl(work / "docs" / f"{domain}.jsonl")
        extracted = {
            "docs_extracted": len(documents),
            "chars_extracted": sum(len(document["t"]) for document in documents),
        }
        if domain not in ("python", "c"):
            drop_boilerplate(documents)
        rng.shuffle(documents)
        kept = limit_chars(drop_duplicates(documents), MAX_CHARS[domain])
        for document in kept:
            document["d"] = domain
        held_out, rest = hold_out(kept)
        texts = validation_texts(held_out)
        with open(out / f"val_{domain}.txt", "w", encoding="utf-8") as file:
            file.write("\n\n".join(texts) + "\n")
        stats[domain] = {
            **extracted,
            "docs_kept": len(kept),
            "chars_kept": sum(len(document["t"]) for document in kept),
            "bytes_train": text_bytes(rest),
            "docs_train": len(rest),
            "docs_val": len(held_out),
            "bytes_val": text_bytes(held_out),
            "val_txt_bytes": sum(len(text.encode()) for text in texts),
            "val_txt_docs": len(texts),
        }
        print(domain, stats[domain], flush=True)
        train += rest
        val += held_out
    rng.shuffle(train)
    write_jsonl(corpus / "train.jsonl", train)
    write_jsonl(corpus / "val.jsonl", val)

    per_source: dict[str, list[int]] = {}
    for document in train:
        entry = per_source.setdefault(f"{document['d']}\t{document['s']}", [0, 0])
        entry[0] += 1
        entry[1] += len(document["t"].encode())
    with open(corpus / "stats.json", "w", encoding="utf-8") as file:
        json.dump({"stats": stats, "per": per_source}, file, indent=1)
    print(f"train {text_bytes(train) / 1e6:.1f} MB")
