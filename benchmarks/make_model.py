"""Write a geometry model: a GGUF with the exact tensor shapes and types of a real mixture-of-experts model, random
weights and realistic expert routing.

    python benchmarks/make_model.py qwen3-30b-a3b 30b.gguf
    python benchmarks/make_model.py qwen3.5-122b-a10b 122b.gguf --n-layer 36
    python benchmarks/make_model.py gpt-oss-120b 120b.gguf --split-max-size 20G

Decode speed of an offload mode depends on tensor shapes, quantisation types and on which experts each token selects,
not on what the text says; so such a file times offload modes without any download. It is good for speed and hit rates
only: layers share their random bytes and outputs are scaled to almost nothing, so a wrong expert would not show.

Routing is built in. Each token id carries a latent vector in its first 65 embedding dimensions: a constant, a part for
the prompt it belongs to (every SEGMENT consecutive ids), a slow and a fast first-order autoregressive part, and noise.
Every router is a random projection of that vector, and attention and experts add almost nothing to the residual stream,
so the last layer still sees it. FEED CONSECUTIVE TOKEN IDS: i, i + 1, ... Then experts repeat, drift and change with
the prompt as published traces do:

    routing   like (published)       next token's experts     LRU hit rate at resident experts per layer
                                     were selected before
    A 128/8   Qwen3-30B-A3B          44 %                     24: 74 %, 49: 91 %
    B 512/10  Qwen3.8-Flash-Next                              31: 44 %, 62: 62 %, 93: 72 %
    C 256/8   GLM-5.2                35 %                     41: 55 % (Qwen3.5-122B-A10B)

The parameters were fitted to these by random search. gpt-oss (128/4), GLM-4.5-Air (128/8) and DeepSeek-V2 (64/6 and
160/6) use those of A, since no full trace of theirs is published. The figures are held by
tests/native/test_geometry_models.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import gguf
    import numpy as np
    import numpy.typing as npt
    from gguf import GGMLQuantizationType as Type
except ImportError as e:
    sys.exit(f"make_model.py needs gguf and numpy: pip install gguf numpy ({e})")

SEGMENT = 1024  # token ids of one prompt
WIDTH = 16  # dimensions of each latent part
N_LATENT = 1 + 4 * WIDTH
QUIET = 0.02  # scale of what attention and experts add to the residual stream
PATTERN_BLOCKS = 400_003  # a prime: the repeated random pattern does not line up with rows

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Routing:
    """Standard deviations of the parts of a router's logits, beside noise of 1, and time constants in tokens."""

    constant: float
    prompt: float
    slow: float
    slow_tokens: float
    fast: float
    fast_tokens: float


A = Routing(1.24, 1.22, 1.15, 42, 1.30, 1.6)
B = Routing(0.544, 0.450, 2.003, 40.6, 1.645, 0.61)
C = Routing(0.46, 0.80, 0.43, 150, 2.90, 3.3)


@dataclass(frozen=True)
class Geometry:
    """The shape of a model. Sizes in elements."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head: int
    n_expert: int
    top_k: int
    n_ff: int  # of an expert
    n_vocab: int
    routing: Routing
    experts: Type = Type.Q4_K
    down: tuple[Type, ...] = (Type.Q4_K, Type.Q6_K)  # of the layers in turn
    n_shared: int = 0  # shared experts
    n_ff_shared: int = 0
    n_dense: int = 0  # first layers without experts
    n_ff_dense: int = 0
    delta: tuple[int, int, int] | None = None  # linear attention: state size, groups, heads
    q_lora: int = 0  # multi-head latent attention
    kv_lora: int = 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has routed experts."""
        return layer >= self.n_dense


