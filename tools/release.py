"""What a release needs beside the wheels: a tag that fits, and an index page for wheels that are not on PyPI.

python tools/release.py check v0.2.0                   version, changelog and tag agree
python tools/release.py index URL wheels/*.whl > page  a page that pip reads as an index of the wheels under URL
"""

from __future__ import annotations

import hashlib
import html
import re
import sys
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]


def problems(tag: str, pyproject: str, changelog: str) -> list[str]:
    """What keeps a tag from being released: it must be the version, and the newest one of the changelog."""
    found = re.search(r'^version = "([^"]+)"', pyproject, re.MULTILINE)
    version = found[1] if found else "none"
    heading = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    newest = heading[1] if heading else "none"
    result = []
    if tag != f"v{version}":
        result.append(f"the tag is {tag}, and the version in pyproject.toml {version}")
    if newest.split()[0] != version:
        result.append(f"the newest version in CHANGELOG.md is {newest}, not {version}")
    if "unreleased" in newest:
        result.append(f"CHANGELOG.md says {newest}: put the date there")
    elif not re.search(rf"^## {re.escape(newest)}\n+\* ", changelog, re.MULTILINE):
        result.append(f"CHANGELOG.md says nothing about {newest}")
    return result


def index_page(base: str, wheels: list[Path]) -> str:
    """An HTML page with a link and the sha256 of each wheel, as pip wants it."""
    links = []
    for wheel in sorted(wheels):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        url = html.escape(f"{base.rstrip('/')}/{quote(wheel.name)}#sha256={digest}")
        links.append(f'<a href="{url}" data-requires-python="&gt;=3.10">{html.escape(wheel.name)}</a><br>')
    return "<!DOCTYPE html>\n<title>pyhotexperts</title>\n" + "\n".join(links) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if len(arguments) == 2 and arguments[0] == "check":
        files = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md")]
        found = problems(arguments[1], *files)
        print("\n".join(found) or f"{arguments[1]} can be released")
        return 1 if found else 0
    if len(arguments) >= 3 and arguments[0] == "index":
        print(index_page(arguments[1], [Path(name) for name in arguments[2:]]), end="")
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
