"""Tiny mixture-of-experts models with random weights, one for each form of layer that llama.cpp has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

N_EMBD, N_HEAD, N_FF, N_VOCAB, N_LAYER, N_EXPERT, TOP_K = 256, 4, 96, 120, 4, 12, 4
HEAD = N_EMBD // N_HEAD

# Architecture -> what is special about its layers.
ARCHITECTURES = {
    "llama": "gate, up, SwiGLU, down",
    "qwen2moe": "a shared expert with a gate of its own",
    "olmoe": "norms of whole queries and keys",
    "deepseek": "a dense first layer and shared experts",
    "gpt-oss": "biases of experts, a clamped activation, no norm before the experts",
    "llama4": "weights applied before the experts",
    "grovemoe": "a second set of experts that several experts share",
}
# Computed by GPU lane and CPU lane; the others, and grovemoe's second set of experts, are always staged.
LANES = {"llama", "qwen2moe", "olmoe", "deepseek", "grovemoe"}


def write(path: Path, architecture: str, expert_type: Type = Type.Q8_0, exact: bool = False) -> Path:
    """Write a model of the architecture; exact: the experts as F32, with the values that their type gives them."""
    rng = np.random.default_rng(3)
    w = gguf.GGUFWriter(path, architecture)

    def matrix(name: str, *shape: int, type: Type = Type.F32, scale: float = 0.08) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        if type == Type.F32:
            w.add_tensor(name, values)
        else:
            quantised = gguf.quants.quantize(values, type)
            if exact:
                w.add_tensor(name, gguf.quants.dequantize(quantised, type))
            else:
                w.add_tensor(name, quantised, raw_dtype=type)

    def ones(name: str, *shape: int) -> None:
        w.add_tensor(name, np.ones(shape, np.float32))

    w.add_block_count(N_LAYER)
    w.add_context_length(512)
    w.add_embedding_length(N_EMBD)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(HEAD)
    w.add_expert_count(N_EXPERT)
    w.add_expert_used_count(TOP_K)
    w.add_expert_feed_forward_length(N_FF)
    w.add_tokenizer_model("none")
    w.add_vocab_size(N_VOCAB)
    special: dict[str, Callable[[], None]] = {
        "qwen2moe": lambda: w.add_expert_shared_feed_forward_length(N_FF),
        "deepseek": lambda: (
            w.add_leading_dense_block_count(1),
            w.add_expert_shared_count(2),
            w.add_expert_weights_scale(1.0),
        ),
        "gpt-oss": lambda: w.add_sliding_window(64),
        "llama4": lambda: w.add_interleave_moe_layer_step(1),
        "grovemoe": lambda: (
            w.add_expert_chunk_feed_forward_length(N_FF),
            w.add_expert_group_scale(0.05),
            w.add_experts_per_group(2),
        ),
    }
    special.get(architecture, lambda: None)()

    matrix("token_embd.weight", N_VOCAB, N_EMBD, scale=1.0)
    ones("output_norm.weight", N_EMBD)
    matrix("output.weight", N_VOCAB, N_EMBD)
    for i in range(N_LAYER):
        b = f"blk.{i}."
        ones(b + "attn_norm.weight", N_EMBD)
        ones(b + ("post_attention_norm.weight" if architecture == "gpt-oss" else "ffn_norm.weight"), N_EMBD)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(b + name + ".weight", N_EMBD, N_EMBD)
            if architecture == "gpt-oss":
                matrix(b + name + ".bias", N_EMBD)
        if architecture == "gpt-oss":
            matrix(b + "attn_sinks.weight", N_HEAD)
        if architecture in ("olmoe", "grovemoe"):
            for name in ("attn_q_norm", "attn_k_norm"):
                ones(b + name + ".weight", N_EMBD if architecture == "olmoe" else HEAD)
        if architecture == "deepseek" and i == 0:
            feed_forward(matrix, b, "", N_FF)
            continue
        matrix(b + "ffn_gate_inp.weight", N_EXPERT, N_EMBD, scale=0.3)
        for name, shape in (("gate", (N_FF, N_EMBD)), ("up", (N_FF, N_EMBD)), ("down", (N_EMBD, N_FF))):
            matrix(f"{b}ffn_{name}_exps.weight", N_EXPERT, *shape, type=expert_type)
            if architecture == "gpt-oss":
                matrix(f"{b}ffn_{name}_exps.bias", N_EXPERT, shape[0])
            if architecture == "grovemoe":
                matrix(f"{b}ffn_{name}_chexps.weight", N_EXPERT // 2, *shape, type=expert_type)
        if architecture == "gpt-oss":
            matrix(b + "ffn_gate_inp.bias", N_EXPERT)
        if architecture == "qwen2moe":
            matrix(b + "ffn_gate_inp_shexp.weight", N_EMBD)
        if architecture in ("qwen2moe", "llama4", "deepseek"):
            feed_forward(matrix, b, "_shexp", 2 * N_FF if architecture == "deepseek" else N_FF)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def feed_forward(matrix: Callable[..., None], b: str, suffix: str, n_ff: int) -> None:
    """Gate, up and down of a dense or shared part."""
    matrix(f"{b}ffn_gate{suffix}.weight", n_ff, N_EMBD)
    matrix(f"{b}ffn_up{suffix}.weight", n_ff, N_EMBD)
    matrix(f"{b}ffn_down{suffix}.weight", N_EMBD, n_ff)