QWEN3 = Geometry("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151_936, A)
QWEN35 = Geometry("qwen35moe", 48, 3072, 32, 2, 256, 256, 8, 1024, 248_320, C, n_shared=1, n_ff_shared=1024)
GPT_OSS = Geometry("gpt-oss", 36, 2880, 64, 8, 64, 128, 4, 2880, 201_088, A, experts=Type.MXFP4, down=(Type.MXFP4,))
GLM = Geometry("glm4moe", 46, 4096, 96, 8, 128, 128, 8, 1408, 151_552, A, down=(Type.Q5_0, Type.Q8_0), n_shared=1)
DEEPSEEK = Geometry(
    "deepseek2", 27, 2048, 16, 16, 128, 64, 6, 1408, 102_400, A, down=(Type.Q5_0, Type.Q8_0), n_shared=2
)

MODELS = {
    "qwen3-30b-a3b": QWEN3,
    "qwen3-235b-a22b": replace(QWEN3, n_layer=94, n_embd=4096, n_head=64, n_ff=1536),
    "qwen3.5-35b-a3b": replace(
        QWEN35, n_layer=40, n_embd=2048, n_head=16, n_ff=512, n_ff_shared=512, delta=(128, 16, 32)
    ),
    "qwen3.5-122b-a10b": replace(QWEN35, delta=(128, 16, 64)),
    "gpt-oss-120b": GPT_OSS,
    "glm-4.5-air": replace(GLM, n_dense=1, n_ff_dense=10_944, n_ff_shared=1408),
    "deepseek-v2-lite": replace(DEEPSEEK, n_dense=1, n_ff_dense=10_944, n_ff_shared=2816, kv_lora=512),
    "deepseek-v2": replace(
        DEEPSEEK,
        n_layer=60,
        n_embd=5120,
        n_head=128,
        n_head_kv=128,
        n_expert=160,
        n_ff=1536,
        down=(Type.Q4_K, Type.Q6_K),
        n_dense=1,
        n_ff_dense=12_288,
        n_ff_shared=3072,
        q_lora=1536,
        kv_lora=512,
    ),
}


# ---------------------------------------------------------------- routing


def latents(n_tokens: int, routing: Routing) -> Array:
    """float32[n_tokens, N_LATENT]: the latent vector of each token id."""
    rng = np.random.default_rng(7)

    def drifting(tokens: float) -> Array:
        keep = np.float32(np.exp(-1 / tokens))
        x = rng.standard_normal((n_tokens, WIDTH)).astype(np.float32)
        new = np.float32(np.sqrt(1 - keep * keep))
        for i in range(1, n_tokens):
            x[i] = keep * x[i - 1] + new * x[i]
        return x

    prompts = rng.standard_normal((-(-n_tokens // SEGMENT), WIDTH))
    parts = [
        np.ones((n_tokens, 1)),
        np.repeat(prompts, SEGMENT, axis=0)[:n_tokens],
        drifting(routing.slow_tokens),
        drifting(routing.fast_tokens),
        rng.standard_normal((n_tokens, WIDTH)),
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def router(n_expert: int, n_embd: int, routing: Routing, layer: int) -> Array:
    """float32[n_expert, n_embd]: the router of a layer, zero outside the latent dimensions."""
    rng = np.random.default_rng(1000 + layer)
    w = np.zeros((n_expert, n_embd), np.float32)
    w[:, :1] = rng.standard_normal((n_expert, 1)) * routing.constant
    for j, deviation in enumerate((routing.prompt, routing.slow, routing.fast, 1.0)):
        columns = slice(1 + j * WIDTH, 1 + (j + 1) * WIDTH)
        w[:, columns] = rng.standard_normal((n_expert, WIDTH)) * deviation / np.sqrt(WIDTH)
    return w


def selected(g: Geometry, layer: int, z: Array) -> npt.NDArray[np.int64]:
    """int64[n_tokens, top_k]: the experts that tokens with these latent vectors select, the best first."""
    logits = z @ router(g.n_expert, g.n_embd, g.routing, layer)[:, :N_LATENT].T
    return np.argsort(-logits, axis=1, kind="stable")[:, : g.top_k]


# ---------------------------------------------------------------- random weights


def random_blocks(rng: np.random.Generator, n: int, kind: Type, gain: float) -> npt.NDArray[np.uint8]:
    """uint8[n, block bytes]: random quantised blocks, mean zero, standard deviation about 0.015 times gain."""
    b = rng.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)

    def half(value: float) -> npt.NDArray[np.uint8]:
        return np.frombuffer(np.float16(value * gain).tobytes(), np.uint8)

    if kind == Type.Q8_0:
        b[:, :2] = half(2.0e-4)
    elif kind == Type.Q5_0:
        b[:, :2] = half(1.6e-3)
    elif kind == Type.Q4_K:
        b[:, :2], b[:, 2:4] = half(1.0e-4), half(7.5e-4)
    elif kind == Type.Q6_K:
        b[:, 208:210] = half(1.5e-5)
    elif kind == Type.MXFP4:
        b[:, 0] = 119 + round(np.log2(gain))  # the exponent alone: 2 ** (119 - 127)
    else:
        raise ValueError(f"no random blocks of type {kind.name}")
    return b


class Writer:
    """Writes the tensors of a geometry model. Large ones repeat one random pattern, and equal ones share memory."""

    def __init__(self, path: Path, name: str, g: Geometry, split_max_size: int) -> None:
        self.gguf = gguf.GGUFWriter(path, g.architecture, split_max_size=split_max_size)
        self.gguf.add_name(f"{name} geometry, random weights")
        self.rng = np.random.default_rng(0)
        self._made: dict[tuple[tuple[int, ...], Type, float], npt.NDArray[np.uint8]] = {}

    def quantised(self, name: str, shape: tuple[int, ...], kind: Type = Type.Q8_0, gain: float = 1.0) -> None:
        """A random tensor of shape (..., n_in)."""
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise ValueError(f"{name}: rows of {shape[-1]} elements cannot have type {kind.name}")
        key = (shape, kind, gain)
        if key not in self._made:
            n = int(np.prod(shape)) // per_block
            pattern = random_blocks(self.rng, min(n, PATTERN_BLOCKS), kind, gain)
            blocks = np.tile(pattern, (-(-n // len(pattern)), 1))[:n]
            self._made[key] = blocks.reshape(*shape[:-1], shape[-1] // per_block * size)
        self.gguf.add_tensor(name, self._made[key], raw_dtype=kind)

    def floats(self, name: str, values: npt.ArrayLike) -> None:
        """A float32 tensor."""
        self.gguf.add_tensor(name, np.asarray(values, np.float32))

    def ones(self, name: str, n: int) -> None:
        """Weights of a norm."""
        self.floats(name, np.ones(n))

    def embedding(self, g: Geometry) -> None:
        """Token embeddings: the latent vectors, and noise in all other dimensions."""
        z = latents(g.n_vocab, g.routing)
        rows = np.empty((g.n_vocab, g.n_embd // 32 * 34), np.uint8)
        for at in range(0, g.n_vocab, 8192):
            part = z[at : at + 8192]
            x = self.rng.standard_normal((len(part), g.n_embd), dtype=np.float32)
            x[:, :N_LATENT] = part
            rows[at : at + len(part)] = gguf.quants.quantize(x, Type.Q8_0)
        self.gguf.add_tensor("token_embd.weight", rows, raw_dtype=Type.Q8_0)

    def finish(self, progress: bool) -> None:
        """Write the file or files."""
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file(progress=progress)
        self.gguf.close()


# ---------------------------------------------------------------- parts of a model


def write_metadata(w: gguf.GGUFWriter, g: Geometry) -> None:
    """The key-value pairs."""
    w.add_block_count(g.n_layer)
    w.add_context_length(131_072)
    w.add_embedding_length(g.n_embd)
    w.add_feed_forward_length(g.n_ff_dense or g.n_ff)
    w.add_head_count(g.n_head)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_expert_count(g.n_expert)
    w.add_expert_used_count(g.top_k)
    w.add_expert_feed_forward_length(g.n_ff)
    w.add_tokenizer_model("none")
    w.add_vocab_size(g.n_vocab)
    if g.kv_lora:  # keys and values are latent: one "head" for the cache
        rope = g.head // 2
        w.add_head_count_kv(1)
        w.add_key_length(g.kv_lora + rope)
        w.add_value_length(g.kv_lora)
        w.add_key_length_mla(g.head + rope)
        w.add_value_length_mla(g.head)
        w.add_rope_dimension_count(rope)
        w.add_kv_lora_rank(g.kv_lora)
        if g.q_lora:
            w.add_q_lora_rank(g.q_lora)
    else:
        w.add_head_count_kv(g.n_head_kv)
        w.add_key_length(g.head)
        w.add_value_length(g.head)
    if g.n_dense:
        w.add_leading_dense_block_count(g.n_dense)
    if g.architecture in ("glm4moe", "deepseek2"):
        w.add_expert_shared_count(g.n_shared)
        w.add_expert_weights_scale(1.0)
        w.add_expert_weights_norm(True)
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if g.architecture == "gpt-oss":
        w.add_sliding_window(128)
    if g.architecture == "glm4moe":
        w.add_rope_dimension_count(64)
    if g.delta:
        state, groups, heads = g.delta
        w.add_expert_shared_feed_forward_length(g.n_ff_shared)
        w.add_rope_dimension_count(64)
        w.add_rope_dimension_sections([11, 11, 10, 0])
        w.add_ssm_conv_kernel(4)
        w.add_ssm_inner_size(heads * state)
        w.add_ssm_state_size(state)
        w.add_ssm_time_step_rank(heads)
        w.add_ssm_group_count(groups)
        w.add_uint32(f"{g.architecture}.full_attention_interval", 4)


def write_attention(w: Writer, g: Geometry, b: str) -> None:
    """Softmax attention with grouped keys and values."""
    q_width = g.n_head * g.head * (2 if g.delta else 1)  # with linear attention elsewhere, queries carry a gate
    for name, n_out in (("q", q_width), ("k", g.n_head_kv * g.head), ("v", g.n_head_kv * g.head)):
        w.quantised(f"{b}attn_{name}.weight", (n_out, g.n_embd))
        if g.architecture == "gpt-oss":
            w.floats(f"{b}attn_{name}.bias", np.zeros(n_out))
    w.quantised(b + "attn_output.weight", (g.n_embd, g.n_head * g.head), gain=QUIET)
    if g.architecture == "gpt-oss":
        w.floats(b + "attn_output.bias", np.zeros(g.n_embd))
        w.floats(b + "attn_sinks.weight", np.zeros(g.n_head))
    elif g.architecture != "glm4moe":
        w.ones(b + "attn_q_norm.weight", g.head)
        w.ones(b + "attn_k_norm.weight", g.head)


def write_linear_attention(w: Writer, g: Geometry, b: str) -> None:
    """Gated delta net."""
    assert g.delta
    state, groups, heads = g.delta
    keys, values = state * groups, state * heads
    w.quantised(b + "attn_qkv.weight", (2 * keys + values, g.n_embd))
    w.quantised(b + "attn_gate.weight", (values, g.n_embd))
    w.quantised(b + "ssm_beta.weight", (heads, g.n_embd))
    w.quantised(b + "ssm_alpha.weight", (heads, g.n_embd))
    w.floats(b + "ssm_conv1d.weight", w.rng.standard_normal((2 * keys + values, 4)) * 0.3)
    w.floats(b + "ssm_dt.bias", np.full(heads, 0.1))
    w.floats(b + "ssm_a", np.full(heads, -1.0))
    w.ones(b + "ssm_norm.weight", state)
    w.quantised(b + "ssm_out.weight", (g.n_embd, values), gain=QUIET)


def write_latent_attention(w: Writer, g: Geometry, b: str) -> None:
    """Multi-head latent attention."""
    rope = g.head // 2
    width = g.n_head * (g.head + rope)
    if g.q_lora:
        w.quantised(b + "attn_q_a.weight", (g.q_lora, g.n_embd))
        w.ones(b + "attn_q_a_norm.weight", g.q_lora)
        w.quantised(b + "attn_q_b.weight", (width, g.q_lora))
    else:
        w.quantised(b + "attn_q.weight", (width, g.n_embd))
    w.quantised(b + "attn_kv_a_mqa.weight", (g.kv_lora + rope, g.n_embd))
    w.ones(b + "attn_kv_a_norm.weight", g.kv_lora)
    w.quantised(b + "attn_k_b.weight", (g.n_head, g.kv_lora, g.head))
    w.quantised(b + "attn_v_b.weight", (g.n_head, g.head, g.kv_lora))
    w.quantised(b + "attn_output.weight", (g.n_embd, g.n_head * g.head), gain=QUIET)


def write_dense(w: Writer, g: Geometry, b: str, suffix: str, n_ff: int) -> None:
    """Gate, up and down of a dense layer or of shared experts."""
    w.quantised(f"{b}ffn_gate{suffix}.weight", (n_ff, g.n_embd))
    w.quantised(f"{b}ffn_up{suffix}.weight", (n_ff, g.n_embd))
    w.quantised(f"{b}ffn_down{suffix}.weight", (g.n_embd, n_ff), gain=QUIET)


def write_experts(w: Writer, g: Geometry, b: str, layer: int) -> None:
    """Router and routed experts."""
    w.floats(b + "ffn_gate_inp.weight", router(g.n_expert, g.n_embd, g.routing, layer))
    w.quantised(b + "ffn_gate_exps.weight", (g.n_expert, g.n_ff, g.n_embd), g.experts)
    w.quantised(b + "ffn_up_exps.weight", (g.n_expert, g.n_ff, g.n_embd), g.experts)
    w.quantised(b + "ffn_down_exps.weight", (g.n_expert, g.n_embd, g.n_ff), g.down[layer % len(g.down)], QUIET)
    if g.architecture == "gpt-oss":
        w.floats(b + "ffn_gate_inp.bias", np.zeros(g.n_expert))
        for name, n_out in (("gate", g.n_ff), ("up", g.n_ff), ("down", g.n_embd)):
            w.floats(f"{b}ffn_{name}_exps.bias", np.zeros((g.n_expert, n_out)))
    if g.architecture in ("glm4moe", "deepseek2"):
        w.floats(b + "exp_probs_b.bias", np.zeros(g.n_expert))
    if g.delta:
        w.floats(b + "ffn_gate_inp_shexp.weight", w.rng.standard_normal(g.n_embd) * 0.02)
    if g.n_shared:
        write_dense(w, g, b, "_shexp", g.n_ff_shared)


def write(name: str, g: Geometry, path: Path, split_max_size: int = 0, progress: bool = False) -> None:
    """Write a model of this shape; split_max_size: bytes of a shard, 0 = one file."""
    w = Writer(path, name, g, split_max_size)
    write_metadata(w.gguf, g)
    w.embedding(g)
    w.quantised("output.weight", (g.n_vocab, g.n_embd), Type.Q8_0 if g.n_embd % 256 else Type.Q6_K)
    w.ones("output_norm.weight", g.n_embd)
    second_norm = "ffn_norm" if g.architecture in ("qwen3moe", "deepseek2") else "post_attention_norm"
    for i in range(g.n_layer):
        b = f"blk.{i}."
        w.ones(b + "attn_norm.weight", g.n_embd)
        w.ones(f"{b}{second_norm}.weight", g.n_embd)
        attention: Callable[[Writer, Geometry, str], None] = write_attention
        if g.kv_lora:
            attention = write_latent_attention
        elif g.delta and (i + 1) % 4:
            attention = write_linear_attention
        attention(w, g, b)
        if g.has_experts(i):
            write_experts(w, g, b, i)
        else:
            write_dense(w, g, b, "", g.n_ff_dense)
    w.finish(progress)


def written(path: Path) -> Iterator[Path]:
    """The files that `write` made."""
    yield from [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))


def size(text: str) -> int:
    """Bytes, from a number with M or G."""
    if text[-1:] not in ("M", "G") or not text[:-1].isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500M or 20G")
    return int(text[:-1]) * 1000 ** {"M": 2, "G": 3}[text[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS, help="the model whose shapes to take")
    parser.add_argument("out", type=Path, help="the GGUF to write")
    parser.add_argument("--n-layer", type=int, help="fewer layers than the model has")
    parser.add_argument(
        "--split-max-size", type=size, default=0, metavar="N(M|G)", help="write shards of at most this size"
    )
    a = parser.parse_args()
    g = MODELS[a.name]
    if a.n_layer is not None and not 1 <= a.n_layer <= g.n_layer:
        parser.error(f"--n-layer must be from 1 to {g.n_layer}, not {a.n_layer}")
    if a.name == "deepseek-v2-lite" and a.n_layer not in (None, 26, 27):
        parser.error("--n-layer: llama.cpp tells deepseek-v2-lite from deepseek-v2 by its 26 or 27 layers")
    try:
        write(a.name, replace(g, n_layer=a.n_layer or g.n_layer), a.out, a.split_max_size, progress=sys.stderr.isatty())
    except OSError as e:
        sys.exit(f"cannot write {a.out}: {e.strerror}")
    for path in written(a.out):
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
