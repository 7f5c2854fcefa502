"""Muon: momentum whose update is orthogonalised, for the matrices of attention and experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalise, roughly, a batch of matrices [N, rows, columns] with rows <= columns."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        m = x @ x.mT
        x = a * x + (b * m + c * (m @ m)) @ x
    return x


def _momentum_update(grad: Tensor, buffer: Tensor, scale: Tensor, momentum: Tensor, lr: Tensor) -> Tensor:
    buffer.lerp_(grad, 1 - momentum)
    update = grad.lerp(buffer, momentum)
    tall = update.shape[-2] > update.shape[-1]
    update = newton_schulz(update.mT if tall else update)
    return (update.mT if tall else update).float() * (scale * lr)


class Muon:
    """Treats parameters of one matrix shape together; an expert tensor [..., rows, columns] is many matrices.

    Parameters
    ----------
    params
        Pairs of a parameter and the factor on its learning rate.
    lr, weight_decay
        Learning rate and decay (which is multiplied by the learning rate).
    compiled
        Compile the update with torch.compile.
    """

    def __init__(
        self,
        params: Iterable[tuple[Tensor, float]],
        lr: float,
        weight_decay: float,
        compiled: bool,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        by_shape: dict[tuple[int, int], list[tuple[Tensor, float]]] = {}
        for param, factor in params:
            rows, columns = param.shape[-2:]
            by_shape.setdefault((rows, columns), []).append((param, factor))
        self.groups = {shape: [param for param, _ in group] for shape, group in by_shape.items()}
        self.buffers = {}
        self.scales = {}
        for shape, group in by_shape.items():
            factors = []
            for param, factor in group:
                factors.append(torch.full((_n_matrices(param), 1, 1), factor, device=param.device))
            self.scales[shape] = torch.cat(factors)
            self.buffers[shape] = torch.zeros(len(self.scales[shape]), *shape, device=factors[0].device)
        self._update = torch.compile(_momentum_update, dynamic=False) if compiled else _momentum_update

    def reset(self) -> None:
        """Forget the momentum."""
        for buffer in self.buffers.values():
            buffer.zero_()

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float) -> None:
        """Update all parameters from their gradients; `lr_factor` is the value of the schedule."""
        lr = self.lr * lr_factor
        for shape, params in self.groups.items():
            grad = torch.cat([param.grad.reshape(-1, *shape) for param in params])
            update = self._update(
                grad,
                self.buffers[shape],
                self.scales[shape],
                torch.tensor(momentum, device=grad.device),
                torch.tensor(lr, device=grad.device),
            )
            parts = update.split([_n_matrices(param) for param in params])
            updates = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            torch._foreach_sub_(params, updates)


def _n_matrices(param: Tensor) -> int:
    return param.numel() // (param.shape[-2] * param.shape[-1])
