"""vendor/fetch.py, run as a program on a small made-up upstream archive. No network.

Each project here sees a fake `pip` that fails unless the test asks for another behaviour: a run that
succeeds with it did not download.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

VENDOR = Path(__file__).resolve().parents[2] / "vendor"
ROOT = "upstream-1.0"
PREFIX = f"{ROOT}/vendor/llama.cpp"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEPT = {
    "CMakeLists.txt": "project(llama)\n",
    "LICENSE": "MIT\n",
    "ggml/src/ggml.c": "int ggml;\n",
    "ggml/src/ggml-cpu/cpu.c": "int cpu;\n",
    "src/llama.cpp": "one\ntwo\nthree or so\nfour\nfive\nsix\nseven\neight\n",
    "src/models/a.cpp": "int a;\n",
}
NOT_KEPT = {"ggml/src/ggml-vulkan/vk.cpp": "int vk;\n", "docs/build.md": "build\n", "README.md": "llama\n"}
# For the test with a real pip: enough of a package that pip can ask it for metadata without any build tool.
PACKAGE = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: upstream\nVersion: 1.0\n",
    "backend.py": textwrap.dedent("""
        import pathlib
        def prepare_metadata_for_build_wheel(folder, config_settings=None):
            info = pathlib.Path(folder, "upstream-1.0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: upstream\\nVersion: 1.0\\n")
            return info.name
        def build_wheel(*arguments):
            raise NotImplementedError
        """),
}
FAKE_PIP = """
import os, pathlib, shutil, sys, time
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + " | " + pathlib.Path("pin.txt").read_text())
time.sleep(float(os.environ.get("FAKE_PIP_SLEEP", "0")))
if "FAKE_PIP_GIVES" not in os.environ:
    sys.exit("ERROR: the fake pip has nothing to give")
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
folder.mkdir()
shutil.copy(os.environ["FAKE_PIP_GIVES"], folder)
"""
PATCH_TWO = """\
Description: change the second line
Forwarded: not-needed
---
diff --git a/src/llama.cpp b/src/llama.cpp
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,4 +1,4 @@
 one
-two
+TWO
 three or so
 four
"""
PATCH_TWO_AGAIN = """\
Description: only applies after the first
diff --git a/src/llama.cpp b/src/llama.cpp
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,4 +1,5 @@
 one
-TWO
+deux
+more
 three or so
 four
