#!/usr/bin/env python3
"""Make vendor/llama.cpp: the kept part of the pinned upstream sources, with our patch queue applied.

Upstream's code is not in this repository. `llama.cpp.lock` names one source archive on PyPI by its sha256
and the paths to keep of it, `patches/series` the patches over them. The tree made of these carries a stamp
(`.fetch-stamp.json`): what it was made from, and the sha256 of each of its files. While the stamp matches
lock, series and patches the tree is left as it is, so a second run needs neither network nor archive.

    python vendor/fetch.py            make the tree, or find it up to date
    python vendor/fetch.py --force    make it again; local edits are discarded
    python vendor/fetch.py --check    compare queue and tree with the source; exit code 0 = equal, 1 = not
    python vendor/fetch.py --status   print the stamp and the state of the tree as JSON

PYHOTEXPERTS_LLAMA_CPP_SDIST names an archive that is already here (its sha256 is checked),
PYHOTEXPERTS_LLAMA_CPP_DIR a llama.cpp source folder to use instead (nothing about it is checked).

Invariants: everything is prepared in a folder beside the tree and renamed into place, so an interrupted run
leaves the old tree or none; bytes of an archive are used only after its sha256 matched; one run at a time;
an edited file is never overwritten by other content without --force.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not POSIX: concurrent runs are then not kept apart
    fcntl = None  # type: ignore[assignment]

VENDOR = Path(__file__).resolve().parent
LOCK = VENDOR / "llama.cpp.lock"
PATCHES = VENDOR / "patches"
SERIES = PATCHES / "series"
TREE = VENDOR / "llama.cpp"
CACHE = VENDOR / ".cache"
STAMP_NAME = ".fetch-stamp.json"
STAGING_PREFIX = ".fetch-staging-"
SDIST_VARIABLE = "PYHOTEXPERTS_LLAMA_CPP_SDIST"
DIRECTORY_VARIABLE = "PYHOTEXPERTS_LLAMA_CPP_DIR"


class FetchError(Exception):
    """A failure the user can act on: printed without a traceback, exit code 1."""


@dataclass(frozen=True)
class Pin:
    """Lock file and patch queue: all that decides what the tree has to be."""

    package: str
    version: str
    filename: str
    sha256: str
    commit: str
    prefix: str
    commit_file: str
    kept: tuple[str, ...]
    patches: tuple[Path, ...]
    inputs_sha256: str
    patch_sha256: str


@dataclass(frozen=True)
class Stamp:
    """What a tree was made from; `origin` is "sdist", or "directory" (then sdist and commit are empty)."""

    origin: str
    sdist_sha256: str
    commit: str
    inputs_sha256: str
    patch_sha256: str
    source_sha256: str
    files: dict[str, str]


def note(text: str) -> None:
    print(f"fetch.py: {text}", file=sys.stderr, flush=True)


def listing(lines: list[str]) -> str:
    shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return "".join(f"\n    {line}" for line in shown)


def sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_pin() -> Pin:
    """Read lock, series and patches; a gap in them is an error before anything is downloaded."""
    parser = configparser.ConfigParser(interpolation=None)
    names = ("package", "version", "filename", "sha256", "commit", "prefix", "kept")
    try:
        parser.read_string(LOCK.read_text(encoding="utf-8"))
        section = parser["llama.cpp"]
        values = {name: section[name] for name in names}
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        raise FetchError(f"{LOCK} is malformed or lacks an entry: {error}") from None
    kept = tuple(values.pop("kept").split())
    patches = read_series()
    contents = [patch.read_bytes() for patch in patches]
    return Pin(
        **values,
        commit_file=section.get("commit_file", ""),
        kept=kept,
        patches=patches,
        inputs_sha256=sha256(LOCK.read_bytes(), SERIES.read_bytes(), *contents),
        patch_sha256=sha256(*contents),  # the sha256sum of the patches put one after the other
    )


def read_series() -> tuple[Path, ...]:
    """The patches in the order in which they are listed."""
    patches: list[Path] = []
    for line in SERIES.read_text(encoding="utf-8", errors="replace").splitlines():
        name = line.partition("#")[0].strip()
        if not name:
            continue
        patch = PATCHES / name
        if not re.fullmatch(r"\d{4}-[\w.-]+\.patch", name):
            raise FetchError(f"{SERIES} lists {name!r}, which is not of the form 0001-<verb>-<what>.patch")
        if patch in patches:
            raise FetchError(f"{SERIES} lists {name} twice")
        if not patch.is_file():
            raise FetchError(f"{SERIES} lists {name}, but there is no file {patch}")
        patches.append(patch)
    return tuple(patches)


def manifest(tree: Path) -> dict[str, str]:
    """sha256 of every file but the stamp, by relative path; a link is never followed."""
    files: dict[str, str] = {}
    for path in tree.rglob("*"):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            files[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and name != STAMP_NAME:
            files[name] = sha256(path.read_bytes())
    return files


def source_sha256(files: dict[str, bytes]) -> str:
    return sha256(*(f"{sha256(content)}  {name}\n".encode() for name, content in sorted(files.items())))


def differences(expected: dict[str, str], found: dict[str, str]) -> dict[str, str]:
    """What happened to each path that differs: changed, missing or extra."""
    differing: dict[str, str] = {}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            differing[name] = "missing" if name not in found else "changed" if name in expected else "extra"
    return differing


def as_lines(differing: dict[str, str]) -> list[str]:
    return [f"{what}: {name}" for name, what in differing.items()]


def read_stamp() -> Stamp | None:
    """The stamp of the tree; None where there is none, or one of another format."""
    try:
        stamp = Stamp(**json.loads((TREE / STAMP_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return stamp if isinstance(stamp.files, dict) else None


def is_current(stamp: Stamp, pin: Pin, directory: Path | None) -> bool:
    """Would making the tree again give what is stamped? A source folder is compared by content."""
    if stamp.inputs_sha256 != pin.inputs_sha256:
        return False
    if directory is None:
        return stamp.origin == "sdist"
    source = source_sha256(load_directory(pin, directory))
    return stamp.origin == "directory" and stamp.source_sha256 == source


def refuse_to_lose_edits(old: Stamp | None, new: Stamp) -> None:
    """Raise where `new` would replace a file that is not as this script wrote it.

    An edit that `new` contains is not lost: whoever turns edits into a patch need not discard them first.
    """
    found = manifest(TREE)
    if TREE.is_symlink() or (found and old is None):
        raise FetchError(f"{TREE} was not made by this script; move it away, or use --force to replace it")
    lost = differences(new.files, found)
    edits = differences(old.files if old else {}, found)
    if edits := {name: what for name, what in edits.items() if name in lost}:
        raise FetchError(
            f"{TREE} has to be made again, but it has local edits; save them, as a patch of the queue say, "
            f"or use --force to discard them:{listing(as_lines(edits))}"
        )


def from_environment(variable: str) -> Path | None:
    value = os.environ.get(variable)
    try:
        return Path(value).expanduser().resolve() if value else None
    except (RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a zero byte
        raise FetchError(f"{variable} names {value!r}, which is no path: {error}") from None


def source_directory() -> Path | None:
    directory = from_environment(DIRECTORY_VARIABLE)
    if directory and from_environment(SDIST_VARIABLE):
        raise FetchError(f"{SDIST_VARIABLE} and {DIRECTORY_VARIABLE} are both set; unset one of them")
    if directory and (directory == TREE or not directory.is_dir()):
        raise FetchError(f"{DIRECTORY_VARIABLE} names {directory}, which is not a source folder to copy from")
    return directory


def verified(path: Path, pin: Pin) -> Path:
    """`path`, if its content has the pinned sha256."""
    found = sha256(path.read_bytes())
    if found != pin.sha256:
        raise FetchError(
            f"{path} ({path.stat().st_size} bytes) is not the pinned {pin.filename}: it is truncated, "
            f"damaged or another version. Its sha256 is {found}, expected {pin.sha256}"
        )
    return path


def obtain_sdist(pin: Pin, staging: Path) -> Path:
    """The pinned archive: the given one, else the cached one, else a download that becomes the cached one."""
    given = from_environment(SDIST_VARIABLE)
    if given:
        if not given.is_file():
            raise FetchError(f"{SDIST_VARIABLE} names {given}, which is not a file")
        return verified(given, pin)
    cached = CACHE / pin.filename
    if cached.is_file():
        try:
            return verified(cached, pin)
        except FetchError as error:
            note(f"{error}; downloading it again")
    return verified(download(pin, staging), pin).replace(cached)


def download(pin: Pin, staging: Path) -> Path:
    """Let pip download the archive, so that the user's index, proxy and certificate settings hold.

    With --require-hashes pip compares the hash before it runs anything from the archive (it asks the build
    backend for metadata). --no-binary names this one package: `:all:` would compile the build tools from
    source as well, 37 s instead of 6 s.
    """
    pinned = f"{pin.package}=={pin.version}"
    (staging / "pin.txt").write_text(f"{pinned} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    note(f"downloading {pin.filename} with pip")
    quiet = "--no-input --disable-pip-version-check"
    options = f"{quiet} --no-deps --no-binary {pin.package} --require-hashes -d sdist -r pin.txt"
    _, output = run([sys.executable, "-m", "pip", "download", *options.split()], staging)
    path = staging / "sdist" / pin.filename
    if not path.is_file():
        raise FetchError(
            f"pip could not download {pin.filename} (sha256 {pin.sha256}). Without network or pip, download "
            f"that file on another machine (pip download --no-deps --no-binary {pin.package} {pinned}), "
            f"bring it here and set {SDIST_VARIABLE} to its path. pip said:{output}"
        )
    return path


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and last lines of a command, indented for a message."""
    result = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = [line for line in result.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    return result.returncode, listing(lines[-12:] or ["(nothing)"])


def is_under(entry: str, name: str) -> bool:
    """`folder/` of the lock is all that lies below it, `folder/*` the files in it, anything else one file."""
    if entry.endswith("/*"):
        return name.rpartition("/")[0] == entry[:-2]
    return name == entry or (entry.endswith("/") and name.startswith(entry))


def load_sdist(pin: Pin, sdist: Path) -> dict[str, bytes]:
    """The kept files of the archive, by relative path. Its other members are skipped, whatever they are."""
    files: dict[str, bytes] = {}
    commit = ""
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                name = member.name.removeprefix(pin.prefix + "/")
                if member.name == pin.commit_file:
                    commit = read_member(archive, member).decode("ascii", "replace").strip()
                elif name == member.name or member.isdir() or not any(is_under(e, name) for e in pin.kept):
                    continue
                elif name in files or not is_inside(name):
                    raise FetchError(f"{sdist} has a member {member.name!r}, which leads outside or comes twice")
                else:
                    files[name] = read_member(archive, member)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FetchError(f"{sdist} is not a complete .tar.gz archive: {error}") from None
    if pin.commit_file and not (commit and commit.startswith(pin.commit)):
        raise FetchError(f"{LOCK} says commit {pin.commit}, {pin.commit_file} in {sdist} {commit or 'nothing'}")
    return require_all_kept(pin, files, sdist)


def is_inside(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/")) and not re.search(r"[\\:]", name)


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isreg() else None
    if file is None:
        raise FetchError(f"{member.name!r} in the archive is a link or a device, not a regular file")
    return file.read()


def load_directory(pin: Pin, directory: Path) -> dict[str, bytes]:
    """The kept files of a source folder, by relative path."""
    files: dict[str, bytes] = {}
    for entry in pin.kept:
        for path in directory.glob(f"{entry}**/*" if entry.endswith("/") else entry):
            if path.is_symlink():
                raise FetchError(f"{path} is a link, not a regular file")
            if path.is_file():
                files[path.relative_to(directory).as_posix()] = path.read_bytes()
    return require_all_kept(pin, files, directory)


def require_all_kept(pin: Pin, files: dict[str, bytes], where: Path) -> dict[str, bytes]:
    missing = [entry for entry in pin.kept if not any(is_under(entry, name) for name in files)]
    if missing:
        raise FetchError(f"{where} has nothing under the kept path(s) {', '.join(missing)} of {LOCK}")
    return files


def patch_command(tree: Path) -> tuple[list[str], dict[str, str]]:
    """A tool that applies a patch without fuzz, and the environment to run it in.

    Inside a repository `git apply` silently skips what it takes to lie outside the current folder. So it must
    not find one: neither by the environment (a hook sets GIT_DIR) nor in a parent folder. The user's git
    settings (apply.whitespace, core.autocrlf) must not change the result either.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    if git := shutil.which("git"):
        return [git, "apply", "--verbose", "--whitespace=nowarn", "-p1"], env
    if patch := shutil.which("patch"):
        return [patch, "-p1", "--fuzz=0", "--force", "--no-backup-if-mismatch", "-i"], env
    raise FetchError("applying the patch queue takes git or patch, and neither is on PATH; install one of them")


def named_files(patch: Path) -> set[str]:
    """The files that a patch says it changes."""
    text = patch.read_text(encoding="utf-8", errors="replace")
    pairs = re.findall(r"^--- ([^\t\n]+).*\n\+\+\+ ([^\t\n]+).*\n@@ ", text, re.MULTILINE)
    return {name.partition("/")[2] for pair in pairs for name in pair if name != "/dev/null"}


def apply_patches(pin: Pin, tree: Path) -> dict[str, str]:
    """Apply the queue and return the resulting manifest. A patch has to change just the files it names."""
    before = manifest(tree)
    for patch in pin.patches:
        command, env = patch_command(tree)
        code, output = run([*command, str(patch)], tree, env)
        if code:
            raise FetchError(f"{patch.name} does not apply. {Path(command[0]).name} said:{output}")
        after = manifest(tree)
        changed, named = set(differences(before, after)), named_files(patch)
        if changed != named or not named:
            raise FetchError(f"{patch.name} names {sorted(named)}, but {command[0]} changed {sorted(changed)}")
        before = after
    return before


@contextmanager
def staging_folder() -> Iterator[Path]:
    """A folder on the file system of the tree, so that moving its content into place is a rename.

    One run at a time has it: the file lock is dropped by the kernel with the process, however that ends, so
    what lies there when the lock is free was left by a killed run.
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note("waiting for another run to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            for stale in VENDOR.glob(STAGING_PREFIX + "*"):
                shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=VENDOR))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def stage_tree(pin: Pin, directory: Path | None, staging: Path) -> tuple[Path, Stamp]:
    """Pristine sources plus patches plus stamp, in the staging folder."""
    files = load_directory(pin, directory) if directory else load_sdist(pin, obtain_sdist(pin, staging))
    tree = staging / "llama.cpp"
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    stamp = Stamp(
        origin="directory" if directory else "sdist",
        sdist_sha256="" if directory else pin.sha256,
        commit="" if directory else pin.commit,
        inputs_sha256=pin.inputs_sha256,
        patch_sha256=pin.patch_sha256,
        source_sha256=source_sha256(files),
        files=apply_patches(pin, tree),
    )
    (tree / STAMP_NAME).write_text(json.dumps(asdict(stamp), indent=1) + "\n", encoding="utf-8")
    return tree, stamp


def move_in(new: Path, files: dict[str, str], staging: Path) -> None:
    """Rename `new` to the tree. Killed between the two renames, the old tree is gone and none is there.

    Files that stay as they are keep their time, so that a changed patch does not rebuild everything.
    """
    old = staging / "old"
    for name, digest in manifest(TREE).items():
        if files.get(name) == digest:
            time = (TREE / name).stat().st_mtime_ns
            os.utime(new / name, ns=(time, time))
    if os.path.lexists(TREE):
        TREE.rename(old)
    try:
        new.rename(TREE)
    except BaseException:
        if os.path.lexists(old):
            old.rename(TREE)
        raise


def make(force: bool) -> None:
    """Bring the tree up to date with lock, series and patches."""
    pin, directory = read_pin(), source_directory()
    if not force and found_current(pin, directory):
        return  # without the lock: the folder may be read-only
    with staging_folder() as staging:
        if not force and found_current(pin, directory):
            return  # another run made it meanwhile
        new, stamp = stage_tree(pin, directory, staging)
        if not force:
            refuse_to_lose_edits(read_stamp(), stamp)
        move_in(new, stamp.files, staging)
    note(f"made {TREE}: {len(stamp.files)} files, {description(pin, directory)}")


def found_current(pin: Pin, directory: Path | None) -> bool:
    stamp = read_stamp()
    if stamp is None or not is_current(stamp, pin, directory):
        return False
    differing = differences(stamp.files, manifest(TREE))
    missing = {name: what for name, what in differing.items() if what == "missing"}
    if missing:
        raise FetchError(
            f"{TREE} lacks files; --force makes it again (and discards edits):{listing(as_lines(missing))}"
        )
    edits = as_lines(differing)
    note(f"{TREE} is up to date" + (f"; local edits are left alone:{listing(edits)}" if edits else ""))
    return True


def description(pin: Pin, directory: Path | None) -> str:
    source = f"{directory} (unverified)" if directory else f"{pin.filename} (commit {pin.commit})"
    return f"{source} plus {len(pin.patches)} patch(es)"


def check() -> int:
    """Compare queue and tree with what the source gives now; print a report and return the exit code."""
    pin, directory = read_pin(), source_directory()
    unlisted = {path.name for path in PATCHES.iterdir()} - {SERIES.name} - {path.name for path in pin.patches}
    problems = [f"patches/{name} is not in the series" for name in sorted(unlisted)]
    with staging_folder() as staging:
        try:
            _, fresh = stage_tree(pin, directory, staging)
        except FetchError as error:
            problems.append(f"the tree was not compared: {error}")
        else:
            stamp = read_stamp()
            if stamp is None:
                problems.append(f"{TREE} is not there or has no readable stamp")
            elif stamp != fresh:
                problems.append("the stamp of the tree does not belong to this lock, queue and source")
            problems += as_lines(differences(fresh.files, manifest(TREE)))
    print("\n".join([*problems, f"{len(problems)} problem(s) against {description(pin, directory)}"]))
    return 1 if problems else 0


def status() -> int:
    """Print the stamp as JSON, with the state of the tree instead of the list of its files."""
    pin, directory, stamp = read_pin(), source_directory(), read_stamp()
    if stamp is None:
        raise FetchError(f"{TREE} is not there or has no readable stamp; run fetch.py")
    state = {"current": is_current(stamp, pin, directory), "edits": differences(stamp.files, manifest(TREE))}
    print(json.dumps(asdict(stamp) | {"files": len(stamp.files)} | state, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Make vendor/llama.cpp from the pinned sources and the patches.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--force", action="store_true", help="make it again; local edits are discarded")
    group.add_argument("--check", action="store_true", help="compare queue and tree with the source")
    group.add_argument("--status", action="store_true", help="print the stamp and the tree's state as JSON")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            return check()
        if arguments.status:
            return status()
        make(arguments.force)
    except (FetchError, OSError) as error:
        note(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted; nothing half-made is left")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
