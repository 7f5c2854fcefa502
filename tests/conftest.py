"""Shared fixtures: the embedded model, the validation texts that lie beside the repository, the slow tests' switch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

import pyhotexperts as phx

ROOT = Path(__file__).resolve().parents[1]
# The same examples in every run: a red run can be repeated.
settings.register_profile("pyhotexperts", derandomize=True, deadline=None)
settings.load_profile("pyhotexperts")

SHARED = Path(os.environ.get("PYHOTEXPERTS_SHARED", ROOT.parent / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    skip_gpu = pytest.mark.skip(reason="no GPU can be used by this process")
    has_gpu = any(device.is_gpu for device in phx.devices())
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(skip_gpu)


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def report_figure(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line that is printed after the tests: a measured figure."""
    return pytestconfig.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def texts() -> Path:
    """The folder of the validation texts, which are other people's and not in the repository."""
    folder = SHARED / "models"
    if not folder.is_dir():
        pytest.skip("needs ../shared/models (validation texts)")
    return folder


@pytest.fixture(scope="session")
def shared_model() -> Iterator[phx.Model]:
    """One embedded model for tests that leave it as it is."""
    with phx.Model(n_threads=1) as model:
        yield model


@pytest.fixture
def model(shared_model: phx.Model) -> phx.Model:
    """The embedded model with an empty context."""
    shared_model.reset()
    return shared_model


@pytest.fixture(scope="session")
def make_model() -> ModuleType:
    """benchmarks/make_model.py, the writer of geometry models."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "benchmarks" / "make_model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = module
    spec.loader.exec_module(module)
    return module
