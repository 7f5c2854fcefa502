"""Write the parameters of tinymoe as a qwen3moe GGUF, and read them back.

Quantised matrices, router and norms in F32. Parameter names are those of trainer/model.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from trainer.config import ModelConfig

_BASENAME = "TinyMoE"
_SIZE_LABEL = "43M-A8M"
_DESCRIPTION = (
    "Demo and test model: small mixture of experts in the qwen3moe layout, trained from scratch on freely "
    "licensed documentation, prose, dictionaries and code from Debian packages and PyPI; see SOURCES.md."
)

# (parameter, tensor, quantised) of the whole model and of a layer, in the order they are written
_MODEL_TENSORS = (
    ("embed", "token_embd", True),
    ("norm_f", "output_norm", False),
    ("head", "output", True),
)
_LAYER_TENSORS = (
    ("attn_norm", "attn_norm", False),
    ("wq", "attn_q", True),
    ("wk", "attn_k", True),
    ("wv", "attn_v", True),
    ("wo", "attn_output", True),
    ("q_norm", "attn_q_norm", False),
    ("k_norm", "attn_k_norm", False),
    ("ffn_norm", "ffn_norm", False),
    ("router", "ffn_gate_inp", False),
)


def write_gguf(
    path: str | Path,
    state: Mapping[str, np.ndarray],
    config: ModelConfig,
    tokenizer_json: str | Path,
    qtype: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> None:
    """Write a model; `path` appears only when it is complete.

    Parameters
    ----------
    path
        File to write.
    state
        Parameters by name, float32.
    config
        Shape of the model.
    tokenizer_json
        Tokenizer in the format of Hugging Face `tokenizers`: byte-level BPE, token 0 is BOS, EOS and padding.
    qtype
        Type of the quantised matrices: Q8_0, or F32 for comparisons.
    """
    temporary = f"{path}.tmp"
    writer = gguf.GGUFWriter(temporary, "qwen3moe")
    _add_metadata(writer, config, qtype)
    _add_tokenizer(writer, tokenizer_json)

    def put(name: str, array: np.ndarray, quantised: bool) -> None:
        array = np.ascontiguousarray(array, dtype=np.float32)
        if quantised and qtype != GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(name, array)

    for parameter, tensor, quantised in _MODEL_TENSORS:
        put(f"{tensor}.weight", state[parameter], quantised)
    for layer in range(config.n_layer):
        prefix, block = f"layers.{layer}", f"blk.{layer}"
        for parameter, tensor, quantised in _LAYER_TENSORS:
            put(f"{block}.{tensor}.weight", state[f"{prefix}.{parameter}"], quantised)
        gate, up = state[f"{prefix}.wgu"]
        put(f"{block}.ffn_gate_exps.weight", gate, True)
        put(f"{block}.ffn_up_exps.weight", up, True)
        down = np.swapaxes(state[f"{prefix}.wd"], 1, 2)  # [experts, n_ff, n_embd] -> [experts, n_embd, n_ff]
        put(f"{block}.ffn_down_exps.weight", down, True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)


def _add_metadata(writer: gguf.GGUFWriter, config: ModelConfig, qtype: GGMLQuantizationType) -> None:
    quantised = qtype == GGMLQuantizationType.Q8_0
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"{_BASENAME} {_SIZE_LABEL}")
    writer.add_basename(_BASENAME)
    writer.add_size_label(_SIZE_LABEL)
    writer.add_description(_DESCRIPTION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.ctx_meta)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_ff * config.top_k)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_expert_count(config.n_expert)
    writer.add_expert_used_count(config.top_k)
    writer.add_expert_feed_forward_length(config.n_ff)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer_json: str | Path) -> None:
    tokenizer = json.loads(Path(tokenizer_json).read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for token in tokenizer["added_tokens"]:
        types[token["id"]] = gguf.TokenType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token.encode("utf-8") for token in tokens])
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def read_gguf(path: str | Path, n_layer: int) -> dict[str, np.ndarray]:
    """Return the parameters that write_gguf wrote, as float32."""
    tensors = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(path).tensors
    }
    state = {parameter: tensors[f"{tensor}.weight"] for parameter, tensor, _ in _MODEL_TENSORS}
    for layer in range(n_layer):
        prefix, block = f"layers.{layer}", f"blk.{layer}"
        for parameter, tensor, _ in _LAYER_TENSORS:
            state[f"{prefix}.{parameter}"] = tensors[f"{block}.{tensor}.weight"]
        gate_up = [tensors[f"{block}.ffn_gate_exps.weight"], tensors[f"{block}.ffn_up_exps.weight"]]
        state[f"{prefix}.wgu"] = np.stack(gate_up)
        state[f"{prefix}.wd"] = np.swapaxes(tensors[f"{block}.ffn_down_exps.weight"], 1, 2)
    return state
