"""From token bytes to text: whole UTF-8 characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextAssembler:
    """Joins the bytes of tokens to text that is safe to show.

    Bytes of an unfinished character are held back, and so is text that may be the beginning of a stop string.
    Bytes that are no UTF-8 become U+FFFD.

    Parameters
    ----------
    stop
        Stop strings: the first one to appear ends the text before it.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stop_string: str | None = None  # the stop string that was met

    def push(self, piece: bytes) -> str:
        """Add a token's bytes; returns the text that became certain."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """Returns what was held back, at the end of a generation."""
        text = self._release(self._decoder.decode(b"", final=True))
        text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stop_string is not None:
            return ""
        self._held += new
        # The one that is complete first, so that the result does not depend on how the text is cut into tokens.
        first = min(
            ((at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0),
            default=None,
        )
        if first is not None:
            _, at, self.stop_string = first
            text, self._held = self._held[:at], ""
            return text
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
