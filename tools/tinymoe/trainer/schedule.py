"""Learning rate and momentum over the time of a run."""

from __future__ import annotations

import math

_WARM_UP_SHARE = 0.02
_FINAL_LR_SHARE = 0.01


def schedule(elapsed: float, total: float) -> tuple[float, float]:
    """Return the factor on the learning rates and Muon's momentum after `elapsed` of `total` seconds.

    Linear warm-up over 2 %, then a cosine down to 1 %; the momentum rises from 0.85 to 0.95 over 5 %.
    """
    progress = elapsed / total
    warm_up = min(1.0, (elapsed + 0.05) / (_WARM_UP_SHARE * total))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    lr_factor = warm_up * (_FINAL_LR_SHARE + (1 - _FINAL_LR_SHARE) * cosine)
    momentum = 0.85 + 0.10 * min(1.0, progress / 0.05)
    return lr_factor, momentum
