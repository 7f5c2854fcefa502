"""The model in PyTorch: llama.cpp's qwen3moe layout.

All experts of a layer are computed in two plain matrix products (64 x 128 = 8192 hidden units); in between,
the units of the experts that the router did not select are multiplied by zero. For experts this small that is
faster on a GPU than gathering the tokens of each expert, and it is exactly the sparse model that llama.cpp
runs.

Shapes in comments: B sequences, T tokens each, N = B * T, D = n_embd, E experts, F = n_ff.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from .config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, T, head_dim]; the pairs are the two halves of a head ("neox")."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class Layer(nn.Module):
    """Attention and experts of one layer; the random start depends on the order of the parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, ff, n_expert = config.n_embd, config.n_ff, config.n_expert
        q_width = config.n_head * config.head_dim
        kv_width = config.n_kv * config.head_dim
        std = width**-0.5
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.q_norm = nn.Parameter(torch.ones(config.head_dim))
        self.k_norm = nn.Parameter(torch.ones(config.head_dim))
        self.wq = _normal(q_width, width, std=std)
        self.wk = _normal(kv_width, width, std=std)
        self.wv = _normal(kv_width, width, std=std)
        self.wo = _normal(width, q_width, std=std * 0.3)
        self.router = _normal(n_expert, width, std=0.02)
        self.wgu = _normal(2, n_expert, ff, width, std=std * 0.8)  # gate and up
        self.wd = _normal(n_expert, ff, width, std=0.3 * ff**-0.5)  # down

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> x + attention(x)"""
        c = self.config
        n_batch, n_tokens, _ = x.shape
        h = rms_norm(x, self.attn_norm, c.eps)
        q = F.linear(h, self.wq).view(n_batch, n_tokens, c.n_head, c.head_dim)
        k = F.linear(h, self.wk).view(n_batch, n_tokens, c.n_kv, c.head_dim)
        v = F.linear(h, self.wv).view(n_batch, n_tokens, c.n_kv, c.head_dim).transpose(1, 2)
        q = rope(rms_norm(q, self.q_norm, c.eps).transpose(1, 2), cos, sin).to(v.dtype)
        k = rope(rms_norm(k, self.k_norm, c.eps).transpose(1, 2), cos, sin).to(v.dtype)
        repeats = c.n_head // c.n_kv
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.linear(y.transpose(1, 2).reshape(n_batch, n_tokens, -1), self.wo)

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [N, D] -> weights [N, E] (zero where not selected, sum 1), probabilities [N, E]; both float32"""
        with torch.autocast(device_type=h.device.type, enabled=False):
            p = F.softmax(F.linear(h.float(), self.router.float()), -1)
        threshold = torch.topk(p.detach(), self.config.top_k, -1, sorted=False)[0].amin(-1, keepdim=True)
        weights = torch.where(p >= threshold, p, torch.zeros_like(p))
        return weights / weights.sum(-1, keepdim=True), p

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] -> output, balance loss (1 when balanced), share of tokens that use each expert [E]

        The balance loss is over the whole batch, so that a single domain may use its own experts.
        """
        c = self.config
        x = self.attention(x, cos, sin)
        n_rows = x.shape[0] * x.shape[1]
        h = rms_norm(x, self.ffn_norm, c.eps).view(n_rows, c.n_embd)
        weights, p = self.route(h)
        load = (weights.detach() > 0).float().mean(0)
        balance = c.n_expert * torch.sum(load / c.top_k * p.mean(0))
        gate_up = F.linear(h, self.wgu.view(2 * c.n_expert * c.n_ff, c.n_embd))
        gate, up = gate_up.view(n_rows, 2, c.n_expert, c.n_ff).unbind(1)
        a = F.silu(gate) * up * weights.to(gate_up.dtype)[:, :, None]
        hidden_units = c.n_expert * c.n_ff
        y = a.reshape(n_rows, hidden_units) @ self.wd.view(hidden_units, c.n_embd).to(a.dtype)
        return x + y.view(x.shape), balance, load


class Model(nn.Module):
    """The whole model; the random start depends on the order of the parameters."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _normal(config.vocab, config.n_embd, std=0.1)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm_f = nn.Parameter(torch.ones(config.n_embd))
        self.head = nn.Parameter(torch.randn(config.vocab, config.n_embd) * 0.1 * config.n_embd**-0.5)
        dim = config.head_dim
        frequencies = config.rope_base ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(config.ctx_meta).double(), frequencies)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def hidden(
        self, tokens: Tensor, layer_forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = Layer.forward
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, T] -> last hidden state [B, T, D], sum of the balance losses, loads [layers, E]

        `layer_forward` is Layer.forward or a compiled version of it.
        """
        n_tokens = tokens.shape[1]
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[:n_tokens], self.sin[:n_tokens]
        balance_sum = torch.zeros((), device=x.device)
        loads = []
        for layer in self.layers:
            x, balance, load = layer_forward(layer, x, cos, sin)
            balance_sum = balance_sum + balance
            loads.append(load)
        return rms_norm(x, self.norm_f, self.config.eps), balance_sum, torch.stack(loads)


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token."""
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
