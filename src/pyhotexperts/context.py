"""A native context: evaluates tokens, and gives logits, scores and routing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhotexperts import _ffi, scoring
from pyhotexperts.errors import ContextFullError, DecodeError
from pyhotexperts.placement import LoadRequest
from pyhotexperts.results import Routing

DOING = "cannot evaluate the tokens"


class Context:
    """Holds what was evaluated (the KV cache). `close()` frees it, once, before its model is freed."""

    def __init__(
        self, model: Any, n_vocab: int, request: LoadRequest, record_routing: bool = False, embeddings: bool = False
    ) -> None:
        out = _ffi.ffi.new("phx_context **")
        status = _ffi.lib.phx_context_new(model, request.context_params(record_routing, embeddings), out)
        _ffi.check(status, f"cannot make a context of {request.n_ctx or 'the default number of'} tokens")
        self.handle = out[0]
        self.n_ctx = int(_ffi.lib.phx_context_n_ctx(self.handle))
        self.n_sequences = int(_ffi.lib.phx_context_n_sequences(self.handle))
        self._n_vocab = n_vocab
        self.n_ubatch = request.n_ubatch
        self._lock = threading.RLock()  # `n_past` may be asked for by any thread

    def close(self) -> None:
        """Free the native context."""
        with self._lock:
            handle, self.handle = self.handle, _ffi.ffi.NULL
            _ffi.lib.phx_context_free(handle)

    @property
    def n_past(self) -> int:
        """Tokens evaluated since the context was made or cleared."""
        with self._lock:
            return int(_ffi.lib.phx_context_n_past(self.handle))

    def clear(self) -> None:
        """Forget everything that was evaluated."""
        _ffi.lib.phx_context_clear(self.handle)

    @property
    def tokens(self) -> list[int]:
        """The tokens evaluated since the context was made or cleared."""
        buf = _ffi.ffi.new("int32_t[]", self.n_ctx)
        n = _ffi.ffi.new("int32_t *")
        _ffi.check(_ffi.lib.phx_context_tokens(self.handle, buf, self.n_ctx, n), "cannot read the context")
        return list(_ffi.ffi.unpack(buf, n[0]))

    def keep(self, ids: Sequence[int]) -> int:
        """Forget what was evaluated, but for the beginning that it has in common with these tokens.

        Returns the number of tokens kept: less than there are, so that one remains to be evaluated.
        """
        n_kept = _ffi.ffi.new("int32_t *")
        _ffi.check(_ffi.lib.phx_context_keep(self.handle, ids, len(ids), n_kept), DOING)
        return int(n_kept[0])

    def decode(self, ids: Sequence[int], outputs: int) -> None:
        """Evaluate tokens, one native call per micro-batch, so that Ctrl-C gets through.

        Parameters
        ----------
        outputs
            PHX_OUTPUTS_LAST: logits of the last token; PHX_OUTPUTS_ALL: of all tokens of the last micro-batch.
        """
        lib = _ffi.lib
        if self.n_past + len(ids) > self.n_ctx:
            raise ContextFullError(
                f"{len(ids)} tokens after {self.n_past} do not fit into the context of {self.n_ctx}: "
                "call reset() first, or load the model with a larger n_ctx"
            )
        for at in range(0, len(ids), self.n_ubatch):
            part = ids[at : at + self.n_ubatch]
            is_last = at + self.n_ubatch >= len(ids)
            wanted = lib.PHX_OUTPUTS_NONE if outputs == lib.PHX_OUTPUTS_LAST and not is_last else outputs
            _ffi.check(lib.phx_decode(self.handle, part, len(part), wanted), DOING)

    def decode_sequences(self, ids: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]) -> None:
        """Evaluate tokens in one pass, each after those of its sequence before; wanted: whether to keep its logits."""
        status = _ffi.lib.phx_decode_sequences(self.handle, ids, sequences, wanted, len(ids))
        _ffi.check(status, DOING)

    def clear_sequence(self, sequence: int) -> None:
        """Forget what was evaluated for one sequence."""
        _ffi.check(_ffi.lib.phx_context_clear_sequence(self.handle, sequence), "cannot clear the sequence")

    def embedding(self, width: int) -> npt.NDArray[np.float32]:
        """float32[width]: embedding of what was evaluated, of a context made for embeddings."""
        out = np.empty(width, np.float32)
        _ffi.check(_ffi.lib.phx_embedding(self.handle, _ffi.ffi.from_buffer("float[]", out)), "reading the embedding")
        return out

    def logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """float32[n_rows, n_vocab]: the first rows of logits that the last evaluation left."""
        out = np.empty((n_rows, self._n_vocab), np.float32)
        status = _ffi.lib.phx_logits(self.handle, 0, n_rows, _ffi.ffi.from_buffer("float[]", out))
        _ffi.check(status, "cannot read logits")
        return out

    def nll(self, ids: Sequence[int], first: int) -> npt.NDArray[np.float64]:
        """Evaluate tokens from an empty context.

        Returns
        -------
        float64[len(ids) - 1 - first]: negative log-likelihoods, in nats, of tokens first + 1 ... len(ids) - 1.
        """
        lib = _ffi.lib
        self.clear()
        if first:
            self.decode(ids[:first], lib.PHX_OUTPUTS_NONE)
        parts = []
        for at in range(first, len(ids) - 1, self.n_ubatch):
            part = ids[at : min(at + self.n_ubatch, len(ids) - 1)]
            self.decode(part, lib.PHX_OUTPUTS_ALL)
            parts.append(scoring.nll_of(self.logits(len(part)), ids[at + 1 : at + 1 + len(part)]))
        nll = np.concatenate(parts)
        if not np.isfinite(nll).all():
            raise DecodeError("the model's logits are not finite numbers: the file is damaged, or a type overflows")
        return nll

    def routing(self, n_expert: int) -> Routing:
        """What a context that records routing has recorded."""
        ffi, lib = _ffi.ffi, _ffi.lib
        n_tokens, n_layers, top_k = (ffi.new("int32_t *") for _ in range(3))
        _ffi.check(lib.phx_routing_shape(self.handle, n_tokens, n_layers, top_k), "reading the routing")
        layers = np.empty(n_layers[0], np.int32)
        experts = np.empty((n_tokens[0], n_layers[0], top_k[0]), np.uint16)
        status = lib.phx_routing_read(
            self.handle, ffi.from_buffer("int32_t[]", layers), ffi.from_buffer("uint16_t[]", experts)
        )
        _ffi.check(status, "reading the routing")
        return Routing(layers=tuple(layers.tolist()), experts=experts, n_expert=n_expert)
