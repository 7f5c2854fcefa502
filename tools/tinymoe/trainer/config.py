"""The shape of the model. Needs nothing but Python, so that the GGUF writer can be used without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are tinymoe's."""

    n_layer: int = 6
    n_embd: int = 256
    n_head: int = 4
    head_dim: int = 64
    n_kv: int = 2  # heads for keys and values
    n_expert: int = 64
    top_k: int = 8  # experts used per token
    n_ff: int = 128  # hidden units of one expert
    vocab: int = 8192
    rope_base: float = 10000.0
    eps: float = 1e-6  # of the RMS norms
    ctx_meta: int = 2048  # context length written to the GGUF; training uses --ctx


# For trying the scripts on a CPU; it learns nothing useful.
TINY = ModelConfig(n_layer=2, n_embd=64, n_head=2, head_dim=32, n_kv=1, n_expert=16, top_k=4, n_ff=32)
