"""Models of the Hugging Face Hub, from a hub of our own on this machine: nothing is downloaded from elsewhere."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from test_commands import command
from test_other_models import write_dense

import pyhotexperts as phx
from pyhotexperts import hub

COMMIT = "c" * 40
BIG = ["big/m-IQ2_XXS-00001-of-00002.gguf", "big/m-IQ2_XXS-00002-of-00002.gguf"]
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


class FakeHub(ThreadingHTTPServer):
    """Answers as the Hub does, for one repository and its files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = files
        self.requests: list[str] = []
        self.cut_after: int | None = None  # bytes of a file after which the connection is cut, once
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        repo, _, file = path.partition("/resolve/")
        file = file.partition("/")[2]  # after the branch or commit
        if path.startswith("/api/models/user/gated"):
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif path in ("/api/models/user/model", "/api/models/user/model/revision/main"):
            names = [{"rfilename": name} for name in [*self.server.files, "README.md"]]
            self.reply(200, {}, json.dumps({"id": "user/model", "sha": COMMIT, "siblings": names}).encode())
        elif path.startswith("/api/models/user/model/revision/"):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif repo == "/user/model" and file in self.server.files:
            self.file(self.server.files[file], with_body)
        elif repo == "/user/model":
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
        else:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})

    def file(self, data: bytes, with_body: bool) -> None:
        tag = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        first = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]) if self.headers.get("Range") else 0
        if first:
            tag["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = data[first:]
        self.send_response(206 if first else 200)
        for key, value in {**tag, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            cut, self.server.cut_after = self.server.cut_after, None
            self.wfile.write(body[:cut])

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeHub]:
    write_dense(tmp_path / "model-Q8_0.gguf")
    write_dense(tmp_path / "split.gguf", tensors_per_file=8)
    files = {"model-Q8_0.gguf": (tmp_path / "model-Q8_0.gguf").read_bytes(), "mmproj-Q8_0.gguf": b"GGUF"}
    for part in tmp_path.glob("split-*.gguf"):
        files[f"Q4_K_M/{part.name.replace('split', 'model-Q4_K_M')}"] = part.read_bytes()
    with FakeHub(files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_names_of_repositories() -> None:
    assert hub.split_name("user/model-GGUF:Q4_K_M") == ("user/model-GGUF", "Q4_K_M")
    assert hub.split_name("user/model") == ("user/model", None)
    for wrong in ("model", "", "user/model:", "a/b/c", "user/mo del", "user/../x", "https://example.com/user/model", 5):
        with pytest.raises(phx.ConfigError, match="user/model"):
            phx.Model.from_pretrained(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quant", "filename", "expected"),
    [
        (None, None, ["m-Q4_K_M.gguf"]),
        ("q8_0", None, ["m-Q8_0.gguf"]),
        ("Q4_K", None, None),
        ("UD-Q4_K_M", None, ["UD/m-UD-Q4_K_M.gguf"]),
        ("IQ2_XXS", None, BIG),
        (None, BIG[1], BIG),
        (None, "mmproj-F16.gguf", None),
        ("F16", None, None),
    ],
)  # fmt: skip
def test_which_file_is_chosen(quant: str | None, filename: str | None, expected: list[str] | None) -> None:
    files = ["UD/m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "README.md", "m.imatrix.gguf",
             *BIG]  # fmt: skip
    if expected is None:
        with pytest.raises(phx.ModelNotFoundError, match=r"it has UD/m-UD-Q4_K_M\.gguf"):
            hub.choose(files, quant, filename, "user/m")
    else:
        assert hub.choose(files, quant, filename, "user/m") == expected


def test_a_repository_without_models_says_so() -> None:
    with pytest.raises(phx.ModelNotFoundError, match="no model in GGUF format"):
        hub.choose(["model.safetensors", "mmproj.gguf"], None, None, "user/m")


def test_a_model_is_downloaded_once_with_all_its_files(fake: FakeHub, tmp_path: Path) -> None:
    path = hub.download("user/model", cache_dir=tmp_path / "cache", endpoint=fake.url)
    assert path.name == "model-Q4_K_M-00001-of-00003.gguf"
    with phx.Model(path, n_threads=1) as model:
        assert model.generate([1], max_tokens=2).tokens
    n_requests = sum(r.startswith("GET") and "/resolve/" in r for r in fake.requests)
    assert n_requests == 3
    hub.download("user/model", cache_dir=tmp_path / "cache", endpoint=fake.url)
    assert sum(r.startswith("GET") and "/resolve/" in r for r in fake.requests) == n_requests


def test_an_interrupted_download_goes_on_where_it_stopped(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is lost at most
    fake.cut_after = 5000
    path = hub.download("user/model:Q8_0", cache_dir=tmp_path / "cache", endpoint=fake.url)
    assert path.read_bytes() == fake.files["model-Q8_0.gguf"]
    assert any("bytes=5000-" in r for r in fake.requests)


def test_without_a_network_the_cache_is_used(fake: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    path = hub.download("user/model:Q8_0", cache_dir=cache, endpoint=fake.url)
    with caplog.at_level(logging.WARNING, logger="pyhotexperts"):
        assert hub.download("user/model:q8_0", cache_dir=cache, endpoint=NOWHERE) == path
    assert "cannot be reached" in caplog.text
    with phx.Model.from_pretrained("user/model:Q8_0", cache_dir=cache, local_files_only=True, n_threads=1) as model:
        assert model.path == str(path)
    with pytest.raises(phx.ModelNotFoundError, match="the cache has no Q4_K_M"):
        hub.download("user/model:Q4_K_M", cache_dir=cache, local_files_only=True)


def test_no_network_and_nothing_in_the_cache(tmp_path: Path) -> None:
    with pytest.raises(phx.UnavailableError, match=r"cannot be reached .* not in the cache: connect"):
        hub.download("user/model", cache_dir=tmp_path / "cache", endpoint=NOWHERE)
    with pytest.raises(phx.UnavailableError, match="local_files_only is set, and user/model is not in the cache"):
        phx.Model.from_pretrained("user/model", cache_dir=tmp_path / "cache", local_files_only=True)


@pytest.mark.parametrize(
    ("repo", "options", "kind", "message"),
    [
        ("user/nothing", {}, phx.ModelNotFoundError, "the Hub has no user/nothing"),
        ("user/gated", {}, phx.UnavailableError, "is gated"),
        ("user/model", {"revision": "v9"}, phx.ModelNotFoundError, "no revision v9"),
        ("user/model:Q2_K", {}, phx.ModelNotFoundError, "has no Q2_K: it has .*model-Q8_0.gguf"),
        ("user/model", {"filename": "x.gguf"}, phx.ModelNotFoundError, "has no x.gguf"),
    ],
)
def test_refusals(
    fake: FakeHub, tmp_path: Path, repo: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hub.download(repo, cache_dir=tmp_path / "cache", endpoint=fake.url, **options)


def test_a_shard_that_the_repository_lacks_is_named(fake: FakeHub, tmp_path: Path) -> None:
    name = "Q4_K_M/model-Q4_K_M-00002-of-00003.gguf"
    del fake.files[name]
    with pytest.raises(phx.ModelNotFoundError, match="lacks a file"):
        hub.download("user/model:Q4_K_M", cache_dir=tmp_path / "cache", endpoint=fake.url)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, huggingface_hub.__name__, None)
    with pytest.raises(phx.UnavailableError, match=r"pip install .pyhotexperts\[hf\]"):
        phx.Model.from_pretrained("user/model")


def test_the_command_takes_a_repository(fake: FakeHub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": fake.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    flags = ("-hf", "user/model:Q8_0", "-t", "1", "-p", "a")
    run = command("generate", *flags, env=env)
    assert b"no tokenizer" in run.stderr  # it was found, downloaded and loaded; this one takes no text
    assert (tmp_path / "cache" / "models--user--model").is_dir()
    assert b"has no Q2_K" in command("generate", "-hf", "user/model:Q2_K", "-p", "a", env=env).stderr
    assert b"contradict" in command("generate", *flags, "-m", "x.gguf", env=env).stderr
    assert b"give --hf-repo too" in command("generate", "-hff", "x.gguf", "-p", "a").stderr
