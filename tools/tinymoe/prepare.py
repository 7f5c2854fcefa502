#!/usr/bin/env python3
"""Make the training text of tinymoe: extract, clean, remove duplicates, split, tokenise.

Steps, in this order:

    packages    print the names of the Debian packages to fetch
    extract     x/ (unpacked packages)  -> docs/<domain>.jsonl
    split       docs/                   -> corpus/{train,val}.jsonl, corpus/stats.json, out/val_<domain>.txt
    tokenizer   corpus/train.jsonl      -> corpus/tokenizer.json
    pack        corpus/, out/           -> corpus/{train,val,valtxt}.bin, corpus/meta.json
    sources     corpus/stats.json       -> out/SOURCES.md

All paths are relative to the working folder. Inputs are Debian 12 packages unpacked with `dpkg -x` under
x/<package>, the standard library of the Python that runs this, and eight PyPI packages. README.md says how to
get them.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from recipe.extract import extract
from recipe.packages import DEBIAN_PACKAGES
from recipe.sources import write_sources
from recipe.split import split
from recipe.tokens import pack, train_tokenizer

STEPS = ("packages", "extract", "split", "tokenizer", "pack", "sources")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--work", type=Path, default=Path("."), help="working folder (default: this one)")
    parser.add_argument(
        "--site-packages",
        default=sysconfig.get_paths()["purelib"],
        help="folder of the PyPI packages to read (default: that of this Python)",
    )
    args = parser.parse_args()
    work = args.work.resolve()
    for step in args.steps:
        if step == "packages":
            print("\n".join(DEBIAN_PACKAGES))
        elif step == "extract":
            extract(work, args.site_packages)
        elif step == "split":
            split(work)
        elif step == "tokenizer":
            train_tokenizer(work)
        elif step == "pack":
            pack(work)
        else:
            write_sources(work)


if __name__ == "__main__":
    main()
