"""Negative log-likelihoods from logits, and llama.cpp's perplexity protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pyhotexperts.errors import PromptError
from pyhotexperts.results import Perplexity, TokenLogprob

ROW_BLOCK = 4_000_000  # logits handled at a time, so that float64 copies stay small


def nll_of(logits: npt.NDArray[np.float32], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood, in nats, of one target per row of logits.

    Parameters
    ----------
    logits
        float32[n, n_vocab].
    targets
        n token ids.
    """
    n, n_vocab = logits.shape
    out = np.empty(n)
    step = max(1, ROW_BLOCK // n_vocab)
    for at in range(0, n, step):
        rows = logits[at : at + step].astype(np.float64)
        top = rows.max(axis=1)
        chosen = rows[np.arange(len(rows)), np.asarray(targets[at : at + step])]
        rows -= top[:, None]
        out[at : at + step] = top + np.log(np.exp(rows, out=rows).sum(axis=1)) - chosen
    return out


def token_logprob(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
    """Log-probability of a token, and the n_top most likely ones, from its row of logits: float32[n_vocab]."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    n_top = min(n_top, len(row))
    top = np.argpartition(-row, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
    top = top[np.argsort(-row[top], kind="stable")]
    return TokenLogprob(
        token=token, logprob=float(row[token]), top=tuple(zip(top.tolist(), row[top].tolist(), strict=True))
    )


def perplexity(
    tokens: Sequence[int],
    n_ctx: int,
    max_chunks: int | None,
    bos: int,
    score_second_half: Callable[[Sequence[int]], npt.NDArray[np.float64]],
) -> Perplexity:
    """Perplexity of tokens by the protocol of ``llama-perplexity -c n_ctx``.

    The tokens are cut into chunks of `n_ctx`; each begins with the BOS token in place of its own first one (if the
    model has one), and the tokens of its second half are scored.

    Parameters
    ----------
    bos
        BOS token, -1 = none.
    score_second_half
        Evaluates a chunk in an empty context; returns the negative log-likelihoods of its tokens
        n_ctx // 2 + 1 .. n_ctx - 1.
    """
    n_chunks = len(tokens) // n_ctx
    if max_chunks is not None:
        n_chunks = min(n_chunks, max_chunks)
    if n_chunks == 0:
        raise PromptError(
            f"the text has {len(tokens)} tokens, fewer than one chunk of {n_ctx}: give a longer text or a smaller n_ctx"
        )
    total, count = 0.0, 0
    for k in range(n_chunks):
        chunk = list(tokens[k * n_ctx : (k + 1) * n_ctx])
        if bos >= 0:
            chunk[0] = bos
        nll = score_second_half(chunk)
        total += float(nll.sum())
        count += len(nll)
    return Perplexity(mean_nll=total / count, n_scored=count, n_chunks=n_chunks, n_ctx=n_ctx)