diff --git a/src/models/a.cpp b/src/models/a.cpp
--- a/src/models/a.cpp
+++ b/src/models/a.cpp
@@ -1 +1 @@
-int a;
+int b;
"""
# One context line is not there: `patch` would take it with its default fuzz.
PATCH_FUZZY = PATCH_TWO.replace(" four\n", " fourty\n")

Snapshot = dict[str, tuple[bytes, int]]


def write_archive(path: Path, files: dict[str, str], members: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def archive_files(kept: dict[str, str] = KEPT) -> dict[str, str]:
    head = {f"{ROOT}/.git/HEAD": COMMIT + "\n"}
    package = {f"{ROOT}/{name}": text for name, text in PACKAGE.items()}
    return head | package | {f"{PREFIX}/{name}": text for name, text in (kept | NOT_KEPT).items()}


class Project:
    """A copy of vendor/ with a lock of its own, below the folder `root`."""

    def __init__(self, root: Path, template: Path | None = None) -> None:
        self.root = root / "project"
        self.vendor = self.root / "vendor"
        self.tree = self.vendor / "llama.cpp"
        self.lock = self.vendor / "llama.cpp.lock"
        self.patches = self.vendor / "patches"
        self.pip_log = root / "pip.log"
        self.sdist = root / "upstream-1.0.tar.gz"
        self.fake = root / "fake"
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GIT_", "PIP_", "PYHOTEXPERTS_", "PYTHON"))
        }
        self.env = inherited | {"PYTHONPATH": str(self.fake), "FAKE_PIP_LOG": str(self.pip_log)}
        if template:
            shutil.copytree(template, root, dirs_exist_ok=True)
        else:
            self.create()

    def create(self) -> None:
        self.patches.mkdir(parents=True)
        shutil.copy(VENDOR / "fetch.py", self.vendor)
        self.series()
        write_archive(self.sdist, archive_files())
        self.pin()
        (self.fake / "pip").mkdir(parents=True)
        (self.fake / "pip" / "__init__.py").touch()
        (self.fake / "pip" / "__main__.py").write_text(FAKE_PIP)

    def pin(self, sdist: Path | None = None, *, commit: str = COMMIT[:9], kept: str = "") -> None:
        """Write the lock for an archive; `kept` adds an entry."""
        content = (sdist or self.sdist).read_bytes()
        entries = "CMakeLists.txt LICENSE ggml/src/* ggml/src/ggml-cpu/ src/ " + kept
        self.lock.write_text(
            f"# a comment\n[llama.cpp]\npackage = upstream\nversion = 1.0\nfilename = upstream-1.0.tar.gz\n"
            f"sha256 = {hashlib.sha256(content).hexdigest()}\ncommit = {commit}\nggml_version = 0.0\n"
            f"prefix = {PREFIX}\ncommit_file = {ROOT}/.git/HEAD\nkept =\n    {entries}\n"
        )

    def series(self, *names: str, **patches: str) -> None:
        """List `names`; write `patches` (_0001_change_two=text) and list them too."""
        files = {name[1:].replace("_", "-") + ".patch": text for name, text in patches.items()}
        for name, text in files.items():
            (self.patches / name).write_text(text)
        (self.patches / "series").write_text("# comment\n\n" + "".join(f"{n}\n" for n in (*files, *names)))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.vendor / "fetch.py"), *arguments]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run fetch.py in a foreign folder; whatever happens, no traceback and no staging folder is left."""
        result = subprocess.run(
            self.command(*arguments),
            env=self.env | env,
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in result.stderr
        assert self.leftovers() == []
        return result

    def leftovers(self) -> list[str]:
        expected = {"fetch.py", "llama.cpp.lock", "patches", "llama.cpp", ".cache"}
        return sorted({path.name for path in self.vendor.iterdir()} - expected)

    def make(self, *arguments: str, **env: str) -> str:
        """A run that has to succeed, from the given archive unless `env` says otherwise."""
        source = {} if {"FAKE_PIP_GIVES", "PYHOTEXPERTS_LLAMA_CPP_DIR"} & env.keys() else self.given()
        result = self.run(*arguments, **source, **env)
        assert result.returncode == 0, result.stderr
        return result.stderr

    def fail(self, *arguments: str, **env: str) -> str:
        """A run that has to fail in a civil manner and to leave the tree untouched."""
        before = self.snapshot()
        result = self.run(*arguments, **env)
        assert result.returncode == 1
        assert result.stderr.startswith("fetch.py: ")
        assert self.snapshot() == before
        return result.stderr

    def given(self, sdist: Path | None = None) -> dict[str, str]:
        return {"PYHOTEXPERTS_LLAMA_CPP_SDIST": str(sdist or self.sdist)}

    def files(self) -> dict[str, str]:
        """The tree without its stamp."""
        paths = (path for path in self.tree.rglob("*") if path.is_file() and path.name != ".fetch-stamp.json")
        return {path.relative_to(self.tree).as_posix(): path.read_text() for path in paths}

    def snapshot(self) -> Snapshot:
        """Content and time of everything in the tree, the stamp included."""
        paths = (path for path in self.tree.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    def make_stale(self) -> None:
        self.lock.write_text(self.lock.read_text() + "\n# changed\n")

    def pip_calls(self) -> list[str]:
        return self.pip_log.read_text().splitlines() if self.pip_log.exists() else []


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its tree made, to copy: quicker than a run for each test."""
    root = tmp_path_factory.mktemp("template")
    Project(root).make()
    return root


@pytest.fixture
def made(template: Path, tmp_path: Path) -> Project:
    """A project with its tree."""
    return Project(tmp_path, template)


@pytest.fixture
def project(made: Project) -> Project:
    """A project without a tree."""
    shutil.rmtree(made.tree)
    shutil.rmtree(made.vendor / ".cache")
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A llama.cpp source folder."""
    folder = tmp_path / "checkout"
    for name, text in (KEPT | NOT_KEPT).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def load_fetch(vendor: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_under_test", vendor / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tools_folder(folder: Path, *names: str) -> str:
    """A folder for PATH that has these programs only."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"no {name} here")
        (folder / name).symlink_to(found)
    return str(folder)


# The tree and its stamp


def test_only_the_kept_paths_are_there(made: Project) -> None:
    assert made.files() == KEPT


def test_a_second_run_changes_nothing_and_needs_nothing(made: Project) -> None:
    before = made.snapshot()
    made.sdist.unlink()
    shutil.rmtree(made.vendor / ".cache")
    assert made.run(PATH="/nonexistent").returncode == 0
    assert made.snapshot() == before
    assert made.pip_calls() == []


def test_a_current_tree_in_a_read_only_folder_is_fine(made: Project) -> None:
    shutil.rmtree(made.vendor / ".cache")
    (made.vendor / ".cache").write_text("not a folder: no lock file can be made")
    assert made.run().returncode == 0


@pytest.mark.parametrize("change", ["lock", "series", "patch"])
def test_a_change_of_what_it_is_made_from_makes_it_again(project: Project, change: str) -> None:
    project.series(_0001_change_two=PATCH_TWO)
    project.make()
    before = project.snapshot()
    if change == "lock":
        project.make_stale()
    elif change == "series":
        project.series()
    else:
        project.series(_0001_change_two=PATCH_TWO.replace("TWO", "zwei"))
    assert "made" in project.make()
    assert project.snapshot() != before
    assert project.files()["src/llama.cpp"].split()[1] == {"lock": "TWO", "series": "two", "patch": "zwei"}[change]


def test_files_that_stay_as_they_are_keep_their_time(made: Project) -> None:
    for path in made.tree.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    made.series(_0001_change_two=PATCH_TWO)
    made.make()
    times = {path.name: path.stat().st_mtime_ns for path in made.tree.rglob("*") if path.is_file()}
    new = {name for name, stamp in times.items() if stamp != 10**18}
    assert new == {"llama.cpp", ".fetch-stamp.json"}


def test_status_is_the_stamp_as_json(project: Project) -> None:
    assert "not there" in project.fail("--status")
    project.series(_0001_change_two=PATCH_TWO, _0002_change_more=PATCH_TWO_AGAIN)
    project.make()
    state = json.loads(project.run("--status").stdout)
    assert state["origin"] == "sdist"
    assert state["commit"] == COMMIT[:9]
    assert state["sdist_sha256"] == hashlib.sha256(project.sdist.read_bytes()).hexdigest()
    assert state["patch_sha256"] == hashlib.sha256((PATCH_TWO + PATCH_TWO_AGAIN).encode()).hexdigest()
    assert state["files"] == len(KEPT)
    assert state["current"] is True
    assert state["edits"] == {}
    (project.tree / "LICENSE").unlink()
    project.make_stale()
    state = json.loads(project.run("--status").stdout)
    assert state["current"] is False
    assert state["edits"] == {"LICENSE": "missing"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "files"])
def test_a_tree_with_an_unreadable_stamp_is_not_taken_for_ours(made: Project, text: str) -> None:
    stamp = made.tree / ".fetch-stamp.json"
    if text == "files":
        text = json.dumps(json.loads(stamp.read_text()) | {"files": []})
    stamp.write_text(text)
    assert "--force" in made.fail(**made.given())
    made.make("--force")
    assert made.files() == KEPT


# Local edits


def edit(project: Project) -> None:
    (project.tree / "LICENSE").write_text("mine\n")
    (project.tree / "src" / "new.cpp").write_text("int mine;\n")
    (project.tree / "src" / "models" / "a.cpp").unlink()


def test_edits_of_a_current_tree_are_left_alone_and_named(made: Project) -> None:
    edit(made)
    (made.tree / "src" / "models" / "a.cpp").write_text("mine\n")
    before = made.snapshot()
    message = made.make()
    assert made.snapshot() == before
    assert {"changed: LICENSE", "extra: src/new.cpp", "changed: src/models/a.cpp"} <= set(
        map(str.strip, message.splitlines())
    )


def test_a_tree_that_lacks_files_is_an_error_that_says_what_to_do(made: Project) -> None:
    (made.tree / "src" / "models" / "a.cpp").unlink()
    message = made.fail(**made.given())
    assert "missing: src/models/a.cpp" in message
    assert "--force" in message
    made.make("--force")
    assert made.files() == KEPT


def test_edits_are_never_overwritten_without_force(made: Project) -> None:
    edit(made)
    made.make_stale()
    message = made.fail(**made.given())
    for line in ("changed: LICENSE", "extra: src/new.cpp", "missing: src/models/a.cpp", "--force"):
        assert line in message
    made.make("--force")
    assert made.files() == KEPT


def test_force_discards_edits_of_a_current_tree(made: Project) -> None:
    edit(made)
    made.make("--force")
    assert made.files() == KEPT


def test_an_edit_that_became_a_patch_need_not_be_discarded(made: Project) -> None:
    path = made.tree / "src" / "llama.cpp"
    path.write_text(path.read_text().replace("two", "TWO"))
    time_of_edit = path.stat().st_mtime_ns
    made.series(_0001_change_two=PATCH_TWO)
    made.make()
    assert path.stat().st_mtime_ns == time_of_edit
    assert json.loads(made.run("--status").stdout)["edits"] == {}


def test_a_file_replaced_by_a_link_is_an_edit(made: Project, tmp_path: Path) -> None:
    (made.tree / "LICENSE").rename(tmp_path / "LICENSE")
    (made.tree / "LICENSE").symlink_to(tmp_path / "LICENSE")
    made.make_stale()
    assert "changed: LICENSE" in made.fail(**made.given())


def test_a_tree_that_is_a_link_is_not_replaced(made: Project, tmp_path: Path) -> None:
    made.tree.rename(tmp_path / "elsewhere")
    made.tree.symlink_to(tmp_path / "elsewhere")
    made.make_stale()
    assert "--force" in made.fail(**made.given())
    made.make("--force")
    assert not made.tree.is_symlink()
    assert (tmp_path / "elsewhere" / "LICENSE").exists()


# Archives


def test_the_pinned_hash_decides(made: Project, tmp_path: Path) -> None:
    other = write_archive(tmp_path / "other.tar.gz", archive_files(KEPT | {"LICENSE": "other\n"}))
    made.make_stale()
    message = made.fail(**made.given(other))
    assert hashlib.sha256(other.read_bytes()).hexdigest() in message
    assert hashlib.sha256(made.sdist.read_bytes()).hexdigest() in message


def test_a_truncated_archive_is_refused(made: Project, tmp_path: Path) -> None:
    content = made.sdist.read_bytes()
    short = tmp_path / "short.tar.gz"
    short.write_bytes(content[: len(content) // 2])
    made.make_stale()
    assert "truncated" in made.fail(**made.given(short))
    made.pin(short)
    assert "not a complete" in made.fail(**made.given(short))


def test_a_file_that_is_no_archive_is_refused(project: Project, tmp_path: Path) -> None:
    text = tmp_path / "text.tar.gz"
    text.write_text("hello\n" * 1000)
    project.pin(text)
    assert "not a complete" in project.fail(**project.given(text))
    assert "is not a file" in project.fail(**project.given(tmp_path / "none"))


def special_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    member.size = 1 if kind == tarfile.REGTYPE else 0
    return member


@pytest.mark.parametrize(
    "member",
    [
        special_member(f"{PREFIX}/src/../../../../evil"),
        special_member(f"{PREFIX}/src//evil"),
        special_member(f"{PREFIX}/src/c:\\evil"),
        special_member(f"{PREFIX}/src/llama.cpp"),
        special_member(f"{PREFIX}/src/link.h", tarfile.SYMTYPE, "/etc/passwd"),
        special_member(f"{PREFIX}/src/link", tarfile.SYMTYPE, "../.."),
        special_member(f"{PREFIX}/src/hard.h", tarfile.LNKTYPE, f"{PREFIX}/LICENSE"),
        special_member(f"{PREFIX}/src/pipe", tarfile.FIFOTYPE),
    ],
    ids=["dotdot", "absolute", "drive", "twice", "symlink", "link to a folder", "hard link", "fifo"],
)
def test_a_hostile_member_under_a_kept_path_is_refused(
    project: Project, tmp_path: Path, member: tarfile.TarInfo
) -> None:
    hostile = write_archive(tmp_path / "hostile.tar.gz", archive_files(), (member,))
    project.pin(hostile)
    assert repr(member.name) in project.fail(**project.given(hostile))
    assert not project.tree.exists()
    assert not list(tmp_path.rglob("*evil*"))


def test_hostile_members_elsewhere_are_never_written(project: Project, tmp_path: Path) -> None:
    members = (
        special_member("../evil"),
        special_member("/tmp/evil"),
        special_member(f"{PREFIX}/../evil"),
        special_member(f"{PREFIX}/src", tarfile.SYMTYPE, "/tmp"),
        special_member(f"{ROOT}/link", tarfile.SYMTYPE, "/etc"),
    )
    archive = write_archive(tmp_path / "odd.tar.gz", archive_files(), members)
    project.pin(archive)
    result = project.run(**project.given(archive))
    assert result.returncode == 0
    assert project.files() == KEPT
    assert not (project.tree / "src").is_symlink()
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("entry", ["ggml/LICENSE", "tools/", "cmake/*"])
def test_a_kept_path_that_is_missing_is_named(made: Project, entry: str) -> None:
    made.pin(kept=entry)
    assert entry in made.fail(**made.given())


def test_the_commit_of_the_archive_must_be_the_pinned_one(made: Project) -> None:
    made.pin(commit="fedcba987")
    message = made.fail(**made.given())
    assert "fedcba987" in message
    assert COMMIT in message


@pytest.mark.parametrize("text", ["[llama.cpp]\npackage = upstream\n", "nonsense", "[other]\na = b\n"])
def test_a_malformed_lock_is_named(made: Project, text: str) -> None:
    made.lock.write_text(text)
    assert "llama.cpp.lock" in made.fail()


# Patches


def test_patches_are_applied_in_order(project: Project) -> None:
    project.series(_0001_change_two=PATCH_TWO, _0002_change_more=PATCH_TWO_AGAIN)
    project.make()
    changed = {
        "src/llama.cpp": KEPT["src/llama.cpp"].replace("two", "deux\nmore"),
        "src/models/a.cpp": "int b;\n",
    }
    assert project.files() == KEPT | changed


@pytest.mark.parametrize("by_environment", [False, True])
def test_patches_are_applied_inside_a_repository(project: Project, by_environment: bool) -> None:
    """There `git apply` takes paths from the repository's root, and skips what is elsewhere silently."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    subprocess.run(["git", "init", "--quiet", str(project.root)], check=True, env=project.env)
    project.series(_0001_change_two=PATCH_TWO)
    git = project.root / ".git"
    project.make(**({"GIT_DIR": str(git), "GIT_WORK_TREE": str(project.root)} if by_environment else {}))
    assert project.files()["src/llama.cpp"] == KEPT["src/llama.cpp"].replace("two", "TWO")


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_either_tool_applies_patches_and_neither_with_fuzz(project: Project, tmp_path: Path, tool: str) -> None:
    path = tools_folder(tmp_path / "bin", tool)
    shifted = PATCH_TWO_AGAIN.replace("@@ -1,4 +1,5 @@", "@@ -3,4 +3,5 @@")
    project.series(_0001_change_two=PATCH_TWO, _0002_change_more=shifted)
    project.make(PATH=path)
    assert project.files()["src/models/a.cpp"] == "int b;\n"
    assert project.files().keys() == KEPT.keys()
    project.series(_0001_change_two=PATCH_FUZZY)
    message = project.fail(PATH=path, **project.given())
    assert "0001-change-two.patch" in message
    assert f"{tool} said" in message
    assert re.search(r"patch failed|FAILED", message)


def test_the_settings_of_git_do_not_make_a_patch_apply(made: Project, tmp_path: Path) -> None:
    (tmp_path / ".gitconfig").write_text("[apply]\n\tignoreWhitespace = change\n")
    made.series(_0001_change_two=PATCH_TWO.replace("three or", "three  or"))
    assert "does not apply" in made.fail(HOME=str(tmp_path), **made.given())


def test_without_any_tool_only_an_empty_queue_can_be_applied(project: Project, tmp_path: Path) -> None:
    path = tools_folder(tmp_path / "bin")
    project.make(PATH=path)
    project.series(_0001_change_two=PATCH_TWO)
    assert "git or patch" in project.fail(PATH=path, **project.given())


def test_a_later_patch_that_does_not_apply_leaves_the_old_tree(made: Project) -> None:
    made.series(_0001_change_two=PATCH_TWO, _0002_change_two=PATCH_TWO)
    message = made.fail(**made.given())
    assert "0002-change-two.patch" in message
    assert "0001-change-two.patch" not in message
    assert "src/llama.cpp" in message
    assert made.files() == KEPT


def test_a_patch_that_was_silently_skipped_is_noticed(made: Project, tmp_path: Path) -> None:
    """A git that reports success and does nothing stands for every way in which that can happen."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\nexit 0\n")
    (tools / "git").chmod(0o755)
    made.series(_0001_change_two=PATCH_TWO)
    message = made.fail(PATH=f"{tools}:{made.env['PATH']}", **made.given())
    assert "names ['src/llama.cpp'], but" in message


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["0009-is-missing.patch"], "no file"),
        (["0001-change-two.patch"], "twice"),
        (["../0001-change-two.patch"], "of the form"),
        (["0001-change-two.diff"], "of the form"),
    ],
)
def test_a_bad_series_is_an_error_before_any_download(made: Project, names: list[str], what: str) -> None:
    made.series(*names, _0001_change_two=PATCH_TWO)
    message = made.fail()
    assert names[0] in message
    assert what in message
    assert made.pip_calls() == []


# A source folder instead of the archive


def test_a_source_folder_is_followed(project: Project, source: Path) -> None:
    directory = {"PYHOTEXPERTS_LLAMA_CPP_DIR": str(source)}
    project.series(_0001_change_two=PATCH_TWO)
    assert "unverified" in project.make(**directory)
    assert project.files() == KEPT | {"src/llama.cpp": KEPT["src/llama.cpp"].replace("two", "TWO")}
    stamp = json.loads(project.run("--status", **directory).stdout)
    assert (stamp["origin"], stamp["commit"], stamp["sdist_sha256"]) == ("directory", "", "")
    before = project.snapshot()
    assert "up to date" in project.make(**directory)
    assert project.snapshot() == before

    times = source.joinpath("LICENSE").stat()
    source.joinpath("LICENSE").write_text("BSD\n")  # as long as before, and as old
    os.utime(source / "LICENSE", ns=(times.st_atime_ns, times.st_mtime_ns))
    project.make(**directory)
    assert project.files()["LICENSE"] == "BSD\n"
    source.joinpath("README.md").write_text("not kept\n")
    assert "up to date" in project.make(**directory)


def test_a_tree_from_a_source_folder_is_stale_without_it(project: Project, source: Path) -> None:
    source.joinpath("LICENSE").write_text("BSD\n")
    project.make(PYHOTEXPERTS_LLAMA_CPP_DIR=str(source))
    project.make()
    assert project.files() == KEPT
    assert json.loads(project.run("--status").stdout)["origin"] == "sdist"
    project.make(PYHOTEXPERTS_LLAMA_CPP_DIR=str(source))
    assert project.files()["LICENSE"] == "BSD\n"


def test_a_bad_source_folder_is_an_error(made: Project, source: Path) -> None:
    def fail_with(folder: Path, **env: str) -> str:
        return made.fail(PYHOTEXPERTS_LLAMA_CPP_DIR=str(folder), **env)

    assert "not a source folder" in fail_with(source / "none")
    assert "not a source folder" in fail_with(made.tree)
    assert "both set" in fail_with(source, **made.given())
    (source / "src" / "link.h").symlink_to("llama.cpp")
    assert "link.h is a link" in fail_with(source)
    (source / "src" / "link.h").unlink()
    (source / "LICENSE").unlink()
    assert "LICENSE" in fail_with(source)


# Downloads


def test_pip_is_told_the_hash_and_the_archive_is_cached(project: Project) -> None:
    gives = {"FAKE_PIP_GIVES": str(project.sdist)}
    project.make(**gives)
    digest = hashlib.sha256(project.sdist.read_bytes()).hexdigest()
    (call,) = project.pip_calls()
    assert call.startswith("download ")
    assert "--no-deps --no-binary upstream --require-hashes" in call
    assert call.endswith(f"| upstream==1.0 --hash=sha256:{digest}")
    project.make("--force", **gives)
    assert len(project.pip_calls()) == 1  # from the cache
    cached = project.vendor / ".cache" / "upstream-1.0.tar.gz"
    cached.write_bytes(cached.read_bytes()[:-1])
    assert "downloading it again" in project.make("--force", **gives)
    assert len(project.pip_calls()) == 2
    assert cached.read_bytes() == project.sdist.read_bytes()


def test_a_download_is_verified_whatever_pip_says(project: Project, tmp_path: Path) -> None:
    (tmp_path / "gives").mkdir()
    other = write_archive(tmp_path / "gives" / "upstream-1.0.tar.gz", archive_files(KEPT | {"LICENSE": "other\n"}))
    assert "expected" in project.fail(FAKE_PIP_GIVES=str(other))
    assert [path.name for path in (project.vendor / ".cache").iterdir()] == ["lock"]


def test_without_network_the_message_says_what_to_do(made: Project) -> None:
    made.make_stale()
    message = made.fail()
    assert "upstream-1.0.tar.gz" in message
    assert "PYHOTEXPERTS_LLAMA_CPP_SDIST" in message
    assert "the fake pip has nothing to give" in message


@pytest.fixture
def real_pip(project: Project, tmp_path: Path) -> Project:
    """A project whose pip is the real one, with an index-free, empty folder to look in."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    (tmp_path / "links").mkdir()
    del project.env["PYTHONPATH"]
    project.env |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "links"),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return project


def test_the_real_pip_without_network(real_pip: Project) -> None:
    message = real_pip.fail()
    assert "PYHOTEXPERTS_LLAMA_CPP_SDIST" in message
    assert "No matching distribution" in message


def test_the_real_pip_downloads_and_checks_the_hash(real_pip: Project, tmp_path: Path) -> None:
    link = tmp_path / "links" / "upstream-1.0.tar.gz"
    write_archive(link, archive_files(KEPT | {"LICENSE": "other\n"}))
    assert "DO NOT MATCH THE HASHES" in real_pip.fail()
    shutil.copy(real_pip.sdist, link)
    assert real_pip.run().returncode == 0
    assert real_pip.files() == KEPT


# Interrupted and concurrent runs


@pytest.fixture
def slow(made: Project) -> Iterator[subprocess.Popen[str]]:
    """A run that hangs in its download, over a stale tree."""
    made.make_stale()
    env = made.env | {"FAKE_PIP_SLEEP": "60", "FAKE_PIP_GIVES": str(made.sdist)}
    with subprocess.Popen(
        made.command(), env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for(lambda: made.pip_calls() != [])
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_leaves_the_old_tree_and_nothing_else(made: Project, slow: subprocess.Popen[str]) -> None:
    before = made.snapshot()
    os.killpg(slow.pid, signal.SIGINT)
    _, message = slow.communicate(timeout=20)
    assert slow.returncode == 130
    assert "Traceback" not in message
    assert made.snapshot() == before
    assert made.leftovers() == []


def test_after_a_kill_the_next_run_cleans_up(made: Project, slow: subprocess.Popen[str]) -> None:
    before = made.snapshot()
    os.killpg(slow.pid, signal.SIGKILL)
    slow.wait(20)
    assert made.snapshot() == before
    assert len(made.leftovers()) == 1
    made.make()  # asserts that nothing is left over
    assert json.loads(made.run("--status").stdout)["current"] is True


def test_a_rename_that_fails_brings_the_old_tree_back(made: Project, tmp_path: Path) -> None:
    before = made.snapshot()
    fetch = load_fetch(made.vendor)
    with pytest.raises(FileNotFoundError):
        fetch.move_in(tmp_path / "none", {}, tmp_path)
    assert made.snapshot() == before


def test_concurrent_runs_make_one_tree(project: Project) -> None:
    env = project.env | {"FAKE_PIP_SLEEP": "0.5", "FAKE_PIP_GIVES": str(project.sdist)}
    runs = [subprocess.Popen(project.command(), env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    messages = [run.communicate(timeout=30)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sum("made" in message for message in messages) == 1
    assert len(project.pip_calls()) == 1
    assert project.files() == KEPT
    assert project.leftovers() == []


# --check


def test_check_of_a_good_tree(project: Project) -> None:
    project.series(_0001_change_two=PATCH_TWO)
    project.make()
    result = project.run("--check", **project.given())
    assert result.returncode == 0, result.stdout
    assert "0 problem(s)" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("LICENSE", "mine\n", "changed: LICENSE"),
        ("src/new.cpp", "int mine;\n", "extra: src/new.cpp"),
        ("src/models/a.cpp", None, "missing: src/models/a.cpp"),
    ],
)
def test_check_reports_a_differing_file(made: Project, name: str, text: str | None, line: str) -> None:
    if text is None:
        (made.tree / name).unlink()
    else:
        (made.tree / name).write_text(text)
    before = made.snapshot()
    result = made.run("--check", **made.given())
    assert result.returncode == 1
    assert result.stdout.splitlines()[:-1] == [line]
    assert made.snapshot() == before


def test_check_does_not_believe_the_stamp(made: Project) -> None:
    """An edit that was put into the stamp as well is still an edit."""
    edit(made)
    stamp = json.loads((made.tree / ".fetch-stamp.json").read_text())
    stamp["files"]["LICENSE"] = hashlib.sha256(b"mine\n").hexdigest()
    (made.tree / ".fetch-stamp.json").write_text(json.dumps(stamp))
    result = made.run("--check", **made.given())
    assert result.returncode == 1
    assert "changed: LICENSE" in result.stdout
    assert "stamp" in result.stdout


def test_check_reports_a_patch_that_is_not_listed(made: Project) -> None:
    (made.patches / "0001-change-two.patch").write_text(PATCH_TWO)
    result = made.run("--check", **made.given())
    assert result.returncode == 1
    assert "0001-change-two.patch is not in the series" in result.stdout


def test_check_reports_a_patch_that_does_not_apply(made: Project) -> None:
    made.series(_0001_change_two=PATCH_FUZZY)
    result = made.run("--check", **made.given())
    assert result.returncode == 1
    assert "0001-change-two.patch does not apply" in result.stdout


def test_check_reports_a_stale_and_a_missing_tree(project: Project) -> None:
    result = project.run("--check", **project.given())
    assert result.returncode == 1
    assert "is not there" in result.stdout
    assert "missing: LICENSE" in result.stdout
    project.make()
    project.series(_0001_change_two=PATCH_TWO)
    result = project.run("--check", **project.given())
    assert result.returncode == 1
    assert "stamp" in result.stdout
    assert "changed: src/llama.cpp" in result.stdout


# The real lock


def test_the_real_lock_and_series_can_be_read() -> None:
    pin = load_fetch(VENDOR).read_pin()
    assert re.fullmatch(r"[0-9a-f]{64}", pin.sha256)
    assert re.fullmatch(r"[0-9a-f]{9,40}", pin.commit)
    assert pin.version in pin.filename
    assert pin.prefix.startswith(pin.filename.removesuffix(".tar.gz") + "/")


def test_the_real_lock_names_the_ggml_version_of_the_tree() -> None:
    cmake = VENDOR / "llama.cpp" / "ggml" / "CMakeLists.txt"
    if not cmake.exists():
        pytest.skip("no vendor/llama.cpp here")
    lock = configparser.ConfigParser()
    lock.read(VENDOR / "llama.cpp.lock")
    numbers = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", cmake.read_text())
    assert ".".join(numbers) == lock["llama.cpp"]["ggml_version"]
