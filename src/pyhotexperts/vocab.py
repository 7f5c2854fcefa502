"""Text to tokens and back, with the checks that native code does not make."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeGuard

from pyhotexperts import _ffi
from pyhotexperts.errors import BusyError, ClosedError, ConfigError, PromptError
from pyhotexperts.results import ModelInfo

Prompt = str | bytes | Sequence[int]
Batch = list[str] | list[bytes] | list[Sequence[int]] | list[list[int]] | tuple[Prompt, ...]


def is_batch(prompt: Prompt | Batch) -> TypeGuard[Batch]:
    """Whether these are several prompts: a list of texts or of lists of token ids, or an empty one: none of them."""
    return isinstance(prompt, list | tuple) and (not prompt or isinstance(prompt[0], Sized))


class Vocab:
    """The tokenizer of a loaded model.

    Its methods may be called while another thread generates; a lock keeps them apart from `close` alone.
    """

    def __init__(self, model: Any, info: ModelInfo) -> None:
        self._model = model
        self._info = info
        self._lock = threading.RLock()  # re-entrant: a signal handler may use the vocabulary while a call runs
        self._pieces: dict[int, bytes] = {}  # of the tokens generated so far: asked for once per token
        self._calls = 0  # that run now, all of them in the thread that holds the lock

    def close(self) -> None:
        """Forget the model, which is about to be freed.

        Raises
        ------
        BusyError
            If this thread is inside a call (and this is a signal handler).
        """
        with self._lock:
            if self._calls:
                raise BusyError("the model's vocabulary is in use: close the model after the call that runs")
            self._model = None

    def tokenize(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""
        data = _utf8(text)
        ids: list[int] = _fill(
            "int32_t[]",
            len(data) + 16,
            lambda buf, cap, n: self._call("phx_tokenize", data, len(data), add_special, parse_special, buf, cap, n),
            "cannot tokenize the text",
        )
        return ids

    def detokenize(self, tokens: Sequence[int], special: bool) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD."""
        ids = self.checked(tokens)
        data: bytes = _fill(
            "char[]",
            16 * len(ids) + 16,
            lambda buf, cap, n: self._call("phx_detokenize", ids, len(ids), special, buf, cap, n),
            "cannot turn tokens into text",
        )
        return data.decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """Bytes of a generated token's text; none for special tokens and for a model without tokenizer."""
        if not self._info.has_vocab:
            return b""
        known = self._pieces.get(token)
        if known is not None:
            return known
        data: bytes = _fill(
            "char[]",
            64,
            lambda buf, cap, n: self._call("phx_token_to_piece", token, False, buf, cap, n),
            "cannot turn a token into text",
        )
        self._pieces[token] = data
        return data

    def name(self, token: int) -> str:
        """Text of a special token, "" for -1."""
        return "" if token < 0 else self.detokenize([token], special=True)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(self._call("phx_token_is_eog", token))

    def prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, at least one."""
        ids = self.tokenize(prompt, True, False) if isinstance(prompt, str | bytes) else self.checked(prompt)
        if not ids:
            raise PromptError("the prompt is empty, and the model has no BOS token to start from: give some text")
        return ids

    def chat_prompt(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which names its special tokens itself."""
        ids = self.tokenize(text, False, True)
        bos = self._info.token_bos
        if self._info.add_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        if not ids:
            raise PromptError("the chat template makes an empty prompt of these messages")
        return ids

    def continued(self, tokens: Sequence[int], text: str) -> list[int]:
        """Token ids of a text in the middle of a prompt: the given tokens as far as it begins with their text."""
        rest = text.encode()
        n_used = at = end = 0
        for n, token in enumerate(tokens, 1):
            piece = self.piece(token)
            if not piece or not rest.startswith(piece, end):
                break
            end += len(piece)
            if rest[end : end + 1] < b"\x80" or rest[end : end + 1] >= b"\xc0":  # not inside a character
                n_used, at = n, end
        return [*tokens[:n_used], *self.tokenize(rest[at:], False, True)]

    def checked(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as a list of ints, if all are of this model."""
        n_vocab = self._info.n_vocab
        ids = []
        try:
            if isinstance(tokens, str | bytes):
                raise TypeError
            items = list(tokens)
        except TypeError:
            raise PromptError(f"expected text or a sequence of token ids, not {type(tokens).__name__}") from None
        for token in items:
            try:
                number = -1 if isinstance(token, bool) else operator.index(token)
            except TypeError:
                number = -1
            if not 0 <= number < n_vocab:
                raise PromptError(
                    f"{token!r} is no token of this model: token ids are integers from 0 to {n_vocab - 1}"
                )
            ids.append(number)
        return ids

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text, None if there is none of that key."""
        if not isinstance(key, str) or "\0" in key:
            raise ConfigError(f"a metadata key is text without zero bytes, not {key!r}")
        try:
            name = key.encode()
        except UnicodeError:
            return None
        if self._call("phx_model_meta", name, _ffi.ffi.NULL, 0) < 0:
            return None
        return _ffi.read_string(lambda buf, cap: self._call("phx_model_meta", name, buf, cap))

    def _call(self, function: str, *arguments: Any) -> int:
        _ffi.refuse_fork()
        with self._lock:
            if self._model is None:
                raise ClosedError("the model was closed: load it again")
            self._calls += 1
            try:
                return int(getattr(_ffi.lib, function)(self._model, *arguments))
            finally:
                self._calls -= 1


def _fill(kind: str, cap: int, call: Callable[[Any, int, Any], int], doing: str) -> Any:
    """What a native function writes into an array (made larger if it says so): a list of ints, or bytes."""
    needed = _ffi.ffi.new("int32_t *")
    while True:
        buf = _ffi.ffi.new(kind, cap)
        status = call(buf, cap, needed)
        if status != _ffi.lib.PHX_ERR_BUFFER:
            break
        cap = needed[0]
    _ffi.check(status, doing)
    return _ffi.ffi.unpack(buf, needed[0])


def _utf8(text: str | bytes) -> bytes:
    try:
        if isinstance(text, str):
            return text.encode("utf-8")
        if isinstance(text, bytes):
            text.decode("utf-8")
            return text
    except UnicodeError as e:
        raise PromptError(f"the text is not valid Unicode: {e}") from None
    raise PromptError(f"expected text or UTF-8 bytes, not {type(text).__name__}")
