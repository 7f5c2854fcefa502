"""Trains the tokenizer and writes the token arrays that train.py reads."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import DOMAINS, END_OF_TEXT, VOCAB_SIZE
from .split import Doc

if TYPE_CHECKING:
    import numpy as np

_BATCH = 512
_TOKENIZER_SHARE = 0.6  # of the training documents
_TOKENIZER_SEED = 1


def train_tokenizer(work: Path) -> None:
    """Train a byte-level BPE (the regular expression of GPT-2) on 60 % of the training documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(_TOKENIZER_SEED)

    def sample() -> Iterator[str]:
        with open(work / "corpus" / "train.jsonl", encoding="utf-8") as file:
            for line in file:
                if rng.random() < _TOKENIZER_SHARE:
                    yield json.loads(line)["t"]

    tokenizer.train_from_iterator(sample(), trainer)
    tokenizer.save(str(work / "corpus" / "tokenizer.json"))
    print(f"vocabulary of {tokenizer.get_vocab_size()} tokens")


def _encoded(tokenizer: Any, path: Path) -> Iterator[tuple[Doc, np.ndarray]]:
    """Yield every document of a file with its tokens, the end-of-text token before them."""
    import numpy as np

    def encode(batch: list[Doc]) -> Iterator[tuple[Doc, np.ndarray]]:
        encodings = tokenizer.encode_batch([document["t"] for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            yield document, np.array([0, *encoding.ids], dtype=np.uint16)

    batch: list[Doc] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            batch.append(json.loads(line))
            if len(batch) >= _BATCH:
                yield from encode(batch)
                batch = []
    yield from encode(batch)


def _write_by_domain(path: Path, arrays: dict[str, list[np.ndarray]]) -> dict[str, list[int]]:
    """Write the arrays one after the other; return the first and last-plus-one token of each domain."""
    import numpy as np

    offsets = {}
    position = 0
    with open(path, "wb") as file:
        for domain in DOMAINS:
            joined = np.concatenate(arrays[domain])
            joined.tofile(file)
            offsets[domain] = [position, position + len(joined)]
            position += len(joined)
    return offsets


def pack(work: Path) -> None:
    """Write the token arrays (uint16) and meta.json.

    corpus/train.bin    all training documents in their shuffled order
    corpus/val.bin      the held-out documents, domain after domain
    corpus/valtxt.bin   out/val_<domain>.txt, each tokenised as one text, for comparisons with llama.cpp
    """
    import numpy as np
    from tokenizers import Tokenizer

    corpus = work / "corpus"
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    if tokenizer.token_to_id(END_OF_TEXT) != 0:
        raise ValueError(f"{END_OF_TEXT} is not token 0 of {corpus / 'tokenizer.json'}: train it again")
    meta: dict[str, Any] = {}
    for part in ("train", "val"):
        arrays: dict[str, list[np.ndarray]] = {domain: [] for domain in DOMAINS}
        in_order: list[np.ndarray] = []
        bytes_of: collections.Counter[str] = collections.Counter()
        for document, tokens in _encoded(tokenizer, corpus / f"{part}.jsonl"):
            arrays[document["d"]].append(tokens)
            in_order.append(tokens)
            bytes_of[document["d"]] += len(document["t"].encode())
        if part == "train":
            np.concatenate(in_order).tofile(corpus / "train.bin")
        else:
            meta["val_offsets"] = _write_by_domain(corpus / "val.bin", arrays)
            texts = _validation_texts(tokenizer, work)
            meta["valtxt_offsets"] = _write_by_domain(corpus / "valtxt.bin", texts)
        meta[part] = {}
        for domain in DOMAINS:
            tokens_of = sum(len(tokens) for tokens in arrays[domain])
            meta[part][domain] = {
                "tokens": tokens_of,
                "bytes": bytes_of[domain],
                "bytes_per_token": bytes_of[domain] / max(1, tokens_of),
            }
        print(f"{part}: {sum(len(tokens) for tokens in in_order) / 1e6:.2f} M tokens")
    meta["domains"] = list(DOMAINS)
    with open(corpus / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)


def _validation_texts(tokenizer: Any, work: Path) -> dict[str, list[np.ndarray]]:
    import numpy as np

    arrays = {}
    for domain in DOMAINS:
        with open(work / "out" / f"val_{domain}.txt", encoding="utf-8") as file:
            encoding = tokenizer.encode(file.read(), add_special_tokens=False)
        arrays[domain] = [np.array(encoding.ids, dtype=np.uint16)]
    return arrays
