"""One caller at a time, even when Ctrl-C strikes at the worst moment.

A claim is held by an object rather than by the state of a lock: when a KeyboardInterrupt falls between taking it and
the statement that would give it back, the object dies with the frame, and the claim with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from pyhotexperts.errors import BusyError


class Claim:
    """Held as long as it is referenced and not released; a context manager that releases."""

    def __init__(self, exclusive: Exclusive) -> None:
        self._exclusive = exclusive
        self.thread = threading.get_ident()

    def release(self) -> None:
        """Give the claim back. May be called twice."""
        self._exclusive._release(self)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Exclusive:
    """Something that one caller may use at a time.

    Parameters
    ----------
    same_thread
        Whether the thread that holds the claim may take it again (the older claim is then void).
    """

    def __init__(self, same_thread: bool = False) -> None:
        self._same_thread = same_thread
        # Of `_holder`, for an instant. Re-entrant: a stream that is collected meanwhile releases its claim.
        self._guard = threading.RLock()
        self._holder: Callable[[], Claim | None] = lambda: None

    def claim(self, refusal: str) -> Claim:
        """Take the claim, or raise `BusyError` with the message."""
        claim = Claim(self)
        try:
            with self._guard:
                holder = self._holder()
                if holder is not None and not (self._same_thread and holder.thread == claim.thread):
                    raise BusyError(refusal)
                self._holder = weakref.ref(claim)
            return claim
        except BaseException:
            self._release(claim)  # the exception's traceback keeps this frame, and so the claim
            raise

    def _release(self, claim: Claim) -> None:
        with self._guard:
            if self._holder() is claim:
                self._holder = lambda: None
