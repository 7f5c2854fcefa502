"""Dialogue and descriptions of four free games, in reading order, with their published translations."""

from __future__ import annotations

import gettext
import glob
import re
from collections.abc import Callable

from .cleaning import clean, read_text
from .readers import Collector, groups

_LANGUAGES = ("fr", "de", "es")
_QUOTED = r'_\s*"((?:[^"]|"")*)"'

# (speaker or None, text)
Line = tuple[str | None, str]


def read_translations(path: str) -> dict[str, str]:
    """Return the entries of a compiled gettext catalogue, without its head and without plural forms."""
    with open(path, "rb") as file:
        catalogue = gettext.GNUTranslations(file)
    entries = catalogue._catalog  # type: ignore[attr-defined]  # there is no public way to list them
    return {key: value for key, value in entries.items() if isinstance(key, str) and key and value}


def scenario_lines(text: str) -> list[Line]:
    """Return the dialogue, story texts and names of a Wesnoth scenario, in order."""
    block = rf"\[(message|part)\](.*?)\[/\1\]|^\s*(?:name|description|summary|objective)\s*=\s*{_QUOTED}"
    lines: list[Line] = []
    for match in re.finditer(block, text, re.DOTALL | re.MULTILINE):
        body = match.group(2)
        if body is None:
            lines.append((None, match.group(3)))
            continue
        speaker = re.search(r'^\s*speaker\s*=\s*"?([^"\n]+)"?', body, re.MULTILINE)
        message = re.search(
            r"^\s*(?:message|story)\s*=\s*(.*?)(?=^\s*[a-z_,]+\s*=|^\s*\[|\Z)", body, re.DOTALL | re.MULTILINE
        )
        parts = re.findall(_QUOTED, message.group(1)) if message else []
        if parts:
            lines.append((speaker.group(1).strip() if speaker else None, "".join(parts)))
    return lines


def render_scenario(lines: list[Line], translate: Callable[[str], str | None] | None = None) -> str:
    """Write a scenario as text, every line once; lines without a translation are left out."""
    out = []
    seen = set()
    for speaker, source in lines:
        text: str | None = source.replace('""', '"')
        if translate is not None and text is not None:
            text = translate(text)
        if text is None:
            continue
        text = re.sub(r"<[^>]+>", "", text)
        text = re.sub(r"^[\w ]+\^", "", text).replace("^", "")  # "context^text"
        text = re.sub(r"\s*\n\s*", "\n", text).strip()
        if not text or text in seen or (speaker is None and len(text) < 40):
            continue
        seen.add(text)
        if speaker and _is_name(speaker):
            text = f"{speaker.replace('_', ' ')}: {text}"
        out.append(text)
    return clean("\n\n".join(out))


def _is_name(speaker: str) -> bool:
    if speaker in ("narrator", "unit", "second_unit"):
        return False
    return not speaker.startswith("$") and "," not in speaker


def read_wesnoth(out: Collector) -> None:
    """Add the campaigns of The Battle for Wesnoth, in English and translated."""
    game = "usr/share/games/wesnoth/1.16"
    catalogues: dict[str, dict[str, str]] = {}
    for language in _LANGUAGES:
        catalogues[language] = {}
        for folder in (f"{game}/locale", "usr/share/locale"):
            pattern = f"{out.packages}/wesnoth-1.16-*/{folder}/{language}/LC_MESSAGES/*.mo"
            for path in sorted(glob.glob(pattern)):
                catalogues[language].update(read_translations(path))
        print(f"  wesnoth {language}: {len(catalogues[language])} translations", flush=True)
    for path in sorted(glob.glob(f"{out.packages}/wesnoth-1.16-*/{game}/data/**/*.cfg", recursive=True)):
        lines = scenario_lines(read_text(path))
        if not lines:
            continue
        package = path[len(out.packages) + 1 :].split("/")[0]
        out.add("prose", package, path, render_scenario(lines), 500)
        for language, catalogue in catalogues.items():
            # strings of several parts are looked up whole, as gettext does
            text = render_scenario(lines, catalogue.get)
            out.add(language, f"{package} ({language})", f"{path}:{language}", text, 500)


def read_endless_sky(out: Collector) -> None:
    """Add mission conversations (back-quoted strings) and descriptions (long quoted strings)."""
    pattern = f"{out.packages}/endless-sky-data/usr/share/games/endless-sky/data/**/*.txt"
    for path in sorted(glob.glob(pattern, recursive=True)):
        for number, block in enumerate(re.split(r"^(?=\S)", read_text(path), flags=re.MULTILINE)):
            strings = re.findall(r"`([^`]{12,})`", block) or re.findall(r'"([^"\n]{90,})"', block)
            text = clean("\n".join(string.strip() for string in strings))
            out.add("prose", "endless-sky-data", f"{path}#{number}", text, 300)


def read_naev(out: Collector) -> None:
    """Add the translatable strings of Naev's missions, in English and German."""
    data = f"{out.packages}/naev-data/usr/share/naev/dat"
    german = read_translations(f"{data}/gettext/de/LC_MESSAGES/naev.mo")
    call = r'_\(\s*(?:\[\[(.*?)\]\]|"((?:[^"\\\n]|\\.)*)")\s*\)'
    for path in sorted(glob.glob(f"{data}/**/*.lua", recursive=True)):
        strings = []
        for long_string, quoted in re.findall(call, read_text(path), re.DOTALL):
            string = long_string
            if not long_string.strip():
                string = long_string or quoted.encode().decode("unicode_escape", "replace")
            if len(string) > 30:
                strings.append(string)
        if not strings:
            continue
        out.add("prose", "naev-data", path, "\n\n".join(map(_without_colours, strings)), 400)
        translated = [german[string] for string in strings if string in german]
        out.add("de", "naev-data (de)", f"{path}:de", "\n\n".join(map(_without_colours, translated)), 400)


def _without_colours(text: str) -> str:
    return clean(re.sub(r"#.|%%", "", text))


def read_crawl(out: Collector) -> None:
    """Add the descriptions of Dungeon Crawl Stone Soup, in English and translated."""
    folders = {"prose": ["descript"]}
    folders.update({language: [f"descript/{language}", f"database/{language}"] for language in _LANGUAGES})
    for domain, names in folders.items():
        source = "crawl-common" if domain == "prose" else f"crawl-common ({domain})"
        for name in names:
            for path in sorted(glob.glob(f"{out.packages}/crawl-common/usr/share/crawl/dat/{name}/*.txt")):
                if re.search(r"quotes|rand|FAQ|shout|montitle|godname|colourname", path):
                    continue
                text = re.sub(r"^#.*\n", "", read_text(path), flags=re.MULTILINE)
                entries = [clean(entry) for entry in re.split(r"^%%%%.*$", text, flags=re.MULTILINE)]
                for start, group in groups([entry for entry in entries if len(entry) > 60]):
                    out.add(domain, source, f"{path}#{start}", group, 300)
