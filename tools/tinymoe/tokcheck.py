#!/usr/bin/env python3
"""Compare the tokenizer of a GGUF file, as llama.cpp runs it, with the `tokenizers` file it was made from.

Cuts random pieces out of the given texts, adds odd strings, and tokenises all of them both ways. Needs the
program built from tokcheck.cpp (its head says how). Exits with 1 if any string differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

_SEED = 5
_LITERAL = "<|endoftext|> literal"
_ODD_STRINGS = (
    "",
    " ",
    "\n",
    "\t\t x",
    "  leading",
    "trailing   ",
    "a\r\nb",
    "I'm you're WE'LL it's \u2019s",
    "日本語のテキスト と English",
    "emoji 👩‍💻🎉 done",
    "x²+½=٣٤",
    "\u00a0nbsp\u2003em",
    "naïve café Straße ÀÉ",
    "0123456789 12345 3.14159e-10",
    "foo\n\n\n\tbar  baz \n ",
    _LITERAL,
    "\x00\x01ctl",
    "Ω≈ç√∫ µ",
    "ﬁ ligature",
    "한국어 조사",
    "עברית العربية",
    "__init__(self, *args)",
    "/* c */ #define X(a,b) a##b",
    "——…“”„«»",
)


def pieces(texts: list[str], per_text: int) -> list[str]:
    """Return random pieces of 3 to 699 characters, the same ones at every call."""
    rng = random.Random(_SEED)
    result = []
    for text in texts:
        for _ in range(per_text):
            start = rng.randrange(len(text) - 700)
            result.append(text[start : start + rng.randrange(3, 700)])
    return result


def llama_tokens(program: Path, model: Path, strings: list[str]) -> list[list[int]]:
    """Tokenise strings with the program built from tokcheck.cpp."""
    encoded = [string.encode() for string in strings]
    records = b"".join(b"%d\n%s" % (len(data), data) for data in encoded)
    result = subprocess.run([program.resolve(), model], input=records, stdout=subprocess.PIPE, check=True)
    lines = result.stdout.decode().split("\n")[:-1]
    if len(lines) != len(strings):
        raise RuntimeError(f"{program} answered {len(lines)} of {len(strings)} strings")
    return [[int(token) for token in line.split()] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("texts", type=Path, nargs="+", help="text files of more than 700 characters")
    parser.add_argument("--tokenizer", type=Path, default=Path("corpus/tokenizer.json"))
    parser.add_argument("--program", type=Path, default=Path("tokcheck"), help="built from tokcheck.cpp")
    parser.add_argument("--per-text", type=int, default=25, help="pieces cut from each text (default: 25)")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    texts = [path.read_text(encoding="utf-8") for path in args.texts]
    strings = [*pieces(texts, args.per_text), *_ODD_STRINGS]
    differing = 0
    lossy = 0
    for string, theirs in zip(strings, llama_tokens(args.program, args.model, strings), strict=True):
        ours = tokenizer.encode(string, add_special_tokens=False).ids
        if string == _LITERAL:
            # expected to differ: llama.cpp knows the literal text only when asked to parse special tokens
            print(f"{string!r}: tokenizers {ours[:3]}..., llama.cpp {theirs[:6]}...")
            continue
        lossy += tokenizer.decode(ours) != string
        if ours != theirs:
            differing += 1
            if differing < 6:
                print(f"DIFFERENT {string[:80]!r}: {ours[:20]} {theirs[:20]}")
    print(f"{len(strings)} strings, {differing} differ, {lossy} do not decode to themselves")
    return 1 if differing or lossy else 0


if __name__ == "__main__":
    sys.exit(main())
