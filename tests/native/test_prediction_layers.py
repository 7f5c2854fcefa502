"""Models with extra layers that predict several tokens (MTP): they load, and write what they write without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from test_geometry_models import small

import pyhotexperts as phx

N_LAYER = 4


def with_prediction_layer(source: Path, target: Path) -> Path:
    """A copy of a model with one more layer, like the last one, which is there for prediction."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == f"{architecture}.block_count":
            value += 1
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name.startswith(f"blk.{N_LAYER - 1}."):
            name = tensor.name.replace(f"blk.{N_LAYER - 1}.", f"blk.{N_LAYER}.")
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    n_embd = reader.fields[f"{architecture}.embedding_length"].contents()
    writer.add_tensor(f"blk.{N_LAYER}.nextn.eh_proj.weight", np.zeros((n_embd, 2 * n_embd), np.float32))
    for norm in ("enorm", "hnorm"):
        writer.add_tensor(f"blk.{N_LAYER}.nextn.{norm}.weight", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_prediction_layers_are_left_out(make_model: Any, tmp_path: Path) -> None:
    g = small(make_model, "glm-4.5-air")
    g = replace(g, n_ff_shared=g.n_ff * g.n_shared)  # type: ignore[type-var, attr-defined]
    plain = tmp_path / "plain.gguf"
    make_model.write("glm-4.5-air", g, plain)
    extended = with_prediction_layer(plain, tmp_path / "extended.gguf")
    assert extended.stat().st_size > plain.stat().st_size * 1.1
    outcomes = []
    for path in (plain, extended):
        with phx.Model(path, n_ctx=256, n_threads=1) as model:
            tokens = model.generate([5, 6, 7], temperature=0, max_tokens=12).tokens
            outcomes.append((tokens, model.info.n_layer, model.record_routing([5, 6, 7]).layers))
    assert outcomes[0] == outcomes[1]
