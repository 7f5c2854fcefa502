"""Claims: one at a time, given back by release or with the object that holds them."""

from __future__ import annotations

import threading

import pytest

import pyhotexperts as phx
from pyhotexperts.exclusive import Exclusive


def test_a_second_claim_is_refused_until_the_first_is_released() -> None:
    exclusive = Exclusive()
    with exclusive.claim("no"), pytest.raises(phx.BusyError, match="no"):
        exclusive.claim("no")
    claim = exclusive.claim("no")
    claim.release()
    claim.release()
    again = exclusive.claim("no")
    claim.release()  # an old claim does not give back the new one
    with pytest.raises(phx.BusyError):
        exclusive.claim("no")
    again.release()


def test_a_lost_claim_is_given_back() -> None:
    exclusive = Exclusive()

    claim = exclusive.claim("no")
    with pytest.raises(phx.BusyError):
        exclusive.claim("no")
    del claim  # as when a KeyboardInterrupt unwinds the frame that held it
    exclusive.claim("no").release()


def test_threads_never_hold_it_together() -> None:
    exclusive = Exclusive()
    inside = 0
    taken = 0
    most = 0

    def work() -> None:
        nonlocal inside, taken, most
        for _ in range(2000):
            try:
                with exclusive.claim("no"):
                    inside += 1
                    most = max(most, inside)
                    taken += 1
                    inside -= 1
            except phx.BusyError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 100
