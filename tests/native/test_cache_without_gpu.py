"""Hot experts where they cannot be had: a logged reason, or an error if the caller is strict."""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest

import pyhotexperts as phx
from pyhotexperts import machine


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    if machine.has_gpu():
        pytest.skip("for a process without a GPU")


def test_the_reason_is_logged_and_in_the_status(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyhotexperts"), phx.Model(offload=phx.hot_experts(slots=8)) as model:
        status = model.cache.status
        assert model.offload == phx.cpu_experts()
        assert model.generate("The harbour", max_tokens=3).tokens
        model.cache.reset_stats()
        assert model.cache.residency().shape == (0, 0)
    assert status.requested
    assert not status.active
    assert "needs a GPU" in status.reason
    assert "not active" in str(status)
    assert (status.slots, status.hit_rate, status.hits.dtype) == (0, 0.0, np.int64)
    assert any("needs a GPU" in r.message for r in caplog.records)
    with pytest.raises(phx.ClosedError):
        _ = model.cache.status


def test_strict_refuses() -> None:
    with pytest.raises(phx.UnavailableError, match=r"hot-expert cache cannot be set up.*needs a GPU"):
        phx.Model(offload=phx.hot_experts(strict=True))


@pytest.mark.parametrize("offload", [phx.cpu_experts(), phx.hot_experts(slots=0), "auto"], ids=str)
def test_nobody_asked_for_it(offload: phx.Offload | str) -> None:
    with phx.Model(offload=offload) as model:
        status = model.cache.status
    assert not status.requested
    assert not status.active
    assert "does not use it" in status.reason


def test_a_mode_may_be_given_by_name() -> None:
    with phx.Model(offload="cpu_experts") as model:
        assert model.offload == phx.cpu_experts()
    with phx.Model(offload="hot_experts") as model:
        assert model.cache.status.requested


def test_the_cache_is_not_copied_and_status_compares() -> None:
    with phx.Model() as model:
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(model.cache)
        status = model.cache.status
        assert status == status  # noqa: PLR0124: numpy arrays in it must not make this an error
        assert hash(status)
        assert pickle.loads(pickle.dumps(status)).reason == status.reason
