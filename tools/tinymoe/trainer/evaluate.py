"""Validation loss, perplexity by the protocol of llama-perplexity, and routing traces. Runs eagerly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from .model import Model, rms_norm

Offsets = dict[str, list[int]]  # domain -> first token, last token + 1


@torch.no_grad()
def _token_losses(model: Model, tokens: Tensor, targets: Tensor, batch: int) -> Tensor:
    losses = []
    for start in range(0, len(tokens), batch):
        hidden, _, _ = model.hidden(tokens[start : start + batch])
        logits = F.linear(hidden, model.head).float()
        part = targets[start : start + batch]
        losses.append(F.cross_entropy(logits.transpose(1, 2), part, reduction="none"))
    return torch.cat(losses)


def validation_losses(
    model: Model,
    tokens: np.ndarray,
    offsets: Offsets,
    ctx: int,
    autocast: bool,
    batch: int = 16,
    max_windows: int | None = None,
) -> dict[str, float]:
    """Return nats per token of each domain's held-out documents, in windows of `ctx` tokens.

    `autocast`: in bfloat16, as in training; else in float32. `max_windows`: per domain, None = all.
    """
    device = model.embed.device
    result = {}
    for domain, (first, last) in offsets.items():
        text = torch.from_numpy(tokens[first:last].astype(np.int64)).to(device)
        count = (len(text) - 1) // ctx
        if max_windows:
            count = min(count, max_windows)
        x = text[: count * ctx].view(count, ctx)
        y = text[1 : count * ctx + 1].view(count, ctx)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            result[domain] = _token_losses(model, x, y, batch).mean().item()
    return result


def _windows(tokens: np.ndarray, ctx: int, count: int, device: torch.device) -> Tensor:
    """BOS (token 0) and the text in windows of `ctx` tokens, the first token of each replaced by BOS."""
    text = np.concatenate([[0], tokens.astype(np.int64)])
    windows = torch.from_numpy(text[: count * ctx].copy()).view(count, ctx).to(device)
    windows[:, 0] = 0
    return windows


def perplexities(
    model: Model,
    tokens: np.ndarray,
    offsets: Offsets,
    ctx: int,
    batch: int = 16,
    max_windows: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what `llama-perplexity -c ctx` measures: the second half of each window is scored."""
    result = {}
    for domain, (first, last) in offsets.items():
        count = (last - first + 1) // ctx
        if max_windows:
            count = min(count, max_windows)
        windows = _windows(tokens[first:last], ctx, count, model.embed.device)
        losses = _token_losses(model, windows[:, :-1], windows[:, 1:], batch)
        nll = losses[:, ctx // 2 :].mean().item()
        result[domain] = {"nll": nll, "ppl": math.exp(nll), "chunks": count}
    return result


@torch.no_grad()
def routing_trace(
    model: Model, tokens: np.ndarray, offsets: Offsets, ctx: int, n_windows: int
) -> dict[str, np.ndarray]:
    """Record which experts the first windows of each domain use.

    Returns
    -------
    dict
        `ids` uint8 [domain, token, layer, top_k], by falling weight; `weights` float16, same shape;
        `tokens` uint16 [domain, token]; `domains` [domain].
    """
    c = model.config
    cos, sin = model.cos[:ctx], model.sin[:ctx]
    shape = (len(offsets), n_windows * ctx, c.n_layer, c.top_k)
    all_ids = np.zeros(shape, np.uint8)
    all_weights = np.zeros(shape, np.float16)
    all_tokens = np.zeros(shape[:2], np.uint16)
    for row, (first, last) in enumerate(offsets.values()):
        windows = _windows(tokens[first:last], ctx, n_windows, model.embed.device)
        all_tokens[row] = windows.reshape(-1).cpu().numpy()
        x = F.embedding(windows, model.embed)
        for number, layer in enumerate(model.layers):
            h = rms_norm(layer.attention(x, cos, sin), layer.ffn_norm, c.eps).view(-1, c.n_embd)
            p = F.softmax(F.linear(h, layer.router), -1)
            weights, ids = torch.topk(p, c.top_k, -1, sorted=True)
            all_ids[row, :, number] = ids.cpu().numpy()
            all_weights[row, :, number] = (weights / weights.sum(-1, keepdim=True)).cpu().numpy()
            x, _, _ = layer(x, cos, sin)
    return {
        "ids": all_ids,
        "weights": all_weights,
        "tokens": all_tokens,
        "domains": np.array(list(offsets)),
    }
