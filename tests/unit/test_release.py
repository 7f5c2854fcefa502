"""tools/release.py: what keeps a tag from being released, and the index page that pip reads."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PYPROJECT = '[project]\nname = "pyhotexperts"\nversion = "1.2.3"\n'


@pytest.fixture(scope="module")
def release(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", root / "tools" / "release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("tag", "changelog", "expected"),
    [
        ("v1.2.3", "# Changelog\n\n## 1.2.3 (2027-01-02)\n\n* New.\n\n## 1.2.2\n", []),
        ("v1.2.4", "## 1.2.3 (2027-01-02)\n\n* New.\n", ["the tag is v1.2.4"]),
        ("1.2.3", "## 1.2.3 (2027-01-02)\n\n* New.\n", ["the tag is 1.2.3"]),
        ("v1.2.3", "## 1.2.3 (unreleased)\n\n* New.\n", ["put the date there"]),
        ("v1.2.3", "## 1.2.2 (2027-01-02)\n\n* New.\n", ["the newest version in CHANGELOG.md is 1.2.2"]),
        ("v1.2.3", "## 1.2.3 (2027-01-02)\n\n## 1.2.2\n\n* Old.\n", ["says nothing about 1.2.3"]),
    ],
)
def test_what_keeps_a_tag_from_being_released(
    release: ModuleType, tag: str, changelog: str, expected: list[str]
) -> None:
    problems = release.problems(tag, PYPROJECT, changelog)
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem


def test_the_changelog_of_this_version_is_kept(release: ModuleType, root: Path) -> None:
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.*)"', pyproject, re.MULTILINE)
    assert version
    problems = release.problems(f"v{version[1]}", pyproject, (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert [p for p in problems if "unreleased" not in p] == []


def test_pip_takes_a_wheel_from_the_page(release: ModuleType, root: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "files"
    wheels.mkdir()
    name = "pyhotexperts-1.2.3+cu13-py3-none-any.whl"
    write_wheel(wheels / name)
    page = tmp_path / "cu13" / "pyhotexperts" / "index.html"
    page.parent.mkdir(parents=True)
    command = [sys.executable, str(root / "tools" / "release.py"), "index", wheels.as_uri(), str(wheels / name)]
    page.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    index = [sys.executable, "-m", "pip", "download", "--no-deps", "--isolated", "--disable-pip-version-check"]
    run = subprocess.run(
        [*index, "--index-url", page.parents[1].as_uri(), "-d", str(tmp_path / "got"), "pyhotexperts==1.2.3+cu13"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert hashlib.sha256((tmp_path / "got" / name).read_bytes()).hexdigest() in page.read_text(encoding="utf-8")


def write_wheel(path: Path) -> None:
    """The smallest wheel that pip takes."""
    import zipfile

    info = "pyhotexperts-1.2.3+cu13.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pyhotexperts\nVersion: 1.2.3+cu13\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
